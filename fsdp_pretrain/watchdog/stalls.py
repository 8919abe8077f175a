"""Is the run hanging? How long each phase may take, from what it took so far. No torch.

A deadline is a multiple of the median, never of the largest of a few: step times have tails that make such a bound
either useless or a source of false alarms. The soft deadline collects evidence and tells; the hard one ends the run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from ..watchdog_sections import HangSection
from .page import Phase

_HISTORY = 512
_FEW = 3
_LONG_PHASES = frozenset((Phase.LOAD, Phase.SAVE))


@dataclass(frozen=True)
class Deadlines:
    """Seconds without any progress of any rank after which something is wrong.

    Attributes:
        soft: collect evidence, alarm.
        hard: end the run, so that it can be started again.
    """

    soft: float
    hard: float


class History:
    """How long phases took.

    Args:
        section: the least times.
    """

    def __init__(self, section: HangSection) -> None:
        self._section = section
        self._steps: deque[float] = deque(maxlen=_HISTORY)
        self._long: dict[Phase, deque[float]] = {phase: deque(maxlen=_HISTORY) for phase in _LONG_PHASES}

    @property
    def knows_steps(self) -> bool:
        """Whether it is known how long a step takes."""
        return bool(self._steps)

    def add_step(self, seconds: float) -> None:
        """A step without a save or an evaluation took so long."""
        self._steps.append(seconds)

    def add(self, phase: Phase, seconds: float) -> None:
        """A save, a load or an evaluation took so long."""
        self._long[phase].append(seconds)

    def deadlines(self, phase: Phase) -> Deadlines:
        """For a phase, now."""
        section = self._section
        unknown = Deadlines(section.unknown_soft.value, section.unknown_hard.value)
        if phase in _LONG_PHASES:
            known = self._long[phase]
            if len(known) < _FEW:
                return unknown
            typical = median(known)
            return Deadlines(max(section.save_soft.value, 3 * typical), max(section.save_hard.value, 6 * typical))
        if phase is Phase.START:
            return Deadlines(section.connect.value / 2, section.connect.value)
        if phase is Phase.END or not self._steps:
            return unknown
        typical = median(self._steps)
        soft = max(section.soft.value, 8 * typical, 2 * max(self._steps))
        hard = min(max(section.hard.value, 30 * typical), section.longest.value)
        return Deadlines(soft, max(hard, soft + section.soft.value))
