"""`python -m fsdp_pretrain.bench`."""

import sys

from fsdp_pretrain.console import run_guarded

from .main import main

if __name__ == "__main__":
    sys.exit(run_guarded(main))
