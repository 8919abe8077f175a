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
    """Alarms `mirror` (nothing can be copied) and `mirror-uploader/HOST` (the process that copies does not work)."""

    def __init__(self, alarms: AlarmSink, probes: ProbeServer, run: Path, segment: int) -> None:
        super().__init__(alarms)
        self._probe = PeriodicProbe(probes, "mirror", run=str(run))
        self._run, self._segment = run, segment
        self._heard: dict[str, tuple[int, float]] = {}

    def tick(self, now: float) -> None:
        """Start a due probe, and judge the answer of an earlier one."""
        answer = self._probe.tick(now)
        if answer is None or answer.error is not None:
            return
        reports = [report for report in answer.value["reports"] if report["segment"] == self._segment]
        self._judge_problems(reports)
        self._judge_silence(reports, now)

    def _judge_problems(self, reports: list[dict[str, Any]]) -> None:
        newest = next((report["newest"] for report in reports if report["newest"] is not None), None)
        holds = "no checkpoint" if newest is None else f"step {newest}"
        failing = [report for report in reports if report["problem"]]
        if not failing:
            if reports:
                self.resolve("mirror", f"the mirror answers; its newest whole checkpoint: {holds}")
            return
        worst = max(failing, key=lambda report: (report["needs_person"], -(report["since"] or 0.0)))
        seconds = max(0.0, time.time() - (worst["since"] or time.time()))
        self.open(
            "mirror",
            Severity.CRIT if worst["needs_person"] or seconds > _LONG else Severity.WARN,
            f"{worst['host']} cannot copy to the mirror for {human_time(seconds)}: {worst['problem']}; its newest "
            f"whole checkpoint: {holds}",
            "training goes on; what is newer exists in the run directory only",
            "check the storage and its credentials; the copy is tried again by itself, the newest checkpoint first",
            facts={"newest": newest, "url": worst["url"], "host": worst["host"]},
        )

    def _judge_silence(self, reports: list[dict[str, Any]], now: float) -> None:
        if not reports:  # it may not have started yet
            reports = [{"host": "the first node", "beat": -1}]
        silent = {}
        for report in reports:
            beat, since = self._heard.get(report["host"], (None, now))
            if beat != report["beat"]:
                since = now
            self._heard[report["host"]] = (report["beat"], since)
            if now - since > _SILENT:
                silent[f"mirror-uploader/{report['host']}"] = now - since
        for key, seconds in silent.items():
            self.open(
                key,
                Severity.WARN,
                f"the process that copies to the mirror on {key.partition('/')[2]} has done nothing for "
                f"{human_time(seconds)}",
                "training goes on; new checkpoints exist in the run directory only",
                f"see {self._run / 'mirror/log'}; it is started again by itself when it has ended",
            )
        self.resolve_others("mirror-uploader", silent, "it works again")
