"""torchrun as a child of the launcher: `python -m fsdp_pretrain.launch.elastic_agent`, with torchrun's own arguments.

Three things differ. It leaves requests to stop to the launcher, which asks the ranks: Slurm and others signal every
process of a job, and torchrun would kill the ranks while they save. And it prints torchrun's report of failed ranks
only where it helps: not if the first failed rank ended with a code of `errors.Exit`, since that rank has printed the
reason, and as one line during a stop, when ranks and nodes lose each other. And it does not log how every rank ends.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from fsdp_pretrain.errors import Exit
from fsdp_pretrain.processes import die_with_parent

from .torchrun import LAUNCHER, STOP_SIGNALS

_EXPLAINED = {int(code) for code in Exit} - {int(Exit.UNEXPECTED)}


def main() -> int:
    """Run torchrun. Returns 1 for a failure that was explained; raises torchrun's errors otherwise."""
    die_with_parent(int(os.environ[LAUNCHER]))
    stop_signals: list[int] = []
    for number in STOP_SIGNALS:  # a handler, because the ranks would inherit SIG_IGN
        signal.signal(number, lambda received, _: stop_signals.append(received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # `Torchrun` blocked them
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger(api.__name__).setLevel(logging.CRITICAL)  # of every rank it ends; the report names the first
    try:
        run.main()
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode in _EXPLAINED:
            return int(Exit.UNEXPECTED)
        if not stop_signals:
            raise
        print(f"torchrun: rank {rank} ended with {first.exitcode} during the stop", file=sys.stderr, flush=True)
    except Exception as error:
        if not stop_signals:
            raise
        print(f"torchrun: during the stop: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    else:
        return int(Exit.COMPLETE)
    return int(Exit.UNEXPECTED)


if __name__ == "__main__":
    sys.exit(main())
