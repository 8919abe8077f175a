"""Goodput of the run, for metrics: computed once an hour, since it reads the whole record. No torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fsdp_pretrain.watchdog.detectors.base import Detector
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink
from fsdp_pretrain.watchdog.probes.client import PeriodicProbe, ProbeServer

_FIRST, _EVERY = 300.0, 3600.0
"""Seconds from the start to the first computation, and between two."""


class GoodputJob(Detector):
    """The result of `fsdp-pretrain goodput RUN`: `goodput` and `badput_seconds`."""

    def __init__(self, alarms: AlarmSink, probes: ProbeServer, run: Path) -> None:
        super().__init__(alarms)
        self._probe = PeriodicProbe(probes, "account", every=_EVERY, deadline=_EVERY, run=str(run))
        self._probe.due = time.monotonic() + _FIRST
        self._known: dict[str, Any] = {}

    def tick(self, now: float) -> None:
        answer = self._probe.tick(now)
        if answer is not None and answer.error is None:
            self._known = answer.value

    def figures(self) -> dict[str, Any]:
        """The result, once it is known."""
        return self._known
