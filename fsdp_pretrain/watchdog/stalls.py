"""Is the run hanging? How long each phase may take, from what it took so far. No torch.

A deadline is a multiple of the median, never of the largest of a few: step times have tails that make such a bound
either useless or a source of false alarms. The soft deadline collects evidence and tells; the hard one ends the run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from .page import Phase

_HISTORY = 512
_FEW = 3
_STEP_PHASES = frozenset((Phase.DATA, Phase.COMPUTE, Phase.REDUCE, Phase.OPTIMIZER))
_LONG_PHASES = frozenset((Phase.LOAD, Phase.SAVE, Phase.EVAL))


@dataclass(frozen=True)
class Deadlines:
    """Seconds without any progress of any rank after which something is wrong.

    Attributes:
        soft: collect evidence, alarm.
        hard: end the run, so that it can be started again.
    """

    soft: float
    hard: float


@dataclass(frozen=True)
class Limits:
    """The constants of the deadlines, seconds; tests use small ones.

    Attributes:
        start: until the first collective worked.
        first_step: the first step compiles.
        step: smallest (soft, hard) of steps, and the largest hard one.
        long: smallest (soft, hard) of saves, loads and evaluations; and what holds until there were a few.
    """

    start: float = 900.0
    first_step: float = 3600.0
    step: tuple[float, float, float] = (30.0, 180.0, 1800.0)
    long: tuple[float, float] = (120.0, 600.0)
    long_unknown: tuple[float, float] = (1800.0, 3600.0)


class History:
    """How long phases took.

    Args:
        limits: the constants.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._steps: deque[float] = deque(maxlen=_HISTORY)
        self._long: dict[Phase, deque[float]] = {phase: deque(maxlen=_HISTORY) for phase in _LONG_PHASES}

    def add_step(self, seconds: float) -> None:
        """A step without a save or an evaluation took so long."""
        self._steps.append(seconds)

    def add(self, phase: Phase, seconds: float) -> None:
        """A save, a load or an evaluation took so long."""
        self._long[phase].append(seconds)

    def deadlines(self, phase: Phase) -> Deadlines:
        """For a phase, now."""
        limits = self._limits
        if phase in _LONG_PHASES:
            known = self._long[phase]
            if len(known) < _FEW:
                return Deadlines(*limits.long_unknown)
            typical = median(known)
            return Deadlines(max(limits.long[0], 3 * typical), max(limits.long[1], 6 * typical))
        if phase in _STEP_PHASES and self._steps:
            soft, hard, largest = limits.step
            typical = median(self._steps)
            soft = max(soft, 8 * typical, 2 * max(self._steps))
            hard = min(max(hard, 30 * typical), largest)
            return Deadlines(soft, max(hard, soft + 2.0))
        if phase is Phase.START:
            return Deadlines(limits.start / 2, limits.start)
        return Deadlines(limits.first_step / 2, limits.first_step)
