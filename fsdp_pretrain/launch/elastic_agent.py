"""torchrun as a child of the launcher: `python -m fsdp_pretrain.launch.elastic_agent`, with torchrun's own arguments.

Two things differ. It leaves requests to stop to the launcher, which asks the ranks: Slurm and others signal every
process of a job, and torchrun would kill the ranks while they save. And it prints no report of failed ranks if the
first of them ended with a code of its own (`errors.Exit`): that rank has said why.
"""

from __future__ import annotations

import signal
import sys

from fsdp_pretrain.errors import Exit

from .torchrun import STOP_SIGNALS

_EXPLAINED = {int(code) for code in Exit} - {int(Exit.UNEXPECTED)}


def main() -> int:
    """Run torchrun. Returns 1 for a failure that was explained; raises torchrun's errors otherwise."""
    for number in STOP_SIGNALS:  # a handler, because the ranks would inherit SIG_IGN
        signal.signal(number, lambda *_: None)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main()
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode not in _EXPLAINED:
            raise
        return int(Exit.UNEXPECTED)
    return int(Exit.COMPLETE)


if __name__ == "__main__":
    sys.exit(main())
