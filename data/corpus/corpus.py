"""A corpus: shards, a manifest, and a block table that locates every document.

    CORPUS/manifest.json     tokenizer fingerprint, separator policy, shards with sizes and checksums
    CORPUS/blocks.npy        int64 [blocks, 5], see `BLOCK_COLUMNS`
    CORPUS/checksums.npy     uint64 [blocks, 2], xxh3-64 of the lengths and of the tokens of each block, as stored
    CORPUS/tokenizer.json    or tokenizer.model: a copy of the tokenizer
    CORPUS/shards/*.bin,.idx Megatron-Core indexed datasets; adopted ones stay where they are, the manifest has the path

Blocks are runs of documents of about 4M tokens within one shard. A process needs only the table to locate every
training sample: 20 MB for a corpus of 2T tokens.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_pretrain.data.text.tokenizer import Tokenizer, fingerprint_of
from fsdp_pretrain.errors import DataError, raising
from fsdp_pretrain.remote import PATIENCE, Location, Url

from .cached import CachedCopy, CacheUse
from .files import File, KeptFiles
from .manifest import read_manifest
from .reading import READ_TIMEOUT, CorpusReads
from .shards import Shard
from .stored import ChangedError, Piece, StoredBlock, local_block

BLOCK_COLUMNS = ("shard", "first_document", "documents", "nonempty_documents", "tokens")
CHECKSUMS = "checksums.npy"
_FILES = KeptFiles(128)
"""Open files; each takes a descriptor, and `fsdp_pretrain.open_files` counts on few for a rank's data."""
_OPEN_BLOCKS = 4096
"""Most open blocks; each takes 10 kB of memory for the hashes of 4M tokens."""
_TRIES = 4
"""How often a block is opened that changes while it is open."""
T = TypeVar("T")


