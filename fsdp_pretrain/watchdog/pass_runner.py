"""Runs the passes of the agent, which hang if the run directory does not answer.

A pass reads and writes the run directory and may block there, so it runs in a thread. If it takes too long, the main
thread, which touches only memory, sends an alarm on the channels, which have their own threads, and ends ranks that
make no progress, as the pass would have done.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial

from fsdp_pretrain.processes import NoAnswerError, Worker
from fsdp_pretrain.run.files import now
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.hang.rank_monitor import RankMonitor
from fsdp_pretrain.watchdog.notify.alarms import Alarm

INTERVAL = 2.0
"""Seconds between two passes. The end of a process is noticed at once."""
_ALLOWED = 20.0
"""Seconds that a pass may take."""


class PassRunner:
    """Runs the passes.

    Args:
        ranks: the ranks of this node.
        deadline: returns the seconds without progress after which ranks are ended; None: never.
        send: sends an alarm without touching the disk.
    """

    def __init__(self, ranks: RankMonitor, deadline: Callable[[], float | None], send: Callable[[Alarm], None]) -> None:
        self._ranks, self._deadline, self._send = ranks, deadline, send
        self._worker = Worker("pass")

    def run(self, act: Callable[[], None], more: float = 0.0) -> Alarm | None:
        """Run a pass; returns the alarm that was sent if it took too long. Exceptions are printed.

        Args:
            act: the pass.
            more: extra seconds that this pass may take.
        """
        begun, alarm = time.monotonic(), None
        with contextlib.suppress(NoAnswerError):
            self._worker.call(partial(_attempt, act), _ALLOWED + more)
            return None
        while True:
            alarm = alarm or self._open(time.monotonic() - begun)
            for rank in self._ranks.alive:
                rank.read_page()
            limit = self._deadline()
            if limit is not None and self._ranks.still() > max(limit, _ALLOWED):
                self._ranks.kill()
            with contextlib.suppress(NoAnswerError):
                self._worker.call(bool, INTERVAL)  # returns once the thread is free
                return alarm
            time.sleep(INTERVAL)

    def _open(self, seconds: float) -> Alarm:
        host, time_ = socket.gethostname(), now()
        alarm = Alarm(
            f"blind/{host}",
            Severity.CRIT,
            "open",
            f"the watchdog of {host} has waited for {human_time(seconds)}: the run directory does not answer",
            effect="nothing can be written there: no record, no checkpoint; ranks that stop are still ended",
            remedy="check the file system of the run directory on that host",
            opened=time_,
            changed=time_,
            facts={"host": host},
        )
        self._send(alarm)
        return alarm


def _attempt(act: Callable[[], None]) -> None:
    try:
        act()
    except Exception:  # a bug in one pass must not end the agent
        traceback.print_exc()
        sys.stderr.flush()
