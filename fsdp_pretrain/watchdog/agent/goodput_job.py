"""Where the time of the run went, for metrics: a look once an hour, since it reads the whole record. No torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fsdp_pretrain.watchdog.detectors.base import Detector
from fsdp_pretrain.watchdog.notify.alarms import Alarms
from fsdp_pretrain.watchdog.probes.client import PeriodicProbe, ProbeServer

_FIRST, _EVERY = 300.0, 3600.0
"""Seconds of a start until the first account, and between two."""


class GoodputJob(Detector):
    """What `fsdp-pretrain goodput RUN` says, as fields of a `Snapshot`: `goodput`, `ettr`, `badput_seconds`."""

    def __init__(self, alarms: Alarms, looks: ProbeServer, run: Path) -> None:
        super().__init__(alarms)
        self._look = PeriodicProbe(looks, "account", every=_EVERY, deadline=_EVERY, run=str(run))
        self._look.due = time.monotonic() + _FIRST
        self.known: dict[str, Any] = {}

    def tick(self, now: float) -> None:
        answer = self._look.tick(now)
        if answer is not None and answer.error is None:
            self.known = answer.value
