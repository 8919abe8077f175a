"""A block of a corpus as it is stored: a part of a local shard, or a file of a cache.

A block is compared with its checksums when it is opened, and is then read from for hours: a file that is changed, or a
page that the kernel drops and reads again, would change it unseen. So the hash of each stretch of tokens is kept from
that moment, and what is read is compared with it. Positions count from the first token of the block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from os import RWF_NOWAIT, preadv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from fsdp_pretrain.errors import DataError

from .files import NOT_AT_ONCE, File
from .shards import LENGTH_BYTES, Shard

STRETCH_BITS = 11
"""Tokens are hashed in stretches of 2 ** 11: of a document that is copied, little else is read and hashed."""
_AT_ONCE = 64
"""Stretches that are read at once while a block is opened."""
Piece = tuple[int, int, int]
"""(position in a row, start, stop in a block), of one token at least."""
Checksums = Sequence[int]
"""xxh3-64 of the bytes of a block's lengths and of its tokens, see `ShardBlocks`."""


class ChangedError(Exception):
    """The bytes of a block are not, or no longer, those of its checksums, or cannot be read; says which."""


class FilePart(NamedTuple):
    """`size` bytes of a file."""

    path: Path
    start: int
    size: int

    def read(self, file: File | None = None) -> memoryview:
        """Raises ChangedError."""
        try:
            found = (file or File(self.path)).read(self.start, self.start + self.size)
        except OSError as error:
            raise ChangedError(f"it cannot be read: {error.strerror}") from None
        if len(found) < self.size:
            raise ChangedError(f"it ends {self.size - len(found)} bytes too early")
        return found


