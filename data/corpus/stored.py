"""A block of a corpus as it is stored: a part of a local shard, or a file of a cache.

A block is compared with its checksums when it is opened, and is then read from for hours. If the file changes, or the
kernel drops a page and reads it again wrongly, nobody would notice. So the hash of each stretch of tokens is kept when
the block is opened, and compared at every read. Positions count from the first token of the block.
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
"""Tokens are hashed in stretches of 2 ** 11, so that little more than a document is read and hashed to copy it."""
_AT_ONCE = 64
"""Stretches read at once while a block is opened."""
Piece = tuple[int, int, int]
"""(position in a row, start, stop in a block), of one token at least."""
Checksums = Sequence[int]
"""xxh3-64 of the bytes of a block's lengths and of its tokens, see `ShardBlocks`."""


class ChangedError(Exception):
    """The bytes of a block do not match its checksums, or no longer, or cannot be read; the message tells which."""


class FilePart(NamedTuple):
    """`size` bytes of a file."""

    path: Path
    start: int
    size: int

    def read(self, file: File | None = None) -> memoryview:
        """Read the bytes, from `file` if it is open. Raises ChangedError."""
        try:
            content = (file or File(self.path)).read(self.start, self.start + self.size)
        except OSError as error:
            raise ChangedError(f"it cannot be read: {error.strerror}") from None
        if len(content) < self.size:
            raise ChangedError(f"it ends {self.size - len(content)} bytes too early")
        return content


class StoredBlock:
    """A block of one copy of a corpus, compared with its checksums.

    Args:
        name: its shard without suffix, for messages.
        dtype: dtype of its tokens.
        lengths: where the lengths of its documents are stored, as int32.
        tokens: where the tokens of its documents are stored, one after the other.
        keeps_file: whether its file may stay open between reads. A file of a cache may not, since it would take up
            space after it was removed.

    Attributes:
        path: path of the file with its tokens.

    Raises:
        ChangedError: it does not match its checksums, or cannot be read.
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
        """Tokens of each document as stored, int32 [documents]. May wait for storage. Raises ChangedError."""
        content = self._lengths.read()
        if xxh3_64_intdigest(content) != self._sum:
            raise ChangedError("the lengths of its documents changed since it was opened")
        return np.frombuffer(content, "<i4")

    def file(self) -> File:
        """Open the file with its tokens. Raises ChangedError."""
        try:
            return File(self._tokens.path)
        except OSError as error:
            raise ChangedError(f"it cannot be opened: {error.strerror}") from None

    def bytes_for(self, tokens: int) -> int:
        """Upper bound of the bytes of the stretches that a piece of so many tokens touches."""
        return tokens * self._dtype.itemsize + 2 * self._stretch

    def read(self, pieces: Sequence[Piece], file: File) -> list[memoryview]:
        """Read the stretches of each piece from its file. May wait for storage. Raises ChangedError."""
        places = [self._stretches(start, stop) for _, start, stop in pieces]
        return [FilePart(self._tokens.path, start, stop - start).read(file) for start, stop in places]

    def _stretches(self, start: int, stop: int) -> tuple[int, int]:
        """The bytes of the file at which the stretches of tokens [start, stop) begin and end."""
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
            first, hashes = start >> STRETCH_BITS, self._hashes_of(content)
            if hashes != self._hashes[first : first + len(hashes)].tolist():
                raise ChangedError("its tokens changed since it was opened")
            begin = (start - (first << STRETCH_BITS)) * self._dtype.itemsize
            row[position : position + stop - start] = np.frombuffer(content, self._dtype, stop - start, begin)

    def copy_at_once(self, pieces: Sequence[Piece], row: npt.NDArray[Any], descriptor: int, buffer: memoryview) -> bool:
        """Copy pieces to their places in `row` if all are in memory. Returns whether they are. Raises ChangedError.

        Written for speed, since this happens for every document of every sample.

        Args:
            descriptor: file descriptor of its file.
            buffer: has `bytes_for` the longest piece.
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
    """The block of documents [first, first + count) of a shard in files. Raises DataError if it cannot be read, its
    index is damaged, or it does not match its checksums."""
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
    """The block in a file of a cache, of `size` bytes.

    Raises:
        FileNotFoundError: the cache does not have it.
        ChangedError: it cannot be read, or does not match its checksums.
    """
    if (actual := path.stat().st_size) != size:
        raise ChangedError(f"it has {actual} bytes instead of {size}")
    split = documents * LENGTH_BYTES
    lengths, tokens = FilePart(path, 0, split), FilePart(path, split, size - split)
    return StoredBlock(str(path), dtype, lengths, tokens, sums, keeps_file=False)
