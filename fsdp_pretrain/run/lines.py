"""The steps of a run in columns: the kept line, and the steps that were left behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .files import RunDir
from .metrics import METRICS
from .start_history import Start, StartHistory, kept_steps
from .step_columns import Column, StepColumns, concatenate, read_steps

CLOCKS = ("step", "trained", "written")
"""Columns of the x axes: steps, tokens, and seconds since 1970."""
Position = dict[str, float]
"""A place on every x axis, by clock; NaN where unknown."""


@dataclass(frozen=True)
class Line:
    """Steps in order, of one or more segments: columns by name, float64 [rows]."""

    columns: dict[str, Column]
    breaks: list[int]  # rows before which the line was interrupted, sorted

    def __len__(self) -> int:
        return len(self.columns["step"])


@dataclass(frozen=True)
class Lines:
    """All steps of a run: the kept line, and the parts that resumes, rollbacks and forks left behind."""

    kept: Line
    left: Line

    def locate(self, step: float | None, time: float | None) -> Position:
        """The place of an event on the kept line, given its step, its time, or both."""
        kept, known = self.kept.columns, math.nan if time is None else time
        if not len(self.kept):
            return {**dict.fromkeys(CLOCKS, math.nan), "step": math.nan if step is None else step, "written": known}
        if step is None:
            row = max(0, int(np.searchsorted(kept["written"], known, side="right")) - 1)
            place = {clock: float(kept[clock][row]) for clock in CLOCKS}
        else:
            place = {clock: float(np.interp(step, kept["step"], kept[clock])) for clock in CLOCKS} | {"step": step}
        return place if time is None else place | {"written": time}


def read_lines(run: RunDir, history: StartHistory, shown: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> Lines:
    """The lines of a run from its history; `shown` may wrap metrics lines in a progress bar."""
    segments = {start.segment: _timed(start) for start in history.starts}
    for path in run.segments:  # segments of a fork's parent, and those whose environment is damaged
        if int(path.name) not in segments and (path / METRICS).exists():
            segments[int(path.name)] = read_steps(path / METRICS, shown)
    kept, left = list[StepColumns](), list[StepColumns]()
    for number, steps in sorted(segments.items()):
        if not steps.count:
            continue
        columns = StepColumns(steps | {"written": _rising(steps["written"])})
        on_line = kept_steps(history.nodes, number, steps)
        if on_line.any():
            kept.append(columns.of(on_line))
        edges = np.flatnonzero(np.diff(on_line, prepend=True, append=True))
        left += [columns.of(slice(first, stop)) for first, stop in zip(edges[::2], edges[1::2], strict=True)]
    return Lines(_join(kept), _join(left))


def _timed(start: Start) -> StepColumns:
    """The steps of a start, `written` being when they ended: records are written up to two steps later."""
    steps, begun = start.steps, start.connected if start.ready is None else start.ready
    return StepColumns(steps | {"written": begun + np.cumsum(steps.seconds)})


def _rising(times: Column) -> Column:
    """Make times non-decreasing: clocks of hosts differ."""
    known = np.where(np.isfinite(times), times, -math.inf)
    return np.maximum.accumulate(np.where(np.isfinite(known), known, np.nanmin(times)))


def _join(parts: list[StepColumns]) -> Line:
    columns = concatenate(parts)
    columns["written"] = np.maximum.accumulate(columns["written"])
    return Line(columns, np.cumsum([part.count for part in parts])[:-1].tolist())
