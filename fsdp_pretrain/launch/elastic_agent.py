"""torchrun as a child of the launcher: `python -m fsdp_pretrain.launch.elastic_agent`, with torchrun's own arguments.

Four things differ. It leaves requests to stop to the launcher, which asks the ranks: Slurm and others signal every
process of a job, and torchrun would kill the ranks while they save. Ranks that torchrun itself ends, since another has
ended or a node joins, have as long for their save as a stop may take, where torchrun gives them 30 seconds. In place
of torchrun's report of failed ranks it prints one line on the first of them, unless that ended with another code than 1
of `errors.Exit`: then it has printed the reason. And it does not log how every rank ends.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from fsdp_pretrain.errors import Exit
from fsdp_pretrain.processes import collect_seldom, die_with_parent

from .torchrun import LAUNCHER, STOP_SIGNALS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

_EXPLAINED = {int(code) for code in Exit} - {int(Exit.UNEXPECTED)}


def cause_of(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The failure that came first, as (rank, failure): of those in the same second rather one by a signal than one with
    a code, and last one by the SIGTERM that torchrun sends to the others."""
    first = min(failure.timestamp for failure in error.failures.values())
    together = [(rank, failure) for rank, failure in error.failures.items() if failure.timestamp == first]
    return min(together, key=lambda one: (one[1].exitcode == -signal.SIGTERM, one[1].exitcode > 0))


def main() -> int:
    """Run torchrun. Returns 0, or 1 if a rank failed; raises torchrun's own errors."""
    die_with_parent(int(os.environ[LAUNCHER]))
    collect_seldom()
    stop_signals: list[int] = []
    for number in STOP_SIGNALS:  # a handler, because the ranks would inherit SIG_IGN
        signal.signal(number, lambda received, _: stop_signals.append(received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # `Torchrun` blocked them
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    close, patience = api.PContext.close, int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))

    def close_patiently(self: api.PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        close(self, death_sig, max(timeout, patience))

    api.PContext.close = close_patiently  # type: ignore[method-assign]
    logging.getLogger(api.__name__).setLevel(logging.CRITICAL)  # of every rank it ends; the report names the first
    try:
        run.main()
    except ChildFailedError as error:
        rank, first = cause_of(error)
        if first.exitcode not in _EXPLAINED:
            how = f"was killed by {first.signal_name()}" if first.exitcode < 0 else f"failed with {first.exitcode}"
            during = " during the stop" if stop_signals else ""
            print(f"torchrun: rank {rank} (pid {first.pid}) {how}{during}", file=sys.stderr, flush=True)
    except Exception as error:
        if not stop_signals:
            raise
        print(f"torchrun: during the stop: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    else:
        return int(Exit.COMPLETE)
    return int(Exit.UNEXPECTED)


if __name__ == "__main__":
    sys.exit(main())
