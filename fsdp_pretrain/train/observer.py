"""What acts beside training takes part in its steps at a few points: the only way in which the trainer knows of it."""

from __future__ import annotations

from collections.abc import Mapping


class Observer:
    """Something beside training; here it does nothing. No method may communicate or wait for the device."""

    def requests(self) -> Mapping[str, int]:
        """What this rank asks all ranks to agree on, by field of `StepCounts`: summed in the next step."""
        return {}

    def beside(self, step: int) -> list[str]:
        """Names of what runs on this node beside a step, for its record."""
        return []

    def take_stalled(self) -> float:
        """Seconds for which training waited for it since the last call."""
        return 0.0
