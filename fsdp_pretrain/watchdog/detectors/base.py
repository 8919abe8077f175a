"""What every detector is: it looks at one thing, and opens, revises and resolves the alarms about it. No torch.

Detectors only observe. They are given the metrics records as the trainer writes them and are asked once a pass; what
they find they report through `open` and `resolve`, and nowhere else. So a detector can be replayed over the record of
an old run. Which alarms are open only `Alarms` knows: a detector keeps no list of its own, which a restart would lose.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fsdp_pretrain.record.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.notify.alarms import Alarms


class Detector:
    """Base of all detectors.

    Attributes:
        alarms: where incidents are opened and resolved.
        last: the last record of this start; None before the first.
    """

    def __init__(self, alarms: Alarms) -> None:
        self.alarms = alarms
        self.last: StepRecord | None = None

    @property
    def at(self) -> int | None:
        """The last recorded step of this start; None before the first."""
        return None if self.last is None else self.last.step

    def step(self, record: StepRecord) -> None:
        """The trainer added a metrics record; once for every record, in order."""
        self.last = record

    def tick(self, now: float) -> None:
        """A pass of the watchdog. `now`: seconds, `time.monotonic()`. Must never block."""

    def open(
        self,
        key: str,
        severity: Severity,
        summary: str,
        effect: str = "",
        remedy: str = "",
        *,
        step: int | None = None,
        **more: Any,
    ) -> None:
        """Something is wrong: open the alarm, raise its severity, or bring it up to date.

        Args:
            effect, remedy: of an alarm that is open already, those that it has stay if none are given.
            step: the alarm is about; default: the last recorded one.
            more: further fields of `Alarm` (`action`, `facts`), and `revised`.
        """
        more |= {name: text for name, text in (("effect", effect), ("remedy", remedy)) if text}
        self.alarms.open(key, severity, summary, step=self.at if step is None else step, **more)

    def resolve(self, key: str, summary: str, *, step: int | None = None) -> None:
        """It is over; nothing happens if no such alarm is open."""
        self.alarms.resolve(key, summary, step=self.at if step is None else step)

    def resolve_others(self, detector: str, found: Collection[str], summary: str) -> None:
        """All open alarms `detector/...` are over but those whose keys are in `found`."""
        for key in self.alarms.open_keys():
            if key.partition("/")[0] == detector and key not in found:
                self.resolve(key, summary)
