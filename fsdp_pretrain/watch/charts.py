"""Curves and bars made of characters: braille dots (two columns by four rows in a cell) and blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_LOG_FROM = 4.0
"""A curve whose extremes are this far apart, all positive, is drawn on a logarithmic axis."""
_BLOCKS = "▁▂▃▄▅▆▇█"
FILLS = "█▓▒░▚·"
"""What tells the parts of a bar apart without colour."""
_PLAIN: dict[int, int | str | None] = {
    **dict.fromkeys(range(0x2801, 0x2900), "*"),
    **str.maketrans("\u2800█▓▒░▚·─│┤└┬▁▂▃▄▅▆▇✓✗▸↑↓…", " #=+-x.-||`+___---=vx>^v."),
}


@dataclass(frozen=True)
class BrailleCurve:
    """A drawn curve: `rows` from the top, the extremes of its axis, and whether that is logarithmic."""

    rows: list[str]
    low: float
    high: float
    logarithmic: bool


def envelope(steps: Values, values: Values, columns: int, span: tuple[float, float]) -> tuple[Values, Values]:
    """The lowest and highest value in each of `columns` equal parts of `span`, so that a spike of one step stays.

    Parts without a value are interpolated between their neighbours; NaN before the first and after the last value.
    """
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    low, high = np.full(columns, np.nan), np.full(columns, np.nan)
    if not len(steps):
        return low, high
    place = ((steps - span[0]) / max(span[1] - span[0], 1.0) * (columns - 1e-9)).astype(np.int64).clip(0, columns - 1)
    begins = np.flatnonzero(np.diff(place, prepend=-1))
    filled = place[begins]
    low[filled], high[filled] = np.minimum.reduceat(values, begins), np.maximum.reduceat(values, begins)
    inside = np.arange(filled[0], filled[-1] + 1)
    low[inside], high[inside] = (np.interp(inside, filled, side[filled]) for side in (low, high))
    return low, high


def curve(
    steps: Values, values: Values, width: int, height: int, span: tuple[float, float], *, logarithmic: bool = False
) -> BrailleCurve | None:
    """Draw `values` over increasing `steps` in `width` x `height` characters; None if none is finite.

    With `logarithmic`, the axis is so where the extremes are far apart.
    """
    low, high = envelope(steps, values, 2 * width, span)
    known = np.isfinite(low)
    if not known.any():
        return None
    bottom, top = float(low[known].min()), float(high[known].max())
    logarithmic = logarithmic and bottom > 0 and top / bottom > _LOG_FROM
    scale = np.log if logarithmic else np.asarray
    first, last = float(scale(bottom)), float(scale(top))
    dots = 4 * height

    def place(side: Values) -> NDArray[np.int64]:
        share = (scale(side) - first) / (last - first) if last > first else np.full(len(side), 0.5)
        whole: NDArray[np.int64] = np.rint(np.where(known, share, 0.0) * (dots - 1)).astype(np.int64)
        return whole

    bottoms, tops = place(low), place(high)
    _join(bottoms, tops, known)
    level = np.arange(dots)[::-1, None]
    drawn = (level >= bottoms) & (level <= tops) & known
    cells = drawn.reshape(height, 4, width, 2) * _DOTS[None, :, None, :]
    codes = 0x2800 + cells.sum(axis=(1, 3))
    return BrailleCurve(["".join(map(chr, row)) for row in codes.tolist()], bottom, top, logarithmic)


def _join(low: NDArray[np.int64], high: NDArray[np.int64], known: NDArray[np.bool_]) -> None:
    """Extend each column down or up to the one before it, so that the curve has no gaps."""
    pairs = known[1:] & known[:-1]
    before_low, before_high = low[:-1].copy(), high[:-1].copy()
    rises, falls = pairs & (low[1:] > before_high + 1), pairs & (high[1:] < before_low - 1)
    low[1:][rises] = before_high[rises] + 1
    high[1:][falls] = before_low[falls] - 1


def sparkline(values: Values, width: int) -> str:
    """The last `width` finite values as blocks."""
    known = values[np.isfinite(values)][-width:]
    if not len(known):
        return ""
    low, high = known.min(), known.max()
    share = (known - low) / (high - low) if high > low else np.full(len(known), 0.5)
    return "".join(_BLOCKS[round(float(each) * (len(_BLOCKS) - 1))] for each in share)


def cells(shares: list[float], width: int) -> list[int]:
    """`width` cells divided in proportion to `shares`, by largest remainder."""
    total = sum(shares)
    if total <= 0:
        return [0] * len(shares)
    exact = [share / total * width for share in shares]
    whole = [int(each) for each in exact]
    order = sorted(range(len(exact)), key=lambda n: whole[n] - exact[n])
    for number in order[: width - sum(whole)]:
        whole[number] += 1
    return whole


def plain(text: str) -> str:
    """The text for a terminal that cannot show these characters."""
    return text.translate(_PLAIN)
