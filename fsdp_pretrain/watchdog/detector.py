"""What every detector is: something that looks at one thing, and opens and resolves the alarms of it. No torch.

Detectors are pure observers. They are given the metrics records as the trainer writes them and are asked once a pass;
what they find they say to `Alarms`, and nowhere else. So a detector can be replayed over the record of an old run.
"""

from __future__ import annotations

from typing import Any

from .alarms import Alarms


class Detector:
    """Base of all detectors.

    Args:
        alarms: where incidents are opened and resolved.
    """

    def __init__(self, alarms: Alarms) -> None:
        self.alarms = alarms

    def step(self, record: dict[str, Any]) -> None:
        """The trainer added a metrics record (design, section 5); once for every record, in order."""

    def tick(self, now: float) -> None:
        """A pass of the watchdog. `now`: seconds, `time.monotonic()`. Must never block."""
