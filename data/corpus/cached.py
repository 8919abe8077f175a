"""A corpus by URL, read through a cache directory: its tables at the start, its blocks when they are needed.

    CACHE/<corpus fingerprint>/blocks.npy, checksums.npy, tokenizer.*
    CACHE/<corpus fingerprint>/blocks/00001234     int32 lengths of the documents of a block, then its tokens, as stored
    CACHE/lock                                     held by the one live run that trains from the cache

A block is written under a temporary name, made durable and renamed, so every block with its name may be read. In
training the node's fetcher fetches the blocks in the order of their use, and removes them; ranks wait for a block that
the cache lacks. All other processes fetch missing blocks themselves, and leave them in the cache.
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
from fsdp_pretrain.errors import DataError, StorageError, raising
from fsdp_pretrain.files import replace_file
from fsdp_pretrain.remote import PATIENCE, Problem, Remote, RemoteError, Url

from .files import now_reading
from .manifest import parse_manifest
from .shards import LENGTH_BYTES, LENGTHS_AT
from .stored import ChangedError, StoredBlock, cached_block

_TRIES = 4
"""How often something with a wrong checksum is fetched."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
"""Seconds between two checks whether the fetcher has fetched a block."""
_LEFT_SECONDS = 3600.0
"""Age at which a half-written block must be that of a killed process."""
Part = tuple[str, int, int, int]
"""(object, start, stop, xxh3-64): bytes [start, stop) of an object of a corpus."""


@dataclass(frozen=True)
class CacheUse:
    """How corpora by URL are read."""

    directory: Path  # the cache directory
    fetcher: Path | None = None  # status file of the node's fetcher, which fetches blocks; None: this process does

    def problem(self) -> str:
        """The problem that the fetcher reports; empty if there is none."""
        status = None if self.fetcher is None else fetcher_status.read(self.fetcher)
        return "" if status is None else status.problem


def block_file(cache: Path, fingerprint: str, block: int) -> Path:
    """The path of a block's file in a cache directory, whether it exists or not."""
    return cache / fingerprint / "blocks" / f"{block:08d}"


def blocks_in(cache: Path) -> dict[tuple[str, int], tuple[float, int]]:
    """(time it was written, bytes) of each block in a cache directory, by corpus fingerprint and block number.

    Removes blocks that killed processes left half-written.
    """
    blocks = {}
    for folder in cache.glob("*/blocks"):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):  # dropped meanwhile
                written, size = entry.stat().st_mtime, entry.stat().st_size
                if entry.name.isdecimal():
                    blocks[folder.parent.name, int(entry.name)] = written, size
                elif time.time() - written > _LEFT_SECONDS:
                    Path(entry.path).unlink()
    return blocks


class CachedCopy:
    """A corpus by URL, opened through a cache.

    Args:
        patience: seconds for which a request that fails temporarily is repeated.
        warn: called with a text about each damaged file in the cache.

    Attributes:
        url: URL of the corpus.
        directory: part of the cache with its tables and tokenizer, which were checked.
        blocks, checksums: see `Corpus`.
        sizes: bytes of each block's file, int64 [blocks].
        remote: the remote storage; its patience may be changed.

    Raises:
        DataError: it is not a corpus, or damaged.
        RemoteError: the storage does not answer.
    """

    def __init__(
        self, url: Url, use: CacheUse, patience: float = PATIENCE, warn: Callable[[str], None] = lambda _: None
    ) -> None:
        self.url, self._use, self._warn = url, use, warn
        self.remote = Remote(url, patience=patience)
        self.manifest = manifest = parse_manifest(self._read_manifest(), str(url))
        if any(entry.path is not None for entry in manifest.shards):
            raise DataError(f"{url} has shards that lie elsewhere", remedy="import the files with --copy")
        self.directory, tokenizer = use.directory / manifest.fingerprint, manifest.tokenizer
        with raising(DataError, f"cannot write to the cache {use.directory}"):
            self.directory.mkdir(parents=True, exist_ok=True)
            self.blocks = self._table("blocks.npy", manifest.blocks_xxh3)
            self.checksums = self._table("checksums.npy", manifest.checksums_xxh3)
            self._object(tokenizer.file, lambda raw: fingerprint_of(raw, tokenizer.eod) == tokenizer.fingerprint)
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
        """First token of each block in its shard, int64 [blocks].

        Documents follow each other without gaps, and those outside blocks have only the separator that they carry.
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
        """The content of a small object, from the cache, else from remote storage and into the cache."""
        path = self.directory / name
        with contextlib.suppress(FileNotFoundError):
            if sound(content := path.read_bytes()):
                return content
            self._warn(f"{path} is damaged; it is fetched again")
        now_reading(self.url / name)
        content = self._sound(sound, name)
        replace_file(path, content)
        return content

    def _sound(self, sound: Callable[[bytes], bool], name: str, *span: int) -> bytes:
        """Fetch an object, or its bytes [start, stop), until `sound` accepts the content."""
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
        """The parts of remote objects that hold the lengths of a block's documents, and its tokens."""
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
        """The path of a block's file, whether it exists or not."""
        return block_file(self._use.directory, self.directory.name, block)

    def open(self, block: int) -> StoredBlock:
        """Open a block as soon as it is in the cache; fetch it if there is no fetcher that does.

        Raises:
            DataError: it is damaged.
            RemoteError: the storage does not answer.
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
        """Remove a damaged block from the cache, and warn if this process is the one that removed it."""
        path = self.path(block)
        try:
            path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise DataError(f"cannot remove the damaged {path}: {error.strerror}", remedy="remove it") from None
        self._warn(f"{path} is damaged: {why}; it was removed, and block {block} of {self.url} is fetched again")

    def fetch(self, block: int) -> int:
        """Fetch a block into the cache, by two requests. Returns its bytes.

        Raises:
            DataError: it is damaged.
            RemoteError: the storage does not answer.
            StorageError: the cache fails.
        """
        try:
            content = b"".join(self._part(*part) for part in self.parts(block))
        except RemoteError as error:
            if error.problem is Problem.DENIED:  # credentials may be renewed: connect again
                self.remote = Remote(self.url, patience=self.remote.patience)
            raise
        path = self.path(block)
        remedy = "free space there, or name another data.cache.dir"
        with raising(StorageError, f"the cache {self._use.directory} cannot be written", remedy=remedy):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
        return len(content)


def _wait_for(path: Path) -> None:
    """Wait until the fetcher has fetched a block. The reader's timeout ends this wait, see `CorpusReads`."""
    pause = _FIRST_PAUSE
    while not path.exists():
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
