"""Hang deadlines: how long each phase may take, from earlier durations.

A deadline is a multiple of the median, never of the largest of a few: step times have tails that make such a bound
either useless or a source of false alarms. The soft deadline collects evidence and opens the alarm; the hard one ends
the run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from fsdp_pretrain.config.operations import HangSection
from fsdp_pretrain.heartbeat import Phase

from .page import Beat

LONGEST = 1800.0
"""Seconds to which slow steps extend the hard deadline."""
UNKNOWN_SOFT, UNKNOWN_HARD = 1800.0, 3600.0
"""Deadlines in seconds of saves, loads and first steps (which compile), until their usual duration is known."""
CONNECT = 900.0
"""Seconds until all ranks have connected."""
_SAVES = 4
"""Factor of the minimum deadlines of saves and loads over those of steps."""
_HISTORY = 512
"""Number of durations kept per phase."""
_FEW = 3
"""Durations of saves or loads from which their usual duration is known."""
LONG_PHASES = (Phase.LOAD, Phase.SAVE, Phase.WRITE)
_NO_STEP = (*LONG_PHASES, Phase.PAUSED)
"""Phases whose time does not count as step time. A paused rank beats often, so the deadlines of steps apply to it."""


@dataclass(frozen=True)
class Deadlines:
    """Deadlines in seconds without progress of any rank."""

    soft: float  # when to collect evidence and open the alarm
    hard: float  # when to end the run, so that it can be restarted


def latest(section: HangSection) -> float:
    """The latest hard deadline in seconds of what does not take longer each time."""
    return max(UNKNOWN_HARD, _SAVES * section.hard.value)


class PhaseHistory:
    """Durations of steps, saves and loads, and the deadlines from them; `section` has the minimum deadlines."""

    def __init__(self, section: HangSection) -> None:
        self._section = section
        self._steps: deque[float] = deque(maxlen=_HISTORY)
        self._long: dict[Phase, deque[float]] = {phase: deque(maxlen=_HISTORY) for phase in LONG_PHASES}
        self._last: Beat | None = None
        self._under_way: dict[Phase, int] = {}

    def assume(self, step_seconds: float) -> None:
        """Use a step time from the record until a step was observed."""
        if not self._steps:
            self._steps.append(step_seconds)

    def observe(self, beat: Beat, phases: set[Phase]) -> None:
        """Learn durations from the page of the first rank, without steps in which any rank saved, loaded or paused."""
        last, other = self._last, self._under_way or phases.intersection(_NO_STEP)
        if last is None or beat.step > last.step:
            if last is not None and last.step > 0 and not other:
                self._steps.append((beat.step_at - last.step_at) / 1e9 / (beat.step - last.step))
            self._last = beat
        for phase in _NO_STEP:
            if beat.phase is phase:
                self._under_way[phase] = beat.phase_at
            elif phase in self._under_way:
                seconds = (beat.phase_at - self._under_way.pop(phase)) / 1e9
                if phase in LONG_PHASES:
                    self._long[phase].append(seconds)

    def deadlines(self, phases: set[Phase]) -> Deadlines:
        """The deadlines for ranks in these phases: the latest of all phases."""
        due = [self._deadlines(phase) for phase in phases]
        return Deadlines(max(deadline.soft for deadline in due), max(deadline.hard for deadline in due))

    def _deadlines(self, phase: Phase) -> Deadlines:
        section = self._section
        unknown = Deadlines(max(UNKNOWN_SOFT, section.soft.value), max(UNKNOWN_HARD, section.hard.value))
        if phase is Phase.WRITE:  # most only wait for the end of a save: the longest counts
            longest = max(self._long[phase], default=0.0)
            return Deadlines(max(unknown.soft, 3 * longest), max(unknown.hard, 6 * longest))
        if phase in LONG_PHASES:
            known = self._long[phase]
            if len(known) < _FEW:
                return unknown
            typical = median(known)
            return Deadlines(
                max(_SAVES * section.soft.value, 3 * typical), max(_SAVES * section.hard.value, 6 * typical)
            )
        if phase is Phase.START:
            return Deadlines(CONNECT / 2, CONNECT)
        if phase is Phase.END or not self._steps:
            return unknown
        typical = median(self._steps)
        soft = max(section.soft.value, 8 * typical, 2 * max(self._steps))
        hard = max(section.hard.value, min(30 * typical, LONGEST))
        return Deadlines(soft, max(hard, soft + section.soft.value))
