"""Statistics that a few outliers do not change. No torch, no numpy, to keep the watchdog small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

_MAD = 1.4826
"""Standard deviation over median absolute deviation, of normal values."""
_MOST = 120


def spread(values: Sequence[float]) -> tuple[float, float]:
    """(median, standard deviation estimated from the median absolute deviation)."""
    middle = median(values)
    return middle, _MAD * median(abs(value - middle) for value in values)


def score(value: float, values: Sequence[float], floor: float) -> float:
    """How many deviations a value is above the median of others; `floor` is the smallest deviation assumed."""
    middle, deviation = spread(values)
    return (value - middle) / max(deviation, floor)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Theil-Sen: the median of the slopes between all pairs of (x, y); NaN if no two differ in x.

    Of more than 120 points every k-th is taken.
    """
    points = points[:: -(-len(points) // _MOST)] if points else points
    found = [
        (y1 - y0) / (x1 - x0) for place, (x0, y0) in enumerate(points) for x1, y1 in points[place + 1 :] if x1 != x0
    ]
    return median(found) if found else math.nan
