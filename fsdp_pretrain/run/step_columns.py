"""The metrics of a segment in columns; a process parses each line once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import RunDir, seconds_of
from .metrics import METRICS, records
from .step_record import StepRecord

Column = NDArray[np.float64]
_COLUMNS: dict[str, Callable[[StepRecord], float | None]] = {
    "step": lambda record: record.step,
    "tokens": lambda record: record.trained,  # tokens of the step
    "iteration": lambda record: record.seconds.iteration,  # seconds, as are the next seven
    "data": lambda record: record.seconds.data,
    "checkpoint": lambda record: record.seconds.checkpoint,
    "heldout": lambda record: record.seconds.heldout,
    "forward_backward": lambda record: record.seconds.forward_backward,
    "optimizer": lambda record: record.seconds.optimizer,
    "other": lambda record: record.seconds.other,
    "paused": lambda record: record.seconds.paused,
    "skipped": lambda record: record.skipped,  # 1 where the update was skipped
    "batch": lambda record: record.batch,
    "length": lambda record: record.sequence_length,  # tokens of a sample
    "mfu": lambda record: record.mfu,
    "written": lambda record: seconds_of(record.time),  # since 1970
    "consumed": lambda record: record.consumed,  # samples trained after the step
    "trained": lambda record: record.tokens,  # tokens trained after the step
    "loss": lambda record: record.loss.mean,  # natural log
    "grad_norm": lambda record: record.grad_norm,  # before clipping
    "loss_scale": lambda record: record.loss_scale,
    "lr": lambda record: record.lr,
    "embedding_shrink": lambda record: record.ramps.embedding_shrink,
    "tokens_per_second": lambda record: record.tokens_per_second,
    "memory": lambda record: record.memory_bytes,
    "energy": lambda record: record.energy_joules,
}
"""Columns that every table has."""
_CHUNK = 10_000


class StepColumns(dict[str, Column]):
    """Columns of a segment's metrics by name, one row per record, float64, NaN where a record has no finite value.

    In addition to `_COLUMNS`: `loss/NAME`, `heldout/NAME`, `share/NAME` (mean losses and planned share of a source),
    `gradient/NAME`, `second_moment/NAME` (gradient norm and largest second moment of a group of parameters),
    `observed/NAME` (measures of extensions' observers).
    """

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self["step"])

    def of(self, rows: Any) -> StepColumns:
        """A table of some rows, given as a slice or a mask."""
        return StepColumns({name: column[rows] for name, column in self.items()})

    @property
    def compute(self) -> Column:
        """Seconds per step without waiting for data and saves, and without the held-out loss."""
        return self["iteration"] - self["data"] - self["checkpoint"] - self["heldout"]

    @property
    def missing(self) -> Column:
        """Seconds of steps before each step whose records were lost, from the timestamps of the other records."""
        lost = np.diff(self["step"], prepend=self["step"][:1] - 1) > 1
        passed = np.diff(self["written"], prepend=self["written"][:1]) - self["iteration"] - self["paused"]
        return np.where(lost, np.maximum(passed, 0.0), 0.0)

    @property
    def seconds(self) -> Column:
        """Seconds from the end of the previous recorded step, with unrecorded steps and pauses."""
        return self["iteration"] + self.missing + self["paused"]


_read: dict[tuple[Path, int], tuple[StepColumns, int]] = {}
"""Columns of metrics files up to a byte offset, by path and inode."""


def read_steps(path: Path, shown: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> StepColumns:
    """The columns of a metrics file without damaged lines; the next call of this process reads only new lines.

    `shown` may wrap them in a progress bar.
    """
    if not path.exists():
        return _table([])
    key, rows = (path, path.stat().st_ino), list[dict[str, float]]()
    known, offset = _read.get(key, (_table([]), 0))
    tables = [known]
    for record, behind in shown(records(path, offset)):
        rows.append(_row(record))
        offset = behind
        if len(rows) >= _CHUNK:
            tables.append(_table(rows))
            rows = []
    steps = concatenate([*tables, _table(rows)])
    _read[key] = steps, offset
    return steps


def recorded_bytes(run: RunDir) -> int:
    """The size of all metrics of a run."""
    return sum((path / METRICS).stat().st_size for path in run.segments if (path / METRICS).exists())


def _row(record: StepRecord) -> dict[str, float]:
    row: dict[str, float | None] = {name: read(record) for name, read in _COLUMNS.items()}
    row |= {f"loss/{name}": loss.mean for name, loss in record.sources.items()}
    row |= {f"heldout/{name}": loss.mean for name, loss in (record.heldout or {}).items()}
    row |= {f"share/{name}": share for name, share in record.ramps.shares.items()}
    for name, group in (record.groups or {}).items():
        row[f"gradient/{name}"] = group.grad_norm
        row[f"second_moment/{name}"] = group.second_moment_max
    row |= {f"observed/{name}": value for name, value in record.observed.items()}
    return {name: math.nan if value is None else value for name, value in row.items()}


def _table(rows: list[dict[str, float]]) -> StepColumns:
    names = dict.fromkeys([*_COLUMNS, *(name for row in rows for name in row)])
    return StepColumns({name: np.array([row.get(name, math.nan) for row in rows], np.float64) for name in names})


def concatenate(tables: list[StepColumns]) -> StepColumns:
    """Concatenate tables; NaN where a table lacks a column."""
    tables = [_table([]), *tables]
    names = dict.fromkeys(name for table in tables for name in table)
    missing = [np.full(table.count, math.nan) for table in tables]
    return StepColumns(
        {
            name: np.concatenate([table.get(name, empty) for table, empty in zip(tables, missing, strict=True)])
            for name in names
        }
    )
