"""Turns the health findings in the trainer's record into alarms."""

from __future__ import annotations

from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.notify.alarms import Alarm

from .base import Detector

_FAMILIES = ("loss", "gradient", "scale", "learning", "replicas", "replay", "repeat")


class HealthDetector(Detector):
    """Alarms `loss/...`, `gradient/...`, `scale/...`, `learning/...`, `replicas/...`, `replay/...`, `repeat/...`."""

    def step(self, record: StepRecord) -> None:
        """Open and resolve alarms by the record. The first record of a start repeats the open incidents."""
        first = self.last is None
        super().step(record)
        if first:
            still_open = {finding.key for finding in record.health}
            for family in _FAMILIES:
                self.resolve_others(family, still_open, "ended with a restart of the run")
        for finding in record.health:
            if finding.resolved:
                self.resolve(finding.key, finding.summary)
            else:
                self.open(finding.key, finding.severity, finding.summary)


def is_written_by_trainer(alarm: Alarm, record: StepRecord | None) -> bool:
    """Whether the trainer has written this transition into the journal with its last record, as kind `health`."""
    findings = record.health if record is not None else []
    written = any(finding.key == alarm.key and finding.severity > Severity.INFO for finding in findings)
    return written and alarm.state != "acknowledged"