class StoredBlock:
    """A block of one copy of a corpus, compared with its checksums.

    Args:
        name: of its shard, without suffix, for messages.
        dtype: of a token.
        lengths: of the documents, int32.
        tokens: of all documents as stored, one after the other.
        keeps_file: its file may stay open between reads. That of a cache may not: it would take up room after it was
            dropped.

    Attributes:
        path: of the file of its tokens.

    Raises:
        ChangedError: it is not what was stored, or cannot be read.
    """

    def __init__(
        self,
        name: str,
        dtype: np.dtype[Any],
        lengths: FilePart,
        tokens: FilePart,
        expected: Checksums,
        *,
        keeps_file: bool,
    ) -> None:
        self.name, self.path, self.keeps_file = name, str(tokens.path), keeps_file
        self._dtype, self._lengths, self._tokens = dtype, lengths, tokens
        self._stretch = dtype.itemsize << STRETCH_BITS
        self._sum = xxh3_64_intdigest(lengths.read())
        if self._sum != expected[0]:
            raise ChangedError("the lengths of its documents have another checksum than checksums.npy says")
        self._hashes, whole = array("Q"), xxh3_64()
        file, path, step = self.file(), tokens.path, _AT_ONCE * self._stretch
        for start in range(0, tokens.size, step):
            content = FilePart(path, tokens.start + start, min(step, tokens.size - start)).read(file)
            whole.update(content)
            self._hashes.extend(self._hashes_of(content))
        if whole.intdigest() != expected[1]:
            raise ChangedError("its tokens have another checksum than checksums.npy says")

    def _hashes_of(self, content: memoryview) -> list[int]:
        return [xxh3_64_intdigest(content[at : at + self._stretch]) for at in range(0, len(content), self._stretch)]

    def lengths(self) -> npt.NDArray[np.int32]:
        """[documents], tokens of each as stored. May wait for storage. Raises ChangedError."""
        content = self._lengths.read()
        if xxh3_64_intdigest(content) != self._sum:
            raise ChangedError("the lengths of its documents changed since it was opened")
        return np.frombuffer(content, "<i4")

    def file(self) -> File:
        """The file of its tokens, opened. Raises ChangedError."""
        try:
            return File(self._tokens.path)
        except OSError as error:
            raise ChangedError(f"it cannot be opened: {error.strerror}") from None

    def bytes_for(self, tokens: int) -> int:
        """The most bytes that the stretches of a piece of so many tokens have."""
        return tokens * self._dtype.itemsize + 2 * self._stretch

    def read(self, pieces: Sequence[Piece], file: File) -> list[memoryview]:
        """The bytes of the stretches of each piece, as its file has them. May wait for storage. Raises ChangedError."""
        places = [self._stretches(start, stop) for _, start, stop in pieces]
        return [FilePart(self._tokens.path, start, stop - start).read(file) for start, stop in places]

    def _stretches(self, start: int, stop: int) -> tuple[int, int]:
        """Where the stretches of tokens [start, stop) begin and end in the file."""
        size, tokens = self._stretch, self._tokens
        end = ((stop - 1 >> STRETCH_BITS) + 1) * size
        return tokens.start + (start >> STRETCH_BITS) * size, tokens.start + min(end, tokens.size)

    def copy(self, pieces: Sequence[Piece], row: npt.NDArray[Any], read: Sequence[memoryview]) -> None:
        """Copy pieces to their places in `row`.

        Args:
            read: the bytes of the stretches of each piece.

        Raises:
            ChangedError: a piece, or tokens near it, changed since the block was opened.
        """
        for (position, start, stop), content in zip(pieces, read, strict=True):
            first, found = start >> STRETCH_BITS, self._hashes_of(content)
            if found != self._hashes[first : first + len(found)].tolist():
                raise ChangedError("its tokens changed since it was opened")
            begin = (start - (first << STRETCH_BITS)) * self._dtype.itemsize
            row[position : position + stop - start] = np.frombuffer(content, self._dtype, stop - start, begin)

    def copy_at_once(self, pieces: Sequence[Piece], row: npt.NDArray[Any], descriptor: int, buffer: memoryview) -> bool:
        """The same if all is in memory, without waiting; whether it is. Raises ChangedError.

        Written for speed: this happens for every document of every sample.

        Args:
            descriptor: of its open file.
            buffer: of `bytes_for` the longest piece.
        """
        size, end, origin = self._stretch, self._tokens.size, self._tokens.start
        hashes, dtype = self._hashes, self._dtype
        tokens = np.frombuffer(buffer, dtype, len(buffer) // dtype.itemsize)
        try:
            for position, start, stop in pieces:
                first, last = start >> STRETCH_BITS, (stop - 1 >> STRETCH_BITS) + 1
                count = min(last * size, end) - first * size
                content = buffer[:count]
                if preadv(descriptor, (content,), origin + first * size, RWF_NOWAIT) < count:
                    return False
                if last - first == 1:
                    same = xxh3_64_intdigest(content) == hashes[first]
                else:
                    same = self._hashes_of(content) == hashes[first:last].tolist()
                if not same:
                    raise ChangedError("its tokens changed since it was opened")
                begin = start - (first << STRETCH_BITS)
                row[position : position + stop - start] = tokens[begin : begin + stop - start]
        except OSError as error:
            if error.errno in NOT_AT_ONCE:
                return False
            raise ChangedError(f"it cannot be read: {error.strerror}") from None
        return True


def local_block(shard: Shard, first: int, count: int, expected: Checksums) -> StoredBlock:
    """Documents [first, first + count) of a shard in files.

    Raises:
        DataError: it cannot be read, its index is damaged, or it is not what was prepared.
    """
    index = shard.rows(first, first + count)
    item = shard.dtype.itemsize
    begin, stop = int(index.pointers[0]), int(index.pointers[-1]) + int(index.lengths[-1]) * item
    try:
        return StoredBlock(
            str(shard.prefix),
            shard.dtype,
            FilePart(shard.index_path, shard.lengths_at(first), count * LENGTH_BYTES),
            FilePart(shard.path, begin, stop - begin),
            expected,
            keeps_file=True,
        )
    except ChangedError as error:
        raise DataError(
            f"{shard.prefix}.bin or .idx is damaged in the block of documents {first} to {first + count - 1} "
            f"(tokens {begin // item} to {stop // item - 1}): {error}",
            effect="its tokens are not those that were prepared; nothing was trained on them",
            remedy="restore both files from where the corpus came from, or set the source's path to a copy of the "
            "corpus; `fsdp-data validate` finds all that is damaged",
        ) from None


def cached_block(path: Path, documents: int, dtype: np.dtype[Any], size: int, sums: Checksums) -> StoredBlock:
    """A block's file in a cache.

    Raises:
        FileNotFoundError: the cache does not hold it.
        ChangedError: it cannot be read, or is not what was fetched.
    """
    if (found := path.stat().st_size) != size:
        raise ChangedError(f"it has {found} bytes instead of {size}")
    split = documents * LENGTH_BYTES
    lengths, tokens = FilePart(path, 0, split), FilePart(path, split, size - split)
    return StoredBlock(str(path), dtype, lengths, tokens, sums, keeps_file=False)
