"""Detects slowdowns: CUSUM of block medians of step times against a frozen baseline.

Step times have heavy tails and wander: charts of single steps (mean and deviation, EWMA, plain CUSUM) give false alarms
every few thousand steps, and comparing with the recent past misses a slow decline. A one-sided CUSUM (Page 1954) of
block medians, against a baseline learned once, has neither weakness. Planned changes are no drift: each phase of the
schedule has its own baseline.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from statistics import median
from typing import Literal

from fsdp_pretrain.statistics import spread

_LEAST_NOISE = 0.0015
"""Minimum noise of block medians, as a logarithm like all bounds here."""
_SLACK, _LIMIT = (0.015, 1.0), (0.045, 5.0)
"""Allowance and limit of the CUSUM: (minimum, number of deviations)."""
_LARGEST = 0.10
"""Maximum contribution of a block: one long stall is not a drift."""
_SKIPPED = 2
"""Number of first blocks that the baseline leaves out."""
_BACK, _BACK_BLOCKS = 0.01, 4
_FASTER, _FASTER_BLOCKS = 0.02, 30
"""The pace is normal again after so many blocks less than this above the baseline; faster after so many below it."""


@dataclass(frozen=True)
class PaceChange:
    """A change of the pace."""

    kind: Literal["slower", "back", "faster"]  # `slower` opens an incident, `back` ends it; `faster` is a new baseline
    ratio: float  # step time relative to the baseline
    step: int  # the last step of the last block
    since: int  # the first step of the block in which it started


class PaceCusum:
    """Watches the step times of one start, one schedule phase at a time.

    Feed it clean steps only: not the first twenty of a start, none with a save, an evaluation or a compilation in or
    right before them.

    Attributes:
        ratio: step time over the baseline's, from the last blocks; None while the baseline is being learned.
        slow: whether an incident is open.
    """

    def __init__(self) -> None:
        self.ratio: float | None = None
        self.slow = False
        self._phase: Hashable = None
        self._size = self._wanted = 0
        self._steps: list[tuple[int, float]] = []
        self._learned: list[float] = []
        self._baseline: float | None = None
        self._noise = self._sum = 0.0
        self._begun = 0
        self._recent: list[tuple[int, float]] = []  # (first step, median of log seconds minus the baseline) of blocks

    def add(self, step: int, seconds: float, phase: Hashable = None) -> PaceChange | None:
        """Add a clean step.

        `phase`: identifies the planned cost of a step (batch, sequence length). A change restarts the baseline.
        """
        if phase != self._phase or not self._size:
            self._phase, self._steps, self._learned = phase, [], []
            self._baseline, self.ratio, self.slow = None, None, False
            # (steps of a block, blocks of the baseline): long steps vary less
            self._size, self._wanted = (16, 30) if seconds < 5 else (8, 30) if seconds <= 20 else (5, 60)
        self._steps.append((step, math.log(seconds)))
        if len(self._steps) < self._size:
            return None
        first, value = self._steps[0][0], median(value for _, value in self._steps)
        self._steps = []
        if self._baseline is None:
            self._learned.append(value)
            if len(self._learned) == _SKIPPED + self._wanted:
                self._adopt(self._learned[_SKIPPED:])
            return None
        self._recent = [*self._recent, (first, value - self._baseline)][-_FASTER_BLOCKS:]
        self.ratio = math.exp(median(above for _, above in self._recent[-_BACK_BLOCKS:]))
        return self._judge(step, self._baseline)

    def _adopt(self, values: list[float]) -> None:
        """Set the baseline and the noise of blocks around it."""
        self._baseline, deviation = spread(values)
        self._noise = max(deviation, _LEAST_NOISE)
        self._sum, self._recent, self.ratio = 0.0, [], 1.0

    def _judge(self, step: int, baseline: float) -> PaceChange | None:
        """Judge the last block, which ends with step `step`."""
        above = [value for _, value in self._recent]
        if self.slow:
            if len(above) < _BACK_BLOCKS or max(above[-_BACK_BLOCKS:]) >= _BACK:
                return None
            self.slow, self._sum = False, 0.0
            return PaceChange("back", math.exp(median(above[-_BACK_BLOCKS:])), step, self._recent[-_BACK_BLOCKS][0])
        if len(above) == _FASTER_BLOCKS and max(above) < -_FASTER:
            since = self._recent[0][0]
            self._adopt([baseline + value for value in above])
            return PaceChange("faster", math.exp(median(above)), step, since)
        slack, limit = (max(least, times * self._noise) for least, times in (_SLACK, _LIMIT))
        if self._sum == 0.0:
            self._begun = self._recent[-1][0]
        self._sum = max(0.0, self._sum + min(above[-1], _LARGEST) - slack)
        if self._sum <= limit:
            return None
        since_begun = [value for first, value in self._recent if first >= self._begun]
        self.slow, self._sum = True, 0.0
        return PaceChange("slower", math.exp(median(since_begun)), step, self._begun)
