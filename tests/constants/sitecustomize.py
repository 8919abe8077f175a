"""Other values of the program's constants in every process of a test, by the variable `CONSTANTS`:
`{"module": {"NAME": value}}`. Python runs this file first in a new process; `zygote.py` runs it in a forked one. A module
that is not imported yet gets them when it is.
"""

import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

WANTED = json.loads(os.environ.get("CONSTANTS", "{}"))


def set_constants(module: ModuleType) -> None:
    """Set the constants of a module. Raises AttributeError if it has no such constant."""
    for name, value in WANTED[module.__name__].items():
        getattr(module, name)
        setattr(module, name, value)


class Setter:
    """Finds modules like Python itself, and sets the constants of those that are wanted after running them."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Of a wanted module."""
        spec = PathFinder.find_spec(name, path) if name in WANTED else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_set(module: ModuleType) -> None:
            run(module)
            set_constants(module)

        spec.loader.exec_module = run_and_set
        return spec


if WANTED:
    sys.meta_path.insert(0, Setter)
    for known in [sys.modules[name] for name in WANTED if name in sys.modules]:
        set_constants(known)
