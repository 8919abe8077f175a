"""Token files as runs of whole documents, whatever their format: what `validate` measures and `import` adopts.

Reading is streaming: a run holds about 4M tokens, and a document is never cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from .shards import Shard

Format = Literal["megatron"]
RUN_TOKENS = 4_000_000


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive documents of one file.

    Attributes:
        first: number of the first document within the file.
        lengths: int64 [documents], tokens of each, as stored (separators included where the file holds any).
        tokens: [lengths.sum()], the documents one behind the other; any integer dtype.
    """

    first: int
    lengths: npt.NDArray[np.int64]
    tokens: npt.NDArray[Any]


class TokenFile(Protocol):
    """One file (or pair of files) opened for reading. Opening raises DataError if it is not of its format."""

    name: str

    def runs(self, size: int = RUN_TOKENS) -> Iterator[Run]:
        """All documents in order, in runs of about `size` tokens and of at least one document."""
        ...


class MegatronFile:
    """A `.bin`/`.idx` pair; see `data.shards`."""

    def __init__(self, prefix: Path) -> None:
        self.name, self.shard = prefix.name, Shard(prefix)

    def runs(self, size: int = RUN_TOKENS) -> Iterator[Run]:
        """All documents in order. The index must be sound: documents one behind the other."""
        lengths = self.shard.lengths.astype(np.int64)
        ends = np.cumsum(lengths)
        first = 0
        while first < len(lengths):
            base = int(ends[first - 1]) if first else 0
            stop = max(first + 1, int(np.searchsorted(ends, base + size)))
            begin = int(self.shard.pointers[first]) // self.shard.dtype.itemsize
            yield Run(first, lengths[first:stop], self.shard.tokens[begin : begin + int(ends[stop - 1]) - base])
            first = stop


def open_file(path: Path, format: Format) -> TokenFile:  # noqa: A002
    """Open one file of a format. Raises DataError."""
    del format
    return MegatronFile(path)
