"""`python -m fsdp_pretrain.bench`."""

import sys

from fsdp_pretrain.console import run_guarded
from fsdp_pretrain.processes import exit_now

from .main import main

if __name__ == "__main__":
    code = run_guarded(main)
    sys.stdout.flush()
    # Threads may still run, over which Python's orderly end would abort: a save's after Ctrl-C, a library's.
    exit_now(code)
