"""Records without a usable text: where they are, and how many a command passes over (`--max-bad`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_pretrain.errors import DataError

LISTED = 1000
"""Bad records that are kept of a shard; all are counted."""


@dataclass(frozen=True)
class BadRecord:
    """A line or row that is not a document.

    Attributes:
        kind: `line` or `row`; `number` counts from 1 in the whole file.
        offset: byte where the line starts, in the unpacked text of a packed file; None for rows.
    """

    path: str
    kind: str
    number: int
    offset: int | None
    reason: str

    def __str__(self) -> str:
        byte = "" if self.offset is None else f", byte {self.offset}"
        return f"{self.path}, {self.kind} {self.number}{byte}: {self.reason}"


OnBad = Callable[[BadRecord], None]


def refuse(record: BadRecord) -> None:
    """Raise DataError: bad records are not passed over."""
    raise DataError(str(record), remedy="mend or remove it, or pass over up to N bad records with --max-bad N")


class BadRecords:
    """Counts what one reader passes over; raises DataError at the first bad record beyond `limit`.

    Attributes:
        good: records that were documents; the reader counts them here.
        count: bad ones, of which `first` has the first `LISTED`.
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
    """The refusal of more bad records than allowed."""
    return DataError(
        f"{bad:_} of the {read:_} records read are bad, more than --max-bad {limit:_}; the first:\n"
        + "\n".join(f"    {record}" for record in first[:5]),
        remedy="mend the input, or raise --max-bad: finished shards are kept",
    )


def passed_over(bad: int, first: Sequence[str], where: str = "") -> str:
    """What is said of bad records; `where` is the file that lists all."""
    head = f"warning: bad records passed over: {bad:_}" + (f", listed in {where}" if where else "")
    return "\n".join([head, *(f"    {record}" for record in first[:5]), *(["    ..."] if bad > 5 else [])])
