"""Curves made of block characters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
_BLOCKS = " ▁▂▃▄▅▆▇█"
_LOG_FROM = 4.0
"""A curve whose extremes are this far apart, all positive, may be drawn on a logarithmic axis."""


@dataclass(frozen=True)
class DrawnCurve:
    """A drawn curve: `rows` from the top, the extremes of its axis, and whether that is logarithmic."""

    rows: list[str]
    low: float
    high: float
    logarithmic: bool


def draw(values: Values, width: int, height: int, *, logarithmic: bool = False) -> DrawnCurve | None:
    """Draw values in `width` x `height` characters; None if none is finite.

    A column is filled up to the lowest of its values and shaded up to the highest, so that a spike of one step stays.
    With `logarithmic`, the axis is so where the extremes are far apart.
    """
    if not np.isfinite(values).any():
        return None
    finite = np.where(np.isfinite(values), values, np.nan)
    starts = np.arange(width) * len(values) // width
    low, high = np.fmin.reduceat(finite, starts), np.fmax.reduceat(finite, starts)
    bottom, top = float(np.nanmin(low)), float(np.nanmax(high))
    logarithmic = logarithmic and bottom > 0 and top / bottom > _LOG_FROM
    scale = np.log if logarithmic else np.asarray
    first, last = float(scale(bottom)), float(scale(top))

    def eighths(side: Values) -> NDArray[np.int64]:
        """Height of each column in eighths of a character, at least one; 0 where there is no value."""
        share = (scale(side) - first) / (last - first) if last > first else np.full(width, 0.5)
        whole = 1 + np.rint(np.nan_to_num(share) * (8 * height - 1)).astype(np.int64)
        return np.where(np.isnan(side), 0, whole)

    filled, shaded = eighths(low), eighths(high)
    rows = []
    for below in range(8 * (height - 1), -1, -8):
        shown = zip((filled - below).clip(0, 8).tolist(), (shaded - below >= 4).tolist(), strict=True)
        rows.append("".join("░" if not fill and shade else _BLOCKS[fill] for fill, shade in shown))
    return DrawnCurve(rows, bottom, top, logarithmic)
