"""Looks after the agent itself: a run directory that hangs must not make it blind and mute. No torch.

A pass of the agent reads and writes the run directory, and blocks with it. This thread touches nothing but memory: it
sees that no pass ends, says so on the channels (which have their own threads), and ends ranks that make no progress
meanwhile, as the pass would have done.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from ..record.files import now
from ..severity import Severity
from ..units import human_time
from .alarms import Alarm
from .ranks import Ranks

_LEAST = 15.0
"""Seconds that a pass may always take."""
_PASSES = 10


class Blind(threading.Thread):
    """The agent's own watchdog.

    Args:
        ranks: of this node.
        interval: seconds between two passes.
        deadline: seconds without progress after which ranks are ended now; None: never.
        tell: sends an alarm without touching the disk.

    Attributes:
        alarm: that was sent because of the pass that goes on; None if there is none.
    """

    def __init__(
        self, ranks: Ranks, interval: float, deadline: Callable[[], float | None], tell: Callable[[Alarm], None]
    ) -> None:
        super().__init__(name="blind", daemon=True)
        self._ranks, self._interval, self._deadline, self._tell = ranks, interval, deadline, tell
        self._allowed = max(_LEAST if interval >= 0.5 else 5.0, _PASSES * interval)
        self._passed = time.monotonic()
        self.alarm: Alarm | None = None

    def passed(self) -> Alarm | None:
        """A pass has ended. The alarm that was sent meanwhile, if one was."""
        self._passed = time.monotonic()
        alarm, self.alarm = self.alarm, None
        return alarm

    def run(self) -> None:
        """Look until the process ends."""
        while True:
            time.sleep(self._interval)
            blind = time.monotonic() - self._passed
            if blind < self._allowed:
                continue
            if self.alarm is None:
                self.alarm = self._told(blind)
            still, limit = self._ranks.still(), self._deadline()
            if limit is not None and still > max(limit, self._allowed):
                self._ranks.kill()

    def _told(self, seconds: float) -> Alarm:
        host, time_ = socket.gethostname(), now()
        alarm = Alarm(
            f"blind/{host}",
            Severity.CRIT,
            "open",
            f"the watchdog of {host} has waited for {human_time(seconds)}: the run directory does not answer",
            effect="nothing can be written there: no record, no checkpoint; ranks that stop are still ended",
            remedy="see whether the file system of the run directory is well on that host",
            opened=time_,
            changed=time_,
            facts={"host": host},
        )
        self._tell(alarm)
        return alarm
