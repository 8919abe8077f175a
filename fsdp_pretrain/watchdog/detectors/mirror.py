"""Whether checkpoints and record reach the mirror, by the report of the uploader. No torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink
from fsdp_pretrain.watchdog.probes import looks
from fsdp_pretrain.watchdog.probes.periodic import PeriodicProbe

from .base import Detector

_SILENT = 180.0
"""Seconds without a beat, after which an uploader does not work."""
_LONG = 3600.0
"""Seconds after which a problem that may pass by itself is serious."""


class MirrorDetector(Detector):
    """Alarm `mirror`: nothing can be copied, or the process that copies does not work."""

    def __init__(self, alarms: AlarmSink, run: Path, segment: int) -> None:
        super().__init__(alarms)
        self._probe = PeriodicProbe(looks.mirror, run=str(run), segment=segment)
        self._run, self._beat = run, -1
        self._since: float | None = None

    def tick(self, now: float) -> None:
        """Start a due probe, and judge the answer of an earlier one."""
        answer = self._probe.tick(now)
        if answer is None or answer.error is not None:
            return
        report: dict[str, Any] = answer.value  # empty: the uploader may not have started yet
        newest, host = report.get("newest"), report.get("host", "the first node")
        if self._since is None or report.get("beat", -1) != self._beat:
            self._beat, self._since = report.get("beat", -1), now
        holds = f"its newest whole checkpoint: {'none' if newest is None else f'step {newest}'}"
        silent = now - self._since
        if report.get("problem"):
            seconds = max(0.0, time.time() - (report["since"] or time.time()))
            severity = Severity.CRIT if report["needs_person"] or seconds > _LONG else Severity.WARN
            cause = f"{host} cannot copy to the mirror for {human_time(seconds)}: {report['problem']}"
        elif silent > _SILENT:
            severity = Severity.WARN
            cause = f"the process that copies on {host} has done nothing for {human_time(silent)}"
        else:
            if report:
                self.resolve("mirror", f"the mirror answers; {holds}")
            return
        self.open(
            "mirror",
            severity,
            f"{cause}; {holds}",
            "training goes on; what is newer exists in the run directory only",
            f"check the storage and its credentials, and {self._run / 'mirror/log'}; the copy is tried again by "
            "itself, the newest checkpoint first",
            facts={"newest": newest},
        )
