"""`python -m fsdp_pretrain.replay REQUEST`: one rank of `fsdp-pretrain replay`, which starts it."""

import sys

from fsdp_pretrain import master_port
from fsdp_pretrain.console import run_guarded
from fsdp_pretrain.processes import collect_seldom, run_rank

if __name__ == "__main__":
    held = master_port.hold()
    collect_seldom()
    from .main import rank_main  # imports torch, which takes seconds

    run_rank(lambda: run_guarded(lambda: rank_main(sys.argv[1])))
