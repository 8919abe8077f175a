"""Records without a usable text: where they are, and how many a command passes over (`--max-bad`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from fsdp_pretrain.errors import DataError

from .holdout import parse_percent

LISTED = 1000
"""Bad records that are kept of a shard; all are counted."""
_HOPELESS = 1000
"""Bad records from which on a share may not be more than half of what was read: then the format is another one."""


@dataclass(frozen=True)
class BadRecord:
    """A line or row that is not a document.

    Attributes:
        kind: `line` or `row`; `number` counts from 1 in the whole file.
        offset: byte where the line starts, in the unpacked text of a packed file; None for rows.
        remedy: what else may be wrong than this record.
    """

    path: str
    kind: str
    number: int
    offset: int | None
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        byte = "" if self.offset is None else f", byte {self.offset}"
        return f"{self.path}, {self.kind} {self.number}{byte}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """For the lists in files."""
        values = asdict(self)
        del values["remedy"]
        return values

    def error(self) -> DataError:
        """The refusal of this record."""
        also = f"; {self.remedy}" if self.remedy else ""
        return DataError(
            str(self), remedy=f"mend or remove it, or pass over up to N bad records with --max-bad N{also}"
        )


OnBad = Callable[[BadRecord], None]


def refuse(record: BadRecord) -> None:
    """Raise DataError: bad records are not passed over."""
    raise record.error()


@dataclass(frozen=True)
class MaxBad:
    """How many bad records are passed over: a number, or a share of all records."""

    number: int = 0
    share: Fraction | None = None

    @classmethod
    def parse(cls, text: str) -> MaxBad:
        """From `100` or `0.01%`. Raises ValueError."""
        if text.isascii() and text.isdecimal() and len(text) < 19:
            return cls(int(text))
        return cls(share=parse_percent(text))

    def __str__(self) -> str:
        return f"{self.number:_}" if self.share is None else f"{float(100 * self.share):g}%"

    def allows(self, bad: int, read: int) -> bool:
        """Whether so many bad ones are few enough among `read` records, these included."""
        return bad <= (self.number if self.share is None else self.share * read)


STRICT = MaxBad()


class BadRecords:
    """Counts what one reader passes over; raises DataError beyond the limit.

    A number is judged at once; a share by `check` at the end, or once there are many bad records and few others.

    Attributes:
        good: records that were documents; the reader counts them here.
        count: bad ones, of which `first` has the first `LISTED`.
    """

    def __init__(self, limit: MaxBad) -> None:
        self._limit = limit
        self.good, self.count = 0, 0
        self.first: list[BadRecord] = []

    def __call__(self, record: BadRecord) -> None:
        if self._limit == STRICT:
            refuse(record)
        self.count += 1
        if self.count <= LISTED:
            self.first.append(record)
        if self._limit.share is None or self.count > max(_HOPELESS, self.good):
            self.check()

    @property
    def read(self) -> int:
        return self.good + self.count

    def check(self) -> None:
        """Raise DataError if there are too many among what was read."""
        if not self._limit.allows(self.count, self.read):
            raise too_many(self.count, self.read, self._limit, list(map(str, self.first)))


def too_many(bad: int, read: int, limit: MaxBad, first: Sequence[str]) -> DataError:
    """The refusal of more bad records than allowed."""
    return DataError(
        f"{bad:_} of the {read:_} records read are bad, more than --max-bad {limit}; the first:\n"
        + "\n".join(f"    {record}" for record in first[:5]),
        remedy="mend the input, or raise --max-bad: finished shards are kept",
    )


def passed_over(bad: int, first: Sequence[str], where: str = "") -> str:
    """What is said of bad records; `where` is the file that lists all."""
    head = f"warning: bad records passed over: {bad:_}" + (f", listed in {where}" if where else "")
    return "\n".join([head, *(f"    {record}" for record in first[:5]), *(["    ..."] if bad > 5 else [])])
