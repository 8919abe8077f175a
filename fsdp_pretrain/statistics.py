"""Robust statistics. No torch, no numpy, to keep the watchdog small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

_MAD = 1.4826
"""Standard deviation / median absolute deviation of a normal distribution."""
_MOST = 120


def spread(values: Sequence[float]) -> tuple[float, float]:
    """(median, standard deviation estimated from the median absolute deviation)."""
    middle = median(values)
    return middle, _MAD * median(abs(value - middle) for value in values)


def score(value: float, values: Sequence[float], floor: float) -> float:
    """How many standard deviations a value is above the median of others; `floor`: smallest deviation assumed."""
    middle, deviation = spread(values)
    return (value - middle) / max(deviation, floor)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Theil-Sen estimator: the median slope between all pairs of (x, y); NaN if no two differ in x.

    More than 120 points are subsampled evenly.
    """
    points = points[:: -(-len(points) // _MOST)] if points else points
    slopes = [
        (y1 - y0) / (x1 - x0) for index, (x0, y0) in enumerate(points) for x1, y1 in points[index + 1 :] if x1 != x0
    ]
    return median(slopes) if slopes else math.nan
