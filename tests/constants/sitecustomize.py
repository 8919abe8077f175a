"""Other values of the program's constants in every process of a test, by the variable `CONSTANTS`:
`{"module": {"NAME": value}}`. Python runs this file first in a new process; `zygote.py` runs it in a forked one.
"""

import importlib
import json
import os
import sys

for module, values in json.loads(os.environ.get("CONSTANTS", "{}")).items():
    if module.startswith("fsdp_pretrain.train.") and module not in sys.modules:
        continue  # of ranks, which have imported it; others do without torch
    for name, value in values.items():
        if not hasattr(importlib.import_module(module), name):
            raise SystemExit(f"{module} has no constant {name}")
        setattr(importlib.import_module(module), name, value)
