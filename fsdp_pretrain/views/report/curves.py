"""The curves of a run, small enough for a page.

Steps are combined into buckets with the mean, minimum and maximum of every column, so that a spike of a single step
stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fsdp_pretrain.run.lines import CLOCKS, Line, Lines
from fsdp_pretrain.run.step_columns import Column

_VALUES = 160_000
"""Points of all curves of a page, summed over their columns."""
_LEFT = 0.25
"""Largest share of a run's points that is spent on steps left behind by rollbacks."""


@dataclass(frozen=True)
class Curve:
    """A line in buckets: float64 [points] by column, with a row of NaN where the line was interrupted.

    Attributes:
        clocks: values of `CLOCKS` at the last step of each bucket.
        mean: NaN where no step of a bucket has a value.
        low, high: extremes, for columns in which those of a bucket differ.
    """

    clocks: dict[str, Column]
    mean: dict[str, Column]
    low: dict[str, Column]
    high: dict[str, Column]


def reduce_all(lines: Lines, names: list[str]) -> tuple[Curve, Curve]:
    """Curves of the kept line and of the steps left behind, with these columns."""
    points = _VALUES // (sum(name in lines.kept.columns for name in names) or 1)
    rest = min(int(points * _LEFT), len(lines.left))
    return reduce(lines.kept, names, points - rest), reduce(lines.left, names, rest)


def reduce(line: Line, names: Iterable[str], points: int) -> Curve:
    """A line in about `points` buckets, none of which spans a break, with these columns and those of `CLOCKS`."""
    usual = np.linspace(0, len(line), min(points, len(line)), endpoint=False).astype(np.int64)
    starts = np.unique(np.concatenate([usual, np.array(line.breaks, dtype=np.int64)]))
    breaks = np.searchsorted(starts, line.breaks)
    last = np.append(starts[1:], len(line))[: len(starts)] - 1
    clocks = {name: line.columns[name][last] for name in CLOCKS}
    curve = Curve({name: np.insert(column, breaks, column[breaks]) for name, column in clocks.items()}, {}, {}, {})
    for name in names:
        if name not in line.columns or not np.isfinite(column := line.columns[name]).any():
            continue
        finite = np.isfinite(column)
        count = np.add.reduceat(finite.astype(np.float64), starts)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.add.reduceat(np.where(finite, column, 0.0), starts) / count
        low = np.fmin.reduceat(np.where(finite, column, math.nan), starts)
        high = np.fmax.reduceat(np.where(finite, column, math.nan), starts)
        curve.mean[name] = np.insert(mean, breaks, math.nan)
        if (low < high).any():
            curve.low[name], curve.high[name] = (np.insert(edge, breaks, math.nan) for edge in (low, high))
    return curve
