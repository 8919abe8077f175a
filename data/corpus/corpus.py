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

import dataclasses
import io
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from data.text.tokenizer import Tokenizer, fingerprint_of
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.remote import PATIENCE, Location, Url

from .cached import CachedCopy, CacheUse
from .files import File, KeptFiles
from .manifest import CorpusManifest, ShardEntry, parse_manifest, read_manifest
from .reading import READ_TIMEOUT, MirroredPlaces
from .shards import Shard
from .stored import ChangedError, Piece, StoredBlock, local_block

BLOCK_COLUMNS = ("shard", "first_document", "documents", "nonempty_documents", "tokens")
CHECKSUMS = "checksums.npy"
_FILES = KeptFiles(128)
"""A file takes a descriptor, of which a rank counts few for its data (`fsdp_pretrain.open_files`)."""
_OPEN_BLOCKS = 4096
"""A block takes 10 kB of memory for the hashes of 4M tokens."""
_TRIES = 4
"""Of a block that changes whenever it is open."""
K = TypeVar("K")
T = TypeVar("T")


class Corpus:
    """A corpus opened for reading; shards and blocks are opened when first needed, and a bounded number stays open.

    What cannot be read from `directory` is read from its copy `mirror`.

    Args:
        directory, mirror: paths, or URLs of remote storage.
        cache: for URLs.

    Attributes:
        blocks: int64 [blocks, 5].
        checksums: uint64 [blocks, 2], see `ShardBlocks`.
        places: the directories, with read times and notices.
        copies: of the places, those that are read through a cache, by URL.

    Raises:
        ConfigError: a URL without a cache.
        DataError: not a corpus, other tables than the manifest names, or a mirror of another corpus.
    """

    def __init__(
        self,
        directory: Location,
        mirror: Location | None = None,
        *,
        read_timeout: float = READ_TIMEOUT,
        cache: CacheUse | None = None,
    ) -> None:
        self.directory, self._cache, self._patience = directory, cache, min(PATIENCE, read_timeout / 2)
        self.copies: dict[Url, CachedCopy] = {}
        self._entries: dict[Location, list[ShardEntry]] = {}
        problem = cache.problem if cache is not None else str
        self.places = MirroredPlaces([directory, mirror] if mirror is not None else [directory], read_timeout, problem)
        self.manifest = self._keep(*self.places.read("manifest.json", self._open_copy))
        self._entries.setdefault(directory, self.manifest.shards)
        if mirror is not None and mirror not in self._entries:
            self._check_mirror(mirror, read_timeout)
        said = self.manifest
        self.blocks = self.places.read("blocks.npy", lambda place: self._table(place, "blocks.npy", said.blocks_xxh3))
        self.checksums = self.places.read(CHECKSUMS, lambda place: self._table(place, CHECKSUMS, said.checksums_xxh3))
        if not len(self.blocks):
            raise DataError(f"{directory} holds no tokens")
        self._blocks: OrderedDict[int, StoredBlock] = OrderedDict()
        self._opened = object()  # owns the files that stay open, and outlives them
        self._buffer = memoryview(b"")

    def _open_copy(self, place: Location) -> tuple[Location, CorpusManifest, CachedCopy | None]:
        if not isinstance(place, Url):
            return place, read_manifest(place), None
        if self._cache is None:
            raise DataError(f"{place} is a URL, and no cache is given for it", remedy="set data.cache.dir and .size")
        use = self._cache if place == self.directory else dataclasses.replace(self._cache, fetcher=None)
        copy = CachedCopy(place, use, parse_manifest, self._patience, self.places.warn)
        return place, copy.corpus.manifest, copy

    def _keep(self, place: Location, manifest: CorpusManifest, copy: CachedCopy | None) -> CorpusManifest:
        self._entries[place] = manifest.shards
        if copy is not None:
            self.copies[copy.place] = copy
        return manifest

    def _check_mirror(self, mirror: Location, timeout: float) -> None:
        """The mirror has the same shards, possibly under other paths. Raises DataError for another corpus."""
        found = self._keep(*MirroredPlaces([mirror], timeout).read("manifest.json", self._open_copy))
        if found.fingerprint != self.manifest.fingerprint:
            raise DataError(
                f"{mirror} is not a copy of {self.directory}: their manifests have different fingerprints "
                f"({found.fingerprint[:12]}, {self.manifest.fingerprint[:12]})",
                effect="reading from it would change the data in the middle of a run",
                remedy="copy the corpus again, or remove the source's mirror from the configuration",
            )

    def _copy(self, url: Url) -> CachedCopy:
        """Raises DataError if it could not be opened."""
        if url not in self.copies:
            raise DataError(f"{url} could not be opened at the start")
        return self.copies[url]

    def _table(self, place: Location, name: str, xxh3: str) -> npt.NDArray[Any]:
        if isinstance(place, Url):
            tables = self._copy(place).corpus
            return tables.checksums if name == CHECKSUMS else tables.blocks
        return _read_table(place / name, xxh3)

    def lengths(self, number: int) -> npt.NDArray[np.int32]:
        """[documents], tokens of each document of block `number` as stored; compared as by `copy`.

        Raises:
            DataError: they cannot be read, or are damaged.
        """
        return self._taken(number, lambda block: block.lengths())

    def copy(self, number: int, pieces: Sequence[Piece], row: npt.NDArray[Any]) -> None:
        """Copy tokens of block `number` to a row, see `StoredBlock.copy`.

        Raises:
            DataError: they cannot be read, or are damaged.
        """

        def take(block: StoredBlock) -> tuple[File, list[memoryview]]:
            file = _FILES.get(self._opened, block.path) or block.file()
            return file, block.read(pieces, file)

        for _ in range(_TRIES):
            try:
                if self._copied_at_once(number, pieces, row):
                    return
                block, (file, read) = self._read(number, take)
                if block.keeps_file:
                    _FILES.keep(self._opened, block.path, file)
                block.copy(pieces, row, read)
                return
            except ChangedError as error:
                changed = error
                self._close(number)
        raise self._restless(number, changed)

    def _copied_at_once(self, number: int, pieces: Sequence[Piece], row: npt.NDArray[Any]) -> bool:
        """Copy pieces if they are in memory, without another thread; whether they were. Raises ChangedError."""
        if (block := self._blocks.get(number)) is None:
            return False
        if len(self._buffer) < (needed := block.bytes_for(len(row))):
            self._buffer = memoryview(bytearray(needed))
        if block.keeps_file:  # opening it may wait for storage
            file = _FILES.get(self._opened, block.path)
            return file is not None and block.copy_at_once(pieces, row, file.descriptor, self._buffer)
        try:
            descriptor = os.open(block.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # what is wrong is said where it is opened again
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
        """What is taken out of a block. If that changed, it is opened again."""
        for _ in range(_TRIES):
            try:
                return self._read(number, take)[1]
            except ChangedError as error:
                changed = error
                self._close(number)
        raise self._restless(number, changed)

    def _read(self, number: int, take: Callable[[StoredBlock], T]) -> tuple[StoredBlock, T]:
        """A block, opened if need be, and what is taken out of it, in the thread that may wait for storage.

        Raises:
            ChangedError: what was to be taken changed, or cannot be read.
            DataError: the block cannot be opened.
        """
        held, shard = self._blocks.get(number), self.manifest.shards[int(self.blocks[number, 0])]

        def read(place: Location) -> tuple[StoredBlock, T]:
            block = held if held is not None and held.place == place else self._open_block(place, number)
            return block, take(block)

        block, found = self.places.read(f"shards/{shard.name}", read)
        _keep(self._blocks, number, block, _OPEN_BLOCKS)
        return block, found

    def _close(self, number: int) -> None:
        if (block := self._blocks.pop(number, None)) is not None:
            _FILES.drop(self._opened, block.path)

    def _restless(self, number: int, changed: ChangedError) -> DataError:
        shard = self.manifest.shards[int(self.blocks[number, 0])]
        return DataError(
            f"shard {shard.name} of {self.directory} changes while it is read: {changed}",
            effect="it cannot be said which tokens are those that were prepared",
            remedy="find what writes to it; if nothing does, the machine's memory or the storage is faulty",
        )

    def _open_block(self, place: Location, number: int) -> StoredBlock:
        if isinstance(place, Url):
            return self._copy(place).open(number)
        shard, first, documents = self.blocks[number, :3].tolist()
        return local_block(place, self._shard_at(place, shard), first, documents, self.checksums[number].tolist())

    def shard(self, number: int) -> Shard:
        """Shard `number` in manifest order of a corpus in files, opened. Raises DataError."""
        return self.places.read(
            f"shards/{self.manifest.shards[number].name}", lambda place: self._shard_at(place, number)
        )

    def _shard_at(self, place: Location, number: int) -> Shard:
        """A shard, checked against the manifest. Raises DataError."""
        if isinstance(place, Url):
            raise DataError(f"{place} is a URL: it has blocks, but no shards in files")
        return self._open_shard(self._entries[place][number].prefix(place), self.manifest.shards[number])

    def _open_shard(self, prefix: Path, entry: ShardEntry) -> Shard:
        """Open a shard and check its index and sizes against the manifest."""
        shard = Shard(prefix)
        text = "{} documents of {} in {} bytes"
        found = text.format(shard.documents, shard.dtype.name, shard.bytes)
        said = text.format(entry.documents, self.manifest.dtype, entry.bytes)
        if found != said:
            raise DataError(
                f"{prefix}.idx and .bin hold {found}, the manifest says {said}",
                remedy="the shard is not the one the manifest was made for; restore it",
            )
        return shard

    def tokenizer(self) -> Tokenizer:
        """The tokenizer stored with the corpus. Raises DataError if it is not the one the manifest names."""
        entry = self.manifest.tokenizer

        def load(place: Location) -> Tokenizer:
            path = (self._copy(place).directory if isinstance(place, Url) else place) / entry.file
            try:
                whole = fingerprint_of(path.read_bytes(), entry.eod) == entry.fingerprint
            except OSError as error:
                raise DataError(f"cannot read the tokenizer {path}: {error.strerror}") from None
            if not whole:
                raise DataError(
                    f"{path} is not the tokenizer this corpus was made with (fingerprint differs)",
                    effect="its text and the tokens of the corpus would not agree",
                    remedy="restore the file, or prepare the corpus again",
                )
            return Tokenizer.load(path, eod=entry.eod)

        return self.places.read(entry.file, load)


def _keep(kept: OrderedDict[K, T], key: K, value: T, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


def _read_table(path: Path, xxh3: str) -> npt.NDArray[Any]:
    """A table beside the manifest. Raises DataError if it is not the one with that checksum."""
    effect = "samples would be other tokens than the run expects, or damaged ones"
    remedy = "restore both files from the same copy of the corpus, or run `fsdp-data prepare` again"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", effect, remedy) from None
    if xxhash.xxh3_128_hexdigest(raw) != xxh3:
        raise DataError(f"{path} is not the one that manifest.json names", effect, remedy)
    table: npt.NDArray[Any] = np.load(io.BytesIO(raw), allow_pickle=False)
    return table
