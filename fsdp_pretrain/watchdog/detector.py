"""What every detector is: something that looks at one thing, and opens and resolves the alarms of it. No torch.

Detectors are pure observers. They are given the metrics records as the trainer writes them and are asked once a pass;
what they find they say to `Alarms`, and nowhere else. So a detector can be replayed over the record of an old run.
"""

from __future__ import annotations

from ..record.step_record import StepRecord
from .alarms import Alarms


class Detector:
    """Base of all detectors.

    Args:
        alarms: where incidents are opened and resolved.

    Attributes:
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
