"""`python -m fsdp_pretrain.train`."""

import os

from fsdp_pretrain import master_port
from fsdp_pretrain.processes import collect_seldom, run_rank

if __name__ == "__main__":
    held = master_port.hold()
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        # Against fragmentation; torch reads it once.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # The transfers of a resume on another mesh wait for each other anyway; torch would warn of it in every process.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    collect_seldom()
    from fsdp_pretrain.job.main import main  # imports torch, which takes seconds

    run_rank(main)
