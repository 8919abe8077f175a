"""When a score is worse than the run's own history by more than its noise. No torch.

The noise of a score from one evaluation to the next is the root mean square of its last changes, and at least its
standard error. An early, steep curve has large changes, so it is judged leniently; a flat one strictly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, median

_TIMES = 5.0
"""The noise, for a regression."""
_CHANGES = 16
"""Last changes that the noise is measured on."""
_LEAST, _LEAST_WITH_ERROR = 5, 3
"""Earlier values without which nothing is judged; the second if the standard error is known."""
_USUAL = 3
"""The usual value is the median of so many last ones."""


@dataclass(frozen=True)
class Point:
    """A score at a step, with its standard error if that is known."""

    step: int
    value: float
    stderr: float | None = None


@dataclass(frozen=True)
class Regression:
    """A score that is worse than before.

    Attributes:
        usual: what it is compared with.
        noise: its usual change from one value to the next.
    """

    newest: Point
    usual: float
    noise: float


def regression(points: Sequence[Point], *, higher_is_better: bool) -> Regression | None:
    """Whether the last of the points, in order of steps, is worse than those before it by more than their noise."""
    *earlier, newest = points[-_CHANGES - 2 :]
    if len(earlier) < (_LEAST if newest.stderr is None else _LEAST_WITH_ERROR):
        return None
    values = [point.value for point in earlier]
    changes = [after - before for before, after in pairwise(values)]
    noise = max(sqrt(fmean(change**2 for change in changes)), newest.stderr or 0.0)
    usual = median(values[-_USUAL:])
    worse = usual - newest.value if higher_is_better else newest.value - usual
    return Regression(newest, usual, noise) if worse > _TIMES * noise > 0 else None
