"""Records without a usable text: where they are, and how many a command may skip (`--max-bad`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_pretrain.errors import DataError

LISTED = 1000
"""Most bad records that are listed for a shard; all are counted."""


@dataclass(frozen=True)
class BadRecord:
    """A line or row that is not a document."""

    path: str
    kind: str  # `line` or `row`
    number: int  # counted from 1 in the whole file
    offset: int | None  # byte at which the line starts, in the unpacked text of a packed file; None for rows
    reason: str

    def __str__(self) -> str:
        byte = "" if self.offset is None else f", byte {self.offset}"
        return f"{self.path}, {self.kind} {self.number}{byte}: {self.reason}"


OnBad = Callable[[BadRecord], None]


def refuse(record: BadRecord) -> None:
    """Raise DataError for a bad record, instead of skipping it."""
    raise DataError(str(record), remedy="mend or remove it, or pass over up to N bad records with --max-bad N")


class BadRecords:
    """Counts the bad records that one reader skips; raises DataError at the first one beyond `limit`.

    Attributes:
        good: number of records that were documents; the reader counts them here.
        count: number of bad records.
        first: the first `LISTED` bad records.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.good, self.count = 0, 0
        self.first: list[BadRecord] = []

    def __call__(self, record: BadRecord) -> None:
        if not self._limit:
            refuse(record)
        self.count += 1
        if self.count <= LISTED:
            self.first.append(record)
        if self.count > self._limit:
            raise too_many(self.count, self.good + self.count, self._limit, list(map(str, self.first)))


def too_many(bad: int, read: int, limit: int, first: Sequence[str]) -> DataError:
    """The error for more bad records than allowed."""
    return DataError(
        f"{bad:_} of the {read:_} records read are bad, more than --max-bad {limit:_}; the first:\n"
        + "\n".join(f"    {record}" for record in first[:5]),
        remedy="mend the input, or raise --max-bad: finished shards are kept",
    )


def passed_over(bad: int, first: Sequence[str], where: str = "") -> str:
    """The warning about skipped records. `where`: the file that lists all of them."""
    head = f"warning: bad records passed over: {bad:_}" + (f", listed in {where}" if where else "")
    return "\n".join([head, *(f"    {record}" for record in first[:5]), *(["    ..."] if bad > 5 else [])])
