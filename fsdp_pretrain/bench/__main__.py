"""`python -m fsdp_pretrain.bench`."""

import sys

from fsdp_pretrain.console import run_guarded
from fsdp_pretrain.processes import exit_now

from .main import main

if __name__ == "__main__":
    code = run_guarded(main)
    sys.stdout.flush()
    exit_now(
        code
    )  # threads may still run, which Python's orderly end would abort over: a save after Ctrl-C, a library's
