"""A corpus by URL, read through a cache directory: its tables at the start, its blocks when they are needed.

    CACHE/<corpus fingerprint>/blocks.npy, checksums.npy, tokenizer.*
    CACHE/<corpus fingerprint>/blocks/00001234     int32 lengths of the documents of a block, then its tokens, as stored
    CACHE/lock                                     held by the one live run that trains from the cache

A block is written beside its name, made durable and renamed: whoever sees the name may read it. In training the node's
fetcher brings the blocks in the order of their use, and removes them: a block that the cache lacks is waited for. Every
other process fetches what it lacks, and leaves it there.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_pretrain import fetcher_status
from fsdp_pretrain.data.text.tokenizer import fingerprint_of
from fsdp_pretrain.errors import DataError, StorageError
from fsdp_pretrain.files import replace_file
from fsdp_pretrain.remote import PATIENCE, Problem, Remote, RemoteError, Url

from .files import now_reading
from .manifest import parse_manifest
from .shards import LENGTH_BYTES, LENGTHS_AT
from .stored import ChangedError, StoredBlock, cached_block

_TRIES = 4
"""Of what has a wrong checksum."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
_LEFT_SECONDS = 3600.0
"""After which a half-written block is what a killed process left."""
Part = tuple[str, int, int, int]
"""(object, start, stop, xxh3-64): bytes [start, stop) of an object of a corpus."""


@dataclass(frozen=True)
class CacheUse:
    """How corpora by URL are read.

    Attributes:
        directory: of the cache.
        fetcher: file in which the node's fetcher says what is wrong (`problem`); missing blocks are waited for. None:
            this process fetches them.
    """

    directory: Path
    fetcher: Path | None = None

    def problem(self) -> str:
        """What the fetcher last said is wrong; empty if it said nothing."""
        found = None if self.fetcher is None else fetcher_status.read(self.fetcher)
        return "" if found is None else found.problem


def block_file(cache: Path, fingerprint: str, block: int) -> Path:
    """The file of a block of a corpus in a cache directory, whether it is there or not."""
    return cache / fingerprint / "blocks" / f"{block:08d}"


def blocks_in(cache: Path) -> dict[tuple[str, int], tuple[float, int]]:
    """(when it was written, bytes) of each block in a cache directory, by corpus fingerprint and number.

    What killed processes left half-written goes.
    """
    found = {}
    for folder in cache.glob("*/blocks"):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):  # dropped meanwhile
                written, size = entry.stat().st_mtime, entry.stat().st_size
                if entry.name.isdecimal():
                    found[folder.parent.name, int(entry.name)] = written, size
                elif time.time() - written > _LEFT_SECONDS:
                    Path(entry.path).unlink()
    return found


