"""Progress reports of a rank: the interface that the training loop calls; without a watchdog it does nothing."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class Phase(IntEnum):
    """Activity of a rank. `SAVE`: it begins a save that continues in the background; `WRITE`: it waits for one."""

    START = 0
    LOAD = 1
    WRITE = 2
    DATA = 3
    COMPUTE = 4
    REDUCE = 5
    OPTIMIZER = 6
    SAVE = 7
    PAUSED = 8
    END = 9


class Heartbeat:
    """Receives the progress of the training loop; this base class, for runs without a watchdog, ignores it."""

    def beat(self, phase: Phase) -> None:
        """A phase starts."""

    def step(self, step: int) -> None:
        """A step starts, in the phase DATA."""

    def measured(self, window: int, own: float) -> None:
        """A window of steps was measured: `own`: seconds of a typical step, not waiting for ranks."""

    def set_segment(self, segment: int) -> None:
        """The segment number is known."""

    def reconfigure(self, config: Any) -> None:
        """The configuration changed since the beginning; no segment is known yet."""

    def close(self) -> None:
        """The rank ends in order: from now on, standing still is not a hang and its exit is not a failure."""
