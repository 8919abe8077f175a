"""`python -m fsdp_pretrain.bench`."""

import sys

from fsdp_pretrain.console import run_guarded
from fsdp_pretrain.processes import exit_now

from .main import main

if __name__ == "__main__":
    code = run_guarded(main)
    sys.stdout.flush()
    exit_now(code)  # after Ctrl-C a thread may still write a checkpoint; an orderly end of Python would abort over it
