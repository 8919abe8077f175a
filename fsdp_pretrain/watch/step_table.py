"""The numbers of every step of a run, read once and then as they are written; see `RunFollower`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdp_pretrain.record import lineage
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.lineage import LineagePart
from fsdp_pretrain.record.metrics import METRICS, records
from fsdp_pretrain.record.start_history import StepColumns, step_values
from fsdp_pretrain.record.step_record import StepRecord

Values = NDArray[np.float64]
_NAMES = [field.name for field in fields(StepColumns) if field.name != "by_source"]
COLUMN = {name: number for number, name in enumerate(_NAMES)}
_LINES_AT_ONCE = 4000
"""Lines read before what is there is shown: about a tenth of a second."""


@dataclass(frozen=True)
class HeldOutPoint:
    """A measured held-out loss: means by source."""

    step: int
    means: dict[str, float]


class _Segment:
    """One start's metrics file: rows in a growing table, and the offset up to which it was read."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._file = path, 0, 0
        self._table = np.empty((1024, len(COLUMN)))
        self._count = 0
        self.heldout: list[HeldOutPoint] = []
        self.last: StepRecord | None = None

    @property
    def rows(self) -> Values:
        """What was read; later reads leave it as it is."""
        return self._table[: self._count]

    def read(self, limit: int) -> int:
        """Read up to `limit` new lines. Returns the bytes that are left. Raises OSError."""
        found = self._path.stat()
        self._file, count = found.st_ino, 0
        if found.st_size == self._offset:
            return 0
        for record, behind in records(self._path, self._offset):
            self._add(record)
            self._offset, count = behind, count + 1
            if count == limit:
                return max(0, found.st_size - behind)
        return 0

    def is_of(self, file: os.stat_result) -> bool:
        """Whether this file is what was read so far, and not another in its place."""
        return self._file in (0, file.st_ino) and file.st_size >= self._offset

    def _add(self, record: StepRecord) -> None:
        if self._count == len(self._table):
            self._table = np.concatenate([self._table, np.empty_like(self._table)])  # views keep the old one
        self._table[self._count] = step_values(record)
        self._count += 1
        self.last = record
        if record.heldout:
            means = {name: loss.mean for name, loss in record.heldout.items()}
            self.heldout.append(HeldOutPoint(record.step, means))


class StepTable:
    """The kept line of a run in columns.

    Attributes:
        unread: bytes of metrics that are still to be read.
        last: the newest record of the newest start.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._segments: dict[int, _Segment] = {}
        self._placed: set[int] = set()
        self._parts: list[LineagePart] = []
        self.unread = 0

    def read(self) -> bool:
        """Read what is new, or part of it if that is much. Returns whether it was all. Raises UserError, OSError."""
        paths = {int(path.name): path for path in self._run.segments}
        if not set(self._segments) <= set(paths):  # another run in its place
            self._segments.clear()
        placed = {number for number, path in paths.items() if (path / lineage.LINEAGE).exists()}
        if placed != self._placed:
            self._parts, self._placed = lineage.line(lineage.nodes(self._run)), placed
        left, self.unread = _LINES_AT_ONCE, 0
        for number, path in paths.items():
            with contextlib.suppress(FileNotFoundError):
                file = (path / METRICS).stat()
                if number not in self._segments or not self._segments[number].is_of(file):
                    self._segments[number] = _Segment(path / METRICS)
                segment = self._segments[number]
                before = len(segment.rows)
                self.unread += segment.read(left) if left > 0 else file.st_size
                left -= len(segment.rows) - before
        return not self.unread

    @property
    def last(self) -> StepRecord | None:
        return next((seen.last for _, seen in sorted(self._segments.items(), reverse=True) if seen.last), None)

    def kept(self, *columns: str) -> tuple[Values, ...]:
        """Columns of the kept line, in the order of steps."""
        slices = list(self._slices())
        return tuple(
            np.concatenate([np.empty(0), *(rows[:, COLUMN[name]] for rows in slices)])
            if len(slices) != 1
            else slices[0][:, COLUMN[name]]
            for name in columns
        )

    def _slices(self) -> Iterator[Values]:
        for part in self._parts:
            if (segment := self._segments.get(part.segment)) is not None:
                rows = segment.rows
                first, stop = np.searchsorted(rows[:, 0], (part.after, part.until), side="right")
                yield rows[first:stop]

    def recent(self, count: int) -> dict[str, Values]:
        """All columns of the last rows of the newest start that has any, at most `count`."""
        newest = [seen for _, seen in sorted(self._segments.items()) if len(seen.rows)]
        rows = newest[-1].rows[-count:] if newest else np.empty((0, len(COLUMN)))
        return {name: rows[:, number] for name, number in COLUMN.items()}

    def starts(self) -> list[int]:
        """First step of each start on the kept line after the first."""
        return [part.after + 1 for part in self._parts[1:]]

    def heldout(self) -> list[HeldOutPoint]:
        """Held-out losses of the kept line."""
        return [
            found
            for part in self._parts
            if (segment := self._segments.get(part.segment)) is not None
            for found in segment.heldout
            if part.after < found.step <= part.until
        ]

    def history(self, path: Path, _: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> tuple[StepColumns, int]:
        """As `start_history.read_steps`, from what was read."""
        segment = self._segments.get(int(path.parent.name)) or _Segment(path)
        return StepColumns(**dict(zip(_NAMES, segment.rows.T, strict=True)), by_source={}), 0
