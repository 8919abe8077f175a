"""Blocks of corpora in remote storage, and the directory on local disk that keeps some of them.

    CACHE/<corpus fingerprint>/blocks.npy, checksums.npy, tokenizer.*
    CACHE/<corpus fingerprint>/blocks/00001234     int32 lengths of the documents of a block, then its tokens, as stored
    CACHE/lock                                     held by the one live run that trains from the cache

A block is written beside its name, made durable and renamed: whoever sees the name may read it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_pretrain.atomic import replace_file
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.remote import Remote, Url

from .shards import LENGTHS_AT

if TYPE_CHECKING:
    from .manifest import CorpusManifest

LENGTH_BYTES = 4
_TRIES = 4
"""Of a part of a block whose checksum is wrong."""
_LEFT_SECONDS = 3600.0
"""After which a half-written file is what a killed process left."""


class WrongChecksumError(DataError):
    """What comes from `object_url`, however often, is not what was stored: a damaged or replaced object."""

    def __init__(self, object_url: str, start: int, stop: int) -> None:
        self.object_url = object_url
        super().__init__(
            f"bytes {start} to {stop} of {object_url} do not have the checksum of checksums.npy",
            effect="the tokens are not those of the corpus; nothing was trained on them",
            remedy="the object is damaged, or the corpus was replaced while it was in use: copy to the storage again "
            "what was there at the start, or give the new corpus a URL of its own",
        )


class BlockPart(NamedTuple):
    """Bytes [start, stop) of an object of a corpus, with their xxh3-64."""

    name: str
    start: int
    stop: int
    checksum: int


@dataclass(frozen=True)
class RemoteCorpus:
    """A corpus in remote storage: all that is needed to fetch its blocks. Kilobytes per shard, 60 bytes per block.

    Attributes:
        url: of the corpus.
        blocks: int64 [blocks, 5], see `BLOCK_COLUMNS`.
        checksums: uint64 [blocks, 2], xxh3-64 of the bytes of each block's lengths and tokens.
    """

    url: Url
    manifest: CorpusManifest
    blocks: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint64]

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each block's file: int64 [blocks]."""
        return self._stored * np.dtype(self.manifest.dtype).itemsize + self.blocks[:, 2] * LENGTH_BYTES

    @cached_property
    def _stored(self) -> npt.NDArray[np.int64]:
        """[blocks] tokens as stored, carried separators included."""
        stored: npt.NDArray[np.int64] = self.blocks[:, 4] + self.manifest.carried * self.blocks[:, 2]
        return stored

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        """[blocks] first token of each in its shard.

        Documents follow each other without gaps, and those of no block are empty, but for the separator they carry.
        """
        shards, tokens = self.blocks[:, 0], self.blocks[:, 4]
        before = np.cumsum(tokens) - tokens
        _, first_blocks, of_block = np.unique(shards, return_index=True, return_inverse=True)
        starts: npt.NDArray[np.int64] = before - before[first_blocks][of_block]
        return starts + self.manifest.carried * self.blocks[:, 1]

    def parts(self, block: int) -> tuple[BlockPart, BlockPart]:
        """Where the lengths of a block's documents are stored, and its tokens."""
        shard, first, documents = self.blocks[block, :3].tolist()
        name, item = f"shards/{self.manifest.shards[shard].name}", np.dtype(self.manifest.dtype).itemsize
        lengths, start = LENGTHS_AT + LENGTH_BYTES * first, int(self._starts[block]) * item
        sums = self.checksums[block].tolist()
        return (
            BlockPart(f"{name}.idx", lengths, lengths + LENGTH_BYTES * documents, sums[0]),
            BlockPart(f"{name}.bin", start, start + int(self._stored[block]) * item, sums[1]),
        )


class BlockCache:
    """The blocks of one corpus in a cache directory. Any number of processes may use it at once.

    Args:
        cache: the cache directory.
        fingerprint: of the corpus.

    Attributes:
        directory: with the corpus' tables and tokenizer; `blocks/` inside it holds the blocks.
    """

    def __init__(self, cache: Path, fingerprint: str) -> None:
        self.directory = cache / fingerprint
        self._blocks = self.directory / "blocks"

    def path(self, block: int) -> Path:
        """The file of a block, whether it is there or not."""
        return self._blocks / f"{block:08d}"

    def has(self, block: int) -> bool:
        return self.path(block).exists()

    def present(self) -> dict[int, tuple[float, int]]:
        """(when it was written, bytes) of each block that is there, by number."""
        found = {}
        with suppress(FileNotFoundError), os.scandir(self._blocks) as entries:
            for entry in entries:
                if entry.name.isdecimal():
                    with suppress(FileNotFoundError):  # dropped meanwhile
                        found[int(entry.name)] = entry.stat().st_mtime, entry.stat().st_size
        return found

    def put(self, block: int, content: bytes) -> None:
        """Store a block that was checked; it is seen whole or not at all, also after a crash. Raises OSError."""
        self._blocks.mkdir(parents=True, exist_ok=True)
        replace_file(self.path(block), content)

    def drop(self, block: int) -> None:
        """Remove a block. Raises OSError."""
        self.path(block).unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove what killed processes left half-written."""
        for partial in self._blocks.glob(".*.partial"):
            with suppress(OSError):
                if time.time() - partial.stat().st_mtime > _LEFT_SECONDS:
                    partial.unlink()


def fetch_block(remote: Remote, corpus: RemoteCorpus, block: int) -> bytes:
    """The lengths and the tokens of a block, as stored and checked; two requests.

    Args:
        remote: of the corpus.

    Raises:
        RemoteError: the storage failed for as long as `remote` is patient.
        WrongChecksumError: other bytes come than were stored, each time.
    """
    return b"".join(_checked(remote, corpus.url, part) for part in corpus.parts(block))


def _checked(remote: Remote, url: Url, part: BlockPart) -> bytes:
    for _ in range(_TRIES):
        content = remote.read(part.name, part.start, part.stop)
        if xxhash.xxh3_64_intdigest(content) == part.checksum:
            return content
    raise WrongChecksumError(url / part.name, part.start, part.stop)
