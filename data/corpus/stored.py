"""A block of a corpus as it is stored, opened for reading: a part of a local shard, or a file of a cache.

Positions count from the first token of the block, so that both look alike to the packer.

A block is compared with its checksums when it is opened. It then stays open for hours, mapped into memory: a changed
file, or pages that the kernel drops and reads again, would change it unseen. So the hash of each stretch of tokens is
kept from that moment, and what is taken out is compared with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from fsdp_pretrain.errors import DataError
from fsdp_pretrain.remote import Location, Url

from .cache import LENGTH_BYTES
from .mapping import Mapping
from .shards import Part, Shard

STRETCH_BITS = 12
"""Tokens are hashed in stretches of 2 ** 11: of a document that is copied, little else is hashed."""
Piece = tuple[int, int, int]
"""(position in a row, start, stop in a block)."""
Checksums = Sequence[int]
"""xxh3-64 of the bytes of a block's lengths and of its tokens, see `ShardBlocks`."""


class ChangedError(Exception):
    """The bytes of a block are not, or no longer, those of its checksums; says which."""


class StoredBlock(ABC):
    """A block of one copy of a corpus.

    Attributes:
        place: of the copy.
        name: of its shard, without suffix, for messages.
        tokens: [tokens], all documents as stored, one after the other. Mapped: compared only by `copy`.
    """

    def __init__(self, place: Location, name: str, lengths: npt.NDArray[np.int32], tokens: npt.NDArray[Any]) -> None:
        self.place, self.name, self._lengths, self.tokens = place, name, lengths, tokens
        self._raw = tokens.data.cast("B")
        self._stretch = tokens.itemsize << STRETCH_BITS

    def check(self, expected: Checksums | None) -> None:
        """Compare a block that was just opened, and is in memory, with its checksums. Raises ChangedError."""
        self._sum = xxh3_64_intdigest(self._lengths.tobytes())
        if expected is not None and self._sum != expected[0]:
            raise ChangedError("the lengths of its documents have another checksum than checksums.npy says")
        size, found = self._stretch, range(0, len(self._raw), self._stretch)
        self._stretches = array("Q", (xxh3_64_intdigest(self._raw[at : at + size]) for at in found))
        if expected is not None and xxh3_64_intdigest(self._raw) != expected[1]:  # last: no change goes unseen
            raise ChangedError("its tokens have another checksum than checksums.npy says")

    def lengths(self) -> npt.NDArray[np.int32]:
        """[documents], tokens of each as stored; a copy. They are in memory. Raises ChangedError."""
        lengths = self._lengths.copy()
        if xxh3_64_intdigest(lengths.data) != self._sum:
            raise ChangedError("the lengths of its documents changed since it was opened")
        return lengths

    def copy(self, pieces: Sequence[Piece], row: npt.NDArray[Any], stretches: Collection[int]) -> None:
        """Copy tokens [start, stop), which are in memory, to a position in `row`, for each (position, start, stop).

        Args:
            stretches: of `pieces`; in memory.

        Raises:
            ChangedError: they, or tokens near them, changed since the block was opened.
        """
        for position, start, stop in pieces:
            row[position : position + stop - start] = self.tokens[start:stop]
        raw, size, expected = self._raw, self._stretch, self._stretches
        for number in stretches:  # after they were copied: no change between the two goes unseen
            if xxh3_64_intdigest(raw[number * size : (number + 1) * size]) != expected[number]:
                raise ChangedError("its tokens changed since it was opened")

    @property
    def is_gone(self) -> bool:
        """Whether its file was removed or replaced, so that its space on disk is free once it is let go."""
        return False

    @abstractmethod
    def load(self, first: int, stop: int) -> None:
        """Load tokens [first, stop), clipped to the block, or if there are none the lengths; see `Mapping.load`.

        Raises:
            ChangedError: they cannot be read.
        """

    @abstractmethod
    def resident(self, first: int, stop: int) -> bool:
        """Whether these tokens, or the lengths if there are none, are known to be in memory."""


def stretches_of(pieces: Sequence[Piece]) -> set[int]:
    """The stretches that pieces lie in."""
    bits = STRETCH_BITS
    return {number for _, start, stop in pieces for number in range(start >> bits, (stop - 1 >> bits) + 1)}


class LocalBlock(StoredBlock):
    """Documents [first, first + count) of a shard in files.

    Args:
        expected: None if the corpus has no checksums.

    Raises:
        DataError: it cannot be read, its index is damaged, or it is not what was prepared.
    """

    def __init__(self, place: Path, shard: Shard, first: int, count: int, expected: Checksums | None) -> None:
        shard.load(("index", first, first + count + 1))
        shard.require_sound(first, first + count)
        self.shard, self._index, lengths = shard, (first, first + count), shard.lengths[first : first + count]
        self._begin = int(shard.pointers[first]) // shard.dtype.itemsize
        stop = int(shard.pointers[first + count - 1]) // shard.dtype.itemsize + int(lengths[-1])
        super().__init__(place, str(shard.prefix), lengths, shard.tokens[self._begin : stop])
        shard.load(("tokens", self._begin, stop))
        try:
            self.check(expected)
        except ChangedError as error:
            raise DataError(
                f"{shard.prefix}.bin or .idx is damaged in the block of documents {first} to {first + count - 1} "
                f"(tokens {self._begin} to {stop - 1}): {error}",
                effect="its tokens are not those that were prepared; nothing was trained on them",
                remedy="restore both files from where the corpus came from, or name a copy of the corpus as the "
                "source's mirror; `fsdp-data validate` finds all that is damaged",
            ) from None

    def load(self, first: int, stop: int) -> None:
        try:
            self.shard.load(self._part(first, stop))
        except DataError as error:
            raise ChangedError(error.cause) from None

    def resident(self, first: int, stop: int) -> bool:
        return self.shard.resident(self._part(first, stop))

    def _part(self, first: int, stop: int) -> Part:
        if first >= stop:
            return "index", *self._index
        return "tokens", self._begin + first, self._begin + min(stop, len(self.tokens))


class CachedBlock(StoredBlock):
    """A block's file in a cache.

    Raises:
        FileNotFoundError: the cache does not hold it.
        ChangedError: it cannot be read, or is not what was fetched.
    """

    def __init__(
        self, place: Url, path: Path, documents: int, dtype: np.dtype[Any], size: int, expected: Checksums
    ) -> None:
        self._begin, self._item = documents * LENGTH_BYTES, dtype.itemsize
        try:
            self._file = Mapping(path)
            self._file.load(0, size)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ChangedError(f"it cannot be read: {error.strerror}") from None
        raw = self._file.bytes
        if len(raw) != size:
            raise ChangedError(f"it has {len(raw)} bytes instead of {size}")
        lengths = np.frombuffer(raw, "<i4", documents)
        super().__init__(place, str(path), lengths, np.frombuffer(raw, dtype, -1, self._begin))
        self.check(expected)

    @property
    def is_gone(self) -> bool:
        try:
            return self._file.path.stat().st_ino != self._file.inode
        except FileNotFoundError:
            return True

    def load(self, first: int, stop: int) -> None:
        try:
            self._file.load(*self._bytes(first, stop))
        except OSError as error:
            raise ChangedError(f"it cannot be read: {error.strerror}") from None

    def resident(self, first: int, stop: int) -> bool:
        return self._file.resident(*self._bytes(first, stop))

    def _bytes(self, first: int, stop: int) -> tuple[int, int]:
        if first >= stop:
            return 0, self._begin
        return self._begin + first * self._item, self._begin + stop * self._item
