"""The curves of a run, small enough for a page: the kept line, and what was trained and left behind.

Steps are combined into buckets with the mean, minimum and maximum of every column, so that a spike of a single step
stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fsdp_pretrain.record import lineage
from fsdp_pretrain.record.start_history import Column, StepColumns

CLOCKS = ("step", "consumed", "trained", "written")
"""Columns of the x axes: steps, samples, tokens, and seconds since 1970."""
Position = dict[str, float]
"""A place on every x axis, by clock; NaN where that is not known."""


@dataclass(frozen=True)
class Line:
    """Steps in order, of one or more segments: columns by name, float64 [rows].

    Attributes:
        breaks: rows before which the line was interrupted, sorted.
    """

    columns: dict[str, Column]
    breaks: list[int]

    def __len__(self) -> int:
        return len(self.columns["step"])


@dataclass(frozen=True)
class Curve:
    """A line in buckets: float64 [points] by column, with a row of NaN where the line was interrupted.

    Attributes:
        clocks: at the last step of each bucket.
        mean: NaN where no step of a bucket has a value.
        low, high: extremes, of the columns in which a bucket differs from its mean.
    """

    clocks: dict[str, Column]
    mean: dict[str, Column]
    low: dict[str, Column]
    high: dict[str, Column]


@dataclass(frozen=True)
class Lines:
    """All that a run trained: the kept line, and what resumes, rollbacks and forks left behind, part after part."""

    kept: Line
    left: Line

    def locate(self, step: float | None, time: float | None) -> Position:
        """Where an event was: at a step, a time, or both."""
        every = self._by_time if step is None else self._by_step
        known = math.nan if time is None else time
        if not len(every["step"]):
            return {**dict.fromkeys(CLOCKS, math.nan), "step": math.nan if step is None else step, "written": known}
        if step is None:
            row = max(0, int(np.searchsorted(every["written"], known, side="right")) - 1)
            found = {clock: float(every[clock][row]) for clock in CLOCKS}
        else:
            found = {clock: float(np.interp(step, every["step"], every[clock])) for clock in CLOCKS} | {"step": step}
        return found if time is None else found | {"written": time}

    @cached_property
    def _clocks(self) -> dict[str, Column]:
        return {name: np.concatenate([line.columns[name] for line in (self.kept, self.left)]) for name in CLOCKS}

    @cached_property
    def _by_time(self) -> dict[str, Column]:
        order = np.argsort(self._clocks["written"], kind="stable")
        return {name: column[order] for name, column in self._clocks.items()}

    @cached_property
    def _by_step(self) -> dict[str, Column]:
        _, first = np.unique(self._clocks["step"], return_index=True)  # the kept line's row, where there are several
        return {name: column[first] for name, column in self._clocks.items()}


def read_lines(nodes: Iterable[lineage.LineageNode], segments: dict[int, StepColumns]) -> Lines:
    """The lines of a run from its lineage and the columns of every segment."""
    parts = lineage.line(nodes)
    kept, left, last = list[dict[str, Column]](), list[dict[str, Column]](), 0.0
    for number, steps in sorted(segments.items()):
        columns = _columns(steps)
        part = next((part for part in parts if part.segment == number), None)
        after, until = (math.inf, math.inf) if part is None else (max(part.after, last), part.until)
        on_line = (steps.step > after) & (steps.step <= until)
        if on_line.any():
            kept.append({name: column[on_line] for name, column in columns.items()})
            last = float(steps.step[on_line][-1])
        edges = np.flatnonzero(np.diff(on_line, prepend=True, append=True))
        for first, stop in zip(edges[::2], edges[1::2], strict=True):
            left.append({name: column[first:stop] for name, column in columns.items()})
    return Lines(_join(kept), _join(left))


def _columns(steps: StepColumns) -> dict[str, Column]:
    names = [name for name in StepColumns.__dataclass_fields__ if name != "by_source"]
    found = {**{name: getattr(steps, name) for name in names}, **steps.by_source}
    written = steps.written
    if len(written):  # clocks of hosts differ, and an axis must not go back
        known = np.where(np.isfinite(written), written, -math.inf)
        found["written"] = np.maximum.accumulate(np.where(np.isfinite(known), known, np.nanmin(written)))
    return found


def _join(parts: list[dict[str, Column]]) -> Line:
    names = dict.fromkeys(name for part in parts for name in part) or dict.fromkeys(CLOCKS)
    sizes = [len(part["step"]) for part in parts]
    columns = {
        name: np.concatenate(
            [np.zeros(0), *(part.get(name, np.full(size, math.nan)) for part, size in zip(parts, sizes, strict=True))]
        )
        for name in names
    }
    columns["written"] = np.maximum.accumulate(columns["written"])
    return Line(columns, np.cumsum(sizes)[:-1].tolist())


def reduce(line: Line, names: Iterable[str], points: int) -> Curve:
    """A line in about `points` buckets, none of which spans a break, with these columns besides those of `CLOCKS`."""
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
