"""Whether checkpoints and record reach the mirror, by the report of the uploader."""

from __future__ import annotations

from pathlib import Path

from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from . import looks
from .base import Detector
from .periodic import PeriodicProbe

_LONG = 3600.0
"""Seconds after which a problem that may pass by itself is serious."""


class MirrorDetector(Detector):
    """Alarm `mirror`: nothing can be copied."""

    def __init__(self, alarms: AlarmSink, run: Path, segment: int) -> None:
        super().__init__(alarms)
        self._probe = PeriodicProbe(looks.mirror, run=str(run), segment=segment)
        self._log, self._since = run / "mirror/log", float("inf")

    def tick(self, now: float) -> None:
        """Start a due probe, and judge the answer of an earlier one."""
        answer = self._probe.tick(now)
        if answer is None or answer.error is not None or not answer.value:  # the uploader may not have started yet
            return
        report, newest = answer.value, answer.value["newest"]
        holds = f"its newest whole checkpoint: {'none' if newest is None else f'step {newest}'}"
        if not report["problem"]:
            self._since = float("inf")
            self.resolve("mirror", f"the mirror answers; {holds}")
            return
        self._since = min(self._since, now)
        seconds = now - self._since
        self.open(
            "mirror",
            Severity.CRIT if report["needs_person"] or seconds > _LONG else Severity.WARN,
            f"nothing can be copied to the mirror for {human_time(seconds)}: {report['problem']}; {holds}",
            "training goes on; what is newer exists in the run directory only",
            f"check the storage and its credentials, and {self._log}; the copy is tried again by itself, the newest "
            "checkpoint first",
            facts={"newest": newest},
        )