class CachedCopy:
    """A corpus by URL, opened through a cache.

    Args:
        patience: seconds for which a request that fails temporarily is repeated.
        tell: called with what was found damaged in the cache.

    Attributes:
        url: of the corpus.
        directory: with its tables and tokenizer, checked.
        blocks, checksums: as of `Corpus`.
        sizes: bytes of each block's file, int64 [blocks].
        remote: from where; its patience may be changed.

    Raises:
        DataError: not a corpus, or damaged; RemoteError: the storage does not answer.
    """

    def __init__(
        self, url: Url, use: CacheUse, patience: float = PATIENCE, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self.url, self._use, self.remote, self._tell = url, use, Remote(url, patience=patience), tell
        self.manifest = manifest = parse_manifest(self._read_manifest(), str(url))
        if any(entry.path is not None for entry in manifest.shards):
            raise DataError(f"{url} has shards that lie elsewhere", remedy="import the files with --copy")
        self.directory, tokenizer = use.directory / manifest.fingerprint, manifest.tokenizer
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.blocks = self._table("blocks.npy", manifest.blocks_xxh3)
            self.checksums = self._table("checksums.npy", manifest.checksums_xxh3)
            self._object(tokenizer.file, lambda raw: fingerprint_of(raw, tokenizer.eod) == tokenizer.fingerprint)
        except OSError as error:
            raise DataError(f"cannot write to the cache {use.directory}: {error.strerror}") from None
        self._item = np.dtype(manifest.dtype).itemsize
        self._stored = self.blocks[:, 4] + manifest.carried * self.blocks[:, 2]
        self.sizes: npt.NDArray[np.int64] = self._stored * self._item + self.blocks[:, 2] * LENGTH_BYTES
        self._starts = self._first_tokens()

    def _read_manifest(self) -> bytes:
        try:
            return self.remote.read("manifest.json")
        except RemoteError as error:
            if error.problem is not Problem.MISSING:
                raise
            raise DataError(
                f"{self.url} is not a corpus: it has no manifest.json",
                remedy="make one with `fsdp-data prepare` or `fsdp-data import`",
            ) from None

    def _first_tokens(self) -> npt.NDArray[np.int64]:
        """[blocks] first token of each in its shard.

        Documents follow each other without gaps, and those of no block are empty, but for the separator they carry.
        """
        shards, tokens = self.blocks[:, 0], self.blocks[:, 4]
        before = np.cumsum(tokens) - tokens
        _, first_blocks, of_block = np.unique(shards, return_index=True, return_inverse=True)
        starts: npt.NDArray[np.int64] = before - before[first_blocks][of_block]
        starts += self.manifest.carried * self.blocks[:, 1]
        return starts

    def _table(self, name: str, xxh3: str) -> npt.NDArray[Any]:
        raw = self._object(name, lambda raw: xxhash.xxh3_128_hexdigest(raw) == xxh3)
        table: npt.NDArray[Any] = np.load(io.BytesIO(raw), allow_pickle=False)
        return table

    def _object(self, name: str, sound: Callable[[bytes], bool]) -> bytes:
        """A small object, from the cache or into it."""
        path = self.directory / name
        with contextlib.suppress(FileNotFoundError):
            if sound(content := path.read_bytes()):
                return content
            self._tell(f"{path} is damaged; it is fetched again")
        now_reading(self.url / name)
        content = self._sound(sound, name)
        replace_file(path, content)
        return content

    def _sound(self, sound: Callable[[bytes], bool], name: str, *span: int) -> bytes:
        """An object, or its bytes [start, stop), with the right checksum."""
        for _ in range(_TRIES):
            if sound(content := self.remote.read(name, *span)):
                return content
        raise DataError(
            f"{self.url / name} has a wrong checksum" + (f" from byte {span[0]} to {span[1]}" if span else ""),
            effect="the tokens would not be those that were prepared; nothing was trained on them",
            remedy="the object is damaged, or the corpus was replaced while it was in use: copy to the storage again "
            "what was there at the start, or give the new corpus a URL of its own",
        )

    def parts(self, block: int) -> tuple[Part, Part]:
        """Where the lengths of a block's documents are stored, and its tokens."""
        shard, first, documents = self.blocks[block, :3].tolist()
        name, sums = f"shards/{self.manifest.shards[shard].name}", self.checksums[block].tolist()
        lengths, start = LENGTHS_AT + LENGTH_BYTES * first, int(self._starts[block]) * self._item
        return (
            (f"{name}.idx", lengths, lengths + LENGTH_BYTES * documents, sums[0]),
            (f"{name}.bin", start, start + int(self._stored[block]) * self._item, sums[1]),
        )

    def _part(self, name: str, start: int, stop: int, xxh3: int) -> bytes:
        return self._sound(lambda raw: xxhash.xxh3_64_intdigest(raw) == xxh3, name, start, stop)

    def path(self, block: int) -> Path:
        """The file of a block, whether it is there or not."""
        return block_file(self._use.directory, self.directory.name, block)

    def open(self, block: int) -> StoredBlock:
        """Open a block, as soon as the cache has it; fetch it unless a fetcher does.

        Raises:
            DataError: it is damaged; RemoteError: the storage does not answer.
        """
        damaged, path = 0, self.path(block)
        while damaged < _TRIES:
            try:
                documents, dtype = int(self.blocks[block, 2]), np.dtype(self.manifest.dtype)
                return cached_block(path, documents, dtype, int(self.sizes[block]), self.checksums[block].tolist())
            except FileNotFoundError:
                now_reading(path)
                if self._use.fetcher is not None:
                    _wait_for(path)
                else:
                    self.fetch(block)
            except ChangedError as error:
                damaged += 1
                self._drop(block, str(error))
        raise DataError(
            f"{path} was fetched {damaged} times, and is damaged whenever it is read",
            effect="nothing was trained on it",
            remedy="the disk of the cache or the machine's memory is faulty: name another data.cache.dir, or leave out "
            "this host",
        )

    def _drop(self, block: int, why: str) -> None:
        """Remove a damaged block from the cache; it is told by the process that removes it."""
        path = self.path(block)
        try:
            path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise DataError(f"cannot remove the damaged {path}: {error.strerror}", remedy="remove it") from None
        self._tell(f"{path} is damaged: {why}; it was removed, and block {block} of {self.url} is fetched again")

    def fetch(self, block: int) -> int:
        """Fetch a block into the cache, by two requests; its bytes.

        Raises:
            DataError: it is damaged; RemoteError: the storage does not answer; StorageError: the cache fails.
        """
        try:
            content = b"".join(self._part(*part) for part in self.parts(block))
        except RemoteError as error:
            if error.problem is Problem.DENIED:  # credentials may be renewed: connect again
                self.remote = Remote(self.url, patience=self.remote.patience)
            raise
        path = self.path(block)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
        except OSError as error:
            raise StorageError(
                f"the cache {self._use.directory} cannot be written: {error.strerror}",
                remedy="free space there, or name another data.cache.dir",
            ) from None
        return len(content)


def _wait_for(path: Path) -> None:
    """Until the fetcher has brought a block. Whoever asked for it gives up before, see `CorpusReads`."""
    pause = _FIRST_PAUSE
    while not path.exists():
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
