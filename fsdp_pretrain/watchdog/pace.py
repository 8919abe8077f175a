"""Has the run become slower? Block medians of step times, summed up against a frozen baseline. No torch.

Step times have heavy tails and wander: charts of single steps (mean and deviation, EWMA, plain CUSUM) raise false
alarms every few thousand steps, and whatever compares with the recent past is blind to a slow decline. A one-sided
CUSUM (Page 1954) of the medians of blocks, against a baseline that is learned once, has neither weakness. What a step
is planned to cost is no drift: another phase of the schedule has a baseline of its own.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from ..statistics import spread

_LEAST_NOISE = 0.0015
"""Deviation of block medians below which nothing is believed; as a logarithm, like all bounds here."""
_SLACK, _LIMIT = (0.015, 1.0), (0.045, 5.0)
"""Allowance and limit of the CUSUM: at least the first, and so many deviations."""
_LARGEST = 0.10
"""What a block adds at most: one long stall is not a drift."""
_SKIPPED, _SETTLING = 2, 8
"""Blocks that are not learned from at the beginning; blocks after an alarm that tell the new level."""
_BACK, _BACK_BLOCKS = 0.01, 4
_FASTER, _FASTER_BLOCKS = 0.02, 30

Kind = Literal["slower", "slower still", "back", "faster"]


@dataclass(frozen=True)
class Change:
    """The pace changed.

    Attributes:
        kind: `slower` opens an incident, `slower still` worsens it, `back` ends it; `faster` is a new baseline.
        ratio: step time over that of the baseline at the beginning.
        step: the last step that was looked at.
        since: the first step of the block in which it began.
    """

    kind: Kind
    ratio: float
    step: int
    since: int


@dataclass(frozen=True)
class _Block:
    first: int
    last: int
    value: float


def block_size(seconds: float) -> tuple[int, int]:
    """(steps of a block, blocks of the baseline) for a typical step of so many seconds: long steps vary less."""
    if seconds < 5:
        return 16, 30
    return (8, 30) if seconds <= 20 else (5, 60)


@dataclass
class Pace:
    """Watches the step times of one start in one phase after the other.

    Give it clean steps only: not the first twenty of a start, not those with a save, an evaluation or a compilation in
    them or right after.

    Attributes:
        ratio: step time over the baseline's, from the last blocks; None while it is being learned.
        slow: an incident is open.
    """

    ratio: float | None = None
    slow: bool = False
    _phase: Hashable = None
    _size: int = 0
    _wanted: int = 0
    _steps: list[tuple[int, float]] = field(default_factory=list)
    _learned: list[_Block] = field(default_factory=list)
    _skip: int = 0
    _baseline: float | None = None
    _level: float = 0.0
    _noise: float = 0.0
    _sum: float = 0.0
    _begun: int = 0
    _recent: list[_Block] = field(default_factory=list)
    _settling: int = 0

    def add(self, step: int, seconds: float, phase: Hashable = None) -> Change | None:
        """A clean step.

        Args:
            step: its number.
            seconds: its wall time.
            phase: what it was planned to cost, in any form: batch, sequence length. Another one is learned anew.
        """
        if phase != self._phase or not self._size:
            self._begin(phase, seconds)
        self._steps.append((step, math.log(seconds)))
        if len(self._steps) < self._size:
            return None
        block = _Block(self._steps[0][0], step, median(value for _, value in self._steps))
        self._steps = []
        if self._baseline is None:
            self._learn(block)
            return None
        self._recent = [*self._recent, block][-_FASTER_BLOCKS:]
        self.ratio = math.exp(median(b.value for b in self._recent[-_BACK_BLOCKS:]) - self._baseline)
        return self._judge(block)

    def _begin(self, phase: Hashable, seconds: float) -> None:
        self._phase = phase
        self._size, self._wanted = block_size(seconds)
        self._steps, self._learned, self._skip = [], [], _SKIPPED
        self._baseline, self.ratio, self.slow = None, None, False

    def _learn(self, block: _Block) -> None:
        if self._skip:
            self._skip -= 1
            return
        self._learned.append(block)
        if len(self._learned) == self._wanted:
            self._adopt(self._learned)
            self._learned = []

    def _adopt(self, blocks: list[_Block]) -> None:
        """The baseline, and how much blocks vary about it."""
        values = [block.value for block in blocks]
        self._baseline, deviation = spread(values)
        self._level = self._baseline
        self._noise = max(deviation, _LEAST_NOISE)
        self._sum, self._recent, self._settling, self.ratio = 0.0, [], 0, 1.0

    def _judge(self, block: _Block) -> Change | None:
        assert self._baseline is not None
        if self.slow and self._is_back():
            return self._end(block)
        if self._settling:
            self._settling -= 1
            if not self._settling:
                level = median(b.value for b in self._recent[-_SETTLING:])
                if level - self._baseline < _BACK:
                    return self._end(block)
                self._level = max(self._level, level)
            return None
        if not self.slow and self._is_faster():
            ratio = math.exp(median(b.value for b in self._recent) - self._baseline)
            first = self._recent[0].first
            self._adopt(self._recent)
            return Change("faster", ratio, block.last, first)
        slack = max(_SLACK[0], _SLACK[1] * self._noise)
        limit = max(_LIMIT[0], _LIMIT[1] * self._noise)
        if self._sum == 0.0:
            self._begun = block.first
        self._sum = max(0.0, self._sum + min(block.value - self._level, _LARGEST) - slack)
        if self._sum <= limit:
            return None
        kind: Kind = "slower still" if self.slow else "slower"
        self.slow, self._sum, self._settling = True, 0.0, _SETTLING
        recent = [b.value for b in self._recent if b.first >= self._begun]
        return Change(kind, math.exp(median(recent) - self._baseline), block.last, self._begun)

    def _is_back(self) -> bool:
        assert self._baseline is not None
        last = self._recent[-_BACK_BLOCKS:]
        return len(last) == _BACK_BLOCKS and all(b.value - self._baseline < _BACK for b in last)

    def _end(self, block: _Block) -> Change:
        assert self._baseline is not None and self.ratio is not None
        since = self._recent[-_BACK_BLOCKS:][0].first
        self.slow, self._sum, self._settling, self._level = False, 0.0, 0, self._baseline
        return Change("back", self.ratio, block.last, since)

    def _is_faster(self) -> bool:
        assert self._baseline is not None
        full = len(self._recent) == _FASTER_BLOCKS
        return full and all(self._baseline - b.value > _FASTER for b in self._recent)