class Corpus:
    """A corpus opened for reading; shards and blocks are opened when first needed, and a bounded number stays open.

    Args:
        directory: path, or URL of remote storage.
        cache: the cache for a URL.

    Attributes:
        blocks: int64 [blocks, 5], see `BLOCK_COLUMNS`.
        checksums: uint64 [blocks, 2], see `ShardBlocks`.
        reads: times and notices of reads.
        cached: the copy in the cache, for a URL; else None.

    Raises:
        DataError: it is not a corpus, or has other tables than the manifest names, or is a URL without a cache.
    """

    def __init__(
        self, directory: Location, *, read_timeout: float = READ_TIMEOUT, cache: CacheUse | None = None
    ) -> None:
        self.directory = directory
        self.reads = CorpusReads(read_timeout, cache.problem if cache is not None else str)
        self.cached: CachedCopy | None = None
        if not isinstance(directory, Url):
            self.manifest = self._read("manifest.json", lambda: read_manifest(directory))
            self.blocks = self._read_table("blocks.npy", self.manifest.blocks_xxh3)
            self.checksums = self._read_table(CHECKSUMS, self.manifest.checksums_xxh3)
        elif cache is None:
            raise DataError(
                f"{directory} is a URL, and there is no cache for it", remedy="set data.cache.dir and .size"
            )
        else:
            patience, warn = min(PATIENCE, read_timeout / 2), self.reads.warn
            self.cached = self._read("manifest.json", lambda: CachedCopy(directory, cache, patience, warn))
            self.manifest = self.cached.manifest
            self.blocks, self.checksums = self.cached.blocks, self.cached.checksums
        if not len(self.blocks):
            raise DataError(f"{directory} holds no tokens")
        self._blocks: OrderedDict[int, StoredBlock] = OrderedDict()
        self._opened = object()  # owns the files that stay open, and outlives them
        self._buffer = memoryview(b"")

    def _read(self, name: str, act: Callable[[], T]) -> T:
        """See `CorpusReads.read`."""
        return self.reads.read(self.directory / name, act)

    def _read_table(self, name: str, xxh3: str) -> npt.NDArray[Any]:
        return self._read(name, lambda: _table(Path(self.directory, name), xxh3))

    def lengths(self, number: int) -> npt.NDArray[np.int32]:
        """Tokens of each document of block `number`, as stored: int32 [documents]. Raises DataError if they cannot be
        read, or are damaged."""
        return self._taken(number, lambda block: block.lengths())

    def copy(self, number: int, pieces: Sequence[Piece], row: npt.NDArray[Any]) -> None:
        """Copy tokens of block `number` to a row, see `StoredBlock.copy`. Raises DataError if they cannot be read, or
        are damaged."""

        def take(block: StoredBlock) -> tuple[File, list[memoryview]]:
            file = _FILES.get(self._opened, block.path) or block.file()
            return file, block.read(pieces, file)

        for _ in range(_TRIES):
            try:
                if self._copied_at_once(number, pieces, row):
                    return
                block, (file, read) = self._read_block(number, take)
                if block.keeps_file:
                    _FILES.keep(self._opened, block.path, file)
                block.copy(pieces, row, read)
                return
            except ChangedError as error:
                changed = error
                self._close(number)
        raise self._keeps_changing(number, changed)

    def _copied_at_once(self, number: int, pieces: Sequence[Piece], row: npt.NDArray[Any]) -> bool:
        """Copy pieces if they are in memory, without another thread. Returns whether they were. Raises ChangedError."""
        if (block := self._blocks.get(number)) is None:
            return False
        if len(self._buffer) < (needed := block.bytes_for(len(row))):
            self._buffer = memoryview(bytearray(needed))
        if block.keeps_file:  # opening it may wait for storage
            file = _FILES.get(self._opened, block.path)
            return file is not None and block.copy_at_once(pieces, row, file.descriptor, self._buffer)
        try:
            descriptor = os.open(block.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the error is raised when the block is opened again
            return False
        try:
            return block.copy_at_once(pieces, row, descriptor, self._buffer)
        finally:
            os.close(descriptor)

    def tokens(self, number: int, first: int, stop: int) -> npt.NDArray[Any]:
        """A copy of tokens [first, stop) of block `number`, see `copy`. Raises DataError."""
        tokens = np.empty(stop - first, dtype=self.manifest.dtype)
        self.copy(number, [(0, first, stop)] if first < stop else [], tokens)
        return tokens

    def block(self, number: int) -> StoredBlock:
        """Block `number`, opened and compared with its checksums. Raises DataError."""
        return self._blocks.get(number) or self._taken(number, lambda block: block)

    def _taken(self, number: int, take: Callable[[StoredBlock], T]) -> T:
        """The result of `take` on a block, which is opened again if it changed."""
        for _ in range(_TRIES):
            try:
                return self._read_block(number, take)[1]
            except ChangedError as error:
                changed = error
                self._close(number)
        raise self._keeps_changing(number, changed)

    def _read_block(self, number: int, take: Callable[[StoredBlock], T]) -> tuple[StoredBlock, T]:
        """A block, opened if necessary, and the result of `take` on it, in the thread that may wait for storage.

        Raises:
            ChangedError: the content of the block changed, or cannot be read.
            DataError: the block cannot be opened.
        """
        held, shard = self._blocks.get(number), self.manifest.shards[int(self.blocks[number, 0])]

        def read() -> tuple[StoredBlock, T]:
            block = held or self._open_block(number)
            return block, take(block)

        block, taken = self._read(f"shards/{shard.name}", read)
        self._blocks[number] = block
        self._blocks.move_to_end(number)
        if len(self._blocks) > _OPEN_BLOCKS:
            self._blocks.popitem(last=False)
        return block, taken

    def _close(self, number: int) -> None:
        if (block := self._blocks.pop(number, None)) is not None:
            _FILES.drop(self._opened, block.path)

    def _keeps_changing(self, number: int, changed: ChangedError) -> DataError:
        shard = self.manifest.shards[int(self.blocks[number, 0])]
        return DataError(
            f"shard {shard.name} of {self.directory} changes while it is read: {changed}",
            effect="it cannot be said which tokens are those that were prepared",
            remedy="find what writes to it; if nothing does, the machine's memory or the storage is faulty",
        )

    def _open_block(self, number: int) -> StoredBlock:
        if self.cached is not None:
            return self.cached.open(number)
        shard, first, documents = self.blocks[number, :3].tolist()
        return local_block(self._shard_here(shard), first, documents, self.checksums[number].tolist())

    def shard(self, number: int) -> Shard:
        """Open shard `number` (in manifest order) of a corpus in files. Raises DataError."""
        return self._read(f"shards/{self.manifest.shards[number].name}", lambda: self._shard_here(number))

    def _shard_here(self, number: int) -> Shard:
        """Open a shard in this thread; check its index and sizes against the manifest. Raises DataError."""
        if isinstance(self.directory, Url):
            raise DataError(f"{self.directory} is a URL: it has blocks, but no shards in files")
        entry = self.manifest.shards[number]
        shard = Shard(entry.prefix(self.directory))
        text = "{} documents of {} in {} bytes"
        actual = text.format(shard.documents, shard.dtype.name, shard.bytes)
        expected = text.format(entry.documents, self.manifest.dtype, entry.bytes)
        if actual != expected:
            raise DataError(
                f"{shard.prefix}.idx and .bin hold {actual}, the manifest says {expected}",
                remedy="the shard is not the one the manifest was made for; restore it",
            )
        return shard

    def tokenizer(self) -> Tokenizer:
        """The tokenizer stored with the corpus. Raises DataError if it is not the one the manifest names."""
        entry = self.manifest.tokenizer

        def load() -> Tokenizer:
            path = Path(self.directory if self.cached is None else self.cached.directory, entry.file)
            with raising(DataError, f"cannot read the tokenizer {path}"):
                whole = fingerprint_of(path.read_bytes(), entry.eod) == entry.fingerprint
            if not whole:
                raise DataError(
                    f"{path} is not the tokenizer this corpus was made with (fingerprint differs)",
                    effect="its text and the tokens of the corpus would not agree",
                    remedy="restore the file, or prepare the corpus again",
                )
            return Tokenizer.load(path, eod=entry.eod)

        return self._read(entry.file, load)


def _table(path: Path, xxh3: str) -> npt.NDArray[Any]:
    """A table beside the manifest. Raises DataError if it is not the one with that checksum."""
    effect = "samples would begin and end at other tokens than the run expects, or damage would not be seen"
    remedy = "restore it and the manifest from the same copy of the corpus, or run `fsdp-data prepare` again"
    with raising(DataError, f"cannot read {path}", effect, remedy):
        raw = path.read_bytes()
    if xxhash.xxh3_128_hexdigest(raw) != xxh3:
        raise DataError(f"{path} is not the one that manifest.json names", effect, remedy)
    table: npt.NDArray[Any] = np.load(io.BytesIO(raw), allow_pickle=False)
    return table
