"""Whether checkpoints and record reach the mirror, by the reports of the uploaders. No torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink
from fsdp_pretrain.watchdog.probes.client import PeriodicProbe, ProbeServer

from .base import Detector

_SILENT = 180.0
"""Seconds without a beat, after which an uploader does not work."""
_LONG = 3600.0
"""Seconds after which a problem that may pass by itself is serious."""


class MirrorDetector(Detector):
    """Alarm `mirror`: nothing can be copied, or the process that copies does not work."""

    def __init__(self, alarms: AlarmSink, probes: ProbeServer, run: Path, segment: int) -> None:
        super().__init__(alarms)
        self._probe = PeriodicProbe(probes, "mirror", run=str(run), segment=segment)
        self._run, self._heard = run, dict[str, tuple[int, float]]()

    def tick(self, now: float) -> None:
        """Start a due probe, and judge the answer of an earlier one."""
        answer = self._probe.tick(now)
        if answer is None or answer.error is not None:
            return
        reports: list[dict[str, Any]] = answer.value["reports"]
        newest = next((report["newest"] for report in reports if report["newest"] is not None), None)
        holds = f"its newest whole checkpoint: {'none' if newest is None else f'step {newest}'}"
        silent = self._silent(reports, now)
        failing = [report for report in reports if report["problem"]]
        if not failing and not silent:
            if reports:
                self.resolve("mirror", f"the mirror answers; {holds}")
            return
        severity, cause = Severity.WARN, silent
        if failing:
            worst = max(failing, key=lambda report: (report["needs_person"], -(report["since"] or 0.0)))
            seconds = max(0.0, time.time() - (worst["since"] or time.time()))
            severity = Severity.CRIT if worst["needs_person"] or seconds > _LONG else Severity.WARN
            cause = f"{worst['host']} cannot copy to the mirror for {human_time(seconds)}: {worst['problem']}"
        self.open(
            "mirror",
            severity,
            f"{cause}; {holds}",
            "training goes on; what is newer exists in the run directory only",
            f"check the storage and its credentials, and {self._run / 'mirror/log'}; the copy is tried again by "
            "itself, the newest checkpoint first",
            facts={"newest": newest},
        )

    def _silent(self, reports: list[dict[str, Any]], now: float) -> str:
        """Which process has given no sign for long; empty: none."""
        for report in reports or [{"host": "the first node", "beat": -1}]:  # it may not have started yet
            beat, since = self._heard.get(report["host"], (None, now))
            if beat != report["beat"]:
                since = now
            self._heard[report["host"]] = (report["beat"], since)
            if now - since > _SILENT:
                return f"the process that copies on {report['host']} has done nothing for {human_time(now - since)}"
        return ""
