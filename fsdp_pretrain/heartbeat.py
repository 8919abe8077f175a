"""What a rank says of its own progress, whoever listens: by default nobody."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class Phase(IntEnum):
    """What a rank is doing."""

    START = 0
    LOAD = 1
    DATA = 3
    COMPUTE = 4
    REDUCE = 5
    OPTIMIZER = 6
    SAVE = 7
    PAUSED = 8
    END = 9


class Heartbeat:
    """What the training loop reports about itself; this base class, for runs without a watchdog, does nothing."""

    def beat(self, phase: Phase) -> None:
        """A phase starts."""

    def step(self, step: int) -> None:
        """A step starts, with reading data."""

    def measured(self, window: int, own: float) -> None:
        """A rank's own seconds of a typical step of this window."""

    def set_segment(self, segment: int) -> None:
        """The segment number is known."""

    def reconfigure(self, config: Any) -> None:
        """The configuration is another than at the beginning; no segment is known yet."""

    def close(self) -> None:
        """The rank ends in order: from here on nothing is a hang, and its end is no failure."""
