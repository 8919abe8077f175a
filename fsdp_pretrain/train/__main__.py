"""`python -m fsdp_pretrain.train`."""

import os
import sys

if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
    # Against fragmentation; torch reads it once.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

from .main import main

if __name__ == "__main__":
    sys.exit(main())
