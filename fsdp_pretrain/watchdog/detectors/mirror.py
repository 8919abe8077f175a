"""Watches whether checkpoints and record reach the mirror, according to the uploader's report."""

from __future__ import annotations

from functools import partial

from fsdp_pretrain.run import mirror_status
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .base import Detector
from .periodic import PeriodicProbe

_LONG = 3600.0
"""Seconds after which a problem that may pass by itself is critical."""


class MirrorDetector(Detector):
    """Alarm `mirror`: nothing can be copied."""

    def __init__(self, alarms: AlarmSink, run: RunDir, segment: int) -> None:
        super().__init__(alarms)
        self._probe = PeriodicProbe(partial(mirror_status.read, run, segment))
        self._log = mirror_status.folder(run) / "log"
        self._since = float("inf")

    def tick(self, now: float) -> None:
        """Start a due probe, and judge the answer of an earlier one."""
        if (report := self._probe.result(now)) is None:  # the uploader may not have started yet
            return
        holds = f"its newest whole checkpoint: {'none' if report.newest is None else f'step {report.newest}'}"
        if not report.problem:
            self._since = float("inf")
            self.resolve("mirror", f"the mirror answers; {holds}")
            return
        self._since = min(self._since, now)
        seconds = now - self._since
        self.open(
            "mirror",
            Severity.CRIT if report.needs_person or seconds > _LONG else Severity.WARN,
            f"nothing can be copied to the mirror for {human_time(seconds)}: {report.problem}; {holds}",
            "training continues; what is newer exists in the run directory only",
            f"check the storage and its credentials, and {self._log}; the copy is tried again by itself, the newest "
            "checkpoint first",
            facts={"newest": report.newest},
        )
