"""`python -m fsdp_pretrain.train`."""

import sys

from fsdp_pretrain import master_port

if __name__ == "__main__":
    held = master_port.hold()
    from .main import main  # imports torch, which takes seconds

    sys.exit(main())
