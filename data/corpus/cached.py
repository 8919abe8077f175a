"""A corpus by URL, read through a cache directory: its tables at the start, its blocks when they are needed.

In training the node's fetcher brings the blocks in the order of their use, and removes them: a block that the cache
lacks is waited for. Every other process fetches what it lacks, and leaves it there.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from data.text.tokenizer import fingerprint_of
from fsdp_pretrain import fetcher_status
from fsdp_pretrain.atomic import replace_file
from fsdp_pretrain.errors import DataError, Exit, StorageError
from fsdp_pretrain.remote import PATIENCE, Problem, Remote, RemoteError, Url

from .cache import BlockCache, RemoteCorpus, fetch_block
from .files import now_reading
from .stored import ChangedError, StoredBlock, cached_block

if TYPE_CHECKING:
    from .manifest import CorpusManifest

_TRIES = 4
"""Of an object whose checksum is wrong."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
Parse = Callable[[bytes, str], "CorpusManifest"]


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


class FetchError(DataError):
    """Remote storage cannot be read."""

    def __init__(self, error: RemoteError) -> None:
        super().__init__(error.cause, error.effect, error.remedy)
        self.exit = Exit.RESUME if error.is_temporary else Exit.REFUSED


class CachedCopy:
    """A corpus by URL, opened through a cache.

    Args:
        parse: makes a manifest of the bytes at a place.
        patience: seconds for which a request that fails temporarily is repeated.
        tell: called with what was found damaged in the cache.

    Attributes:
        place: the URL.
        directory: with its manifest, tables and tokenizer, checked.
        corpus: what is needed to fetch its blocks.
        remote: from where; its patience may be changed.

    Raises:
        DataError: not a corpus, or damaged; FetchError: the storage does not answer.
    """

    def __init__(
        self,
        url: Url,
        use: CacheUse,
        parse: Parse,
        patience: float = PATIENCE,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.place, self._use, self.remote, self._tell = url, use, Remote(url, patience=patience), tell
        try:
            manifest = parse(self._manifest(), str(url))
            if any(entry.path is not None for entry in manifest.shards):
                raise DataError(f"{url} has shards that lie elsewhere", remedy="import the files with --copy")
            self.blocks = BlockCache(use.directory, manifest.fingerprint)
            self.directory = self.blocks.directory
            self.directory.mkdir(parents=True, exist_ok=True)
            self.corpus = RemoteCorpus(url, manifest, *self._tables(manifest))
            self._keep_tokenizer(manifest)
        except RemoteError as error:
            raise FetchError(error) from None
        except OSError as error:
            raise DataError(f"cannot write to the cache {use.directory}: {error.strerror}") from None

    def _manifest(self) -> bytes:
        """Raises DataError if there is none; RemoteError."""
        try:
            return self.remote.read("manifest.json")
        except RemoteError as error:
            if error.problem is not Problem.MISSING:
                raise
            raise DataError(
                f"{self.place} is not a corpus: it has no manifest.json",
                remedy="make one with `fsdp-data prepare` or `fsdp-data import`",
            ) from None

    def _tables(self, manifest: CorpusManifest) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        blocks = self._object("blocks.npy", lambda raw: xxhash.xxh3_128_hexdigest(raw) == manifest.blocks_xxh3)
        sums = self._object("checksums.npy", lambda raw: xxhash.xxh3_128_hexdigest(raw) == manifest.checksums_xxh3)
        return _array(blocks), _array(sums)

    def _object(self, name: str, sound: Callable[[bytes], bool]) -> bytes:
        """A small object, from the cache or into it."""
        path = self.directory / name
        with contextlib.suppress(FileNotFoundError):
            if sound(content := path.read_bytes()):
                return content
            self._tell(f"{path} is damaged; it is fetched again")
        now_reading(self.place / name)
        for _ in range(_TRIES):
            if sound(content := self.remote.read(name)):
                replace_file(path, content)
                return content
        raise DataError(
            f"{self.place / name} is not the one that manifest.json names",
            effect="the run would not train on what was prepared",
            remedy="upload the corpus again, whole",
        )

    def _keep_tokenizer(self, manifest: CorpusManifest) -> None:
        entry = manifest.tokenizer
        self._object(entry.file, lambda raw: fingerprint_of(raw, entry.eod) == entry.fingerprint)

    def open(self, block: int) -> StoredBlock:
        """Open a block, as soon as the cache has it; fetch it unless a fetcher does.

        Raises:
            DataError: it is damaged; FetchError: the storage does not answer.
        """
        damaged = 0
        while damaged < _TRIES:
            try:
                return self._open(block)
            except FileNotFoundError:
                if self._use.fetcher is not None:
                    self._wait(block)
                else:
                    now_reading(self.blocks.path(block))
                    self.fetch(block)
            except ChangedError as error:
                damaged += 1
                self._drop(block, str(error))
        raise DataError(
            f"{self.blocks.path(block)} was fetched {damaged} times, and is damaged whenever it is read",
            effect="nothing was trained on it",
            remedy="the disk of the cache or the machine's memory is faulty: name another data.cache.dir, or leave out "
            "this host",
        )

    def _open(self, block: int) -> StoredBlock:
        corpus, path = self.corpus, self.blocks.path(block)
        documents, dtype, size = int(corpus.blocks[block, 2]), np.dtype(corpus.manifest.dtype), int(corpus.sizes[block])
        return cached_block(path, documents, dtype, size, corpus.checksums[block].tolist())

    def _drop(self, block: int, why: str) -> None:
        """Remove a damaged block from the cache; it is told by the process that removes it."""
        path = self.blocks.path(block)
        try:
            path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise DataError(f"cannot remove the damaged {path}: {error.strerror}", remedy="remove it") from None
        self._tell(f"{path} is damaged: {why}; it was removed, and block {block} of {self.place} is fetched again")

    def _wait(self, block: int) -> None:
        """Until the fetcher has brought a block. Whoever asked for it gives up before, see `CorpusReads`."""
        now_reading(self.blocks.path(block))
        pause = _FIRST_PAUSE
        while not self.blocks.has(block):
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def fetch(self, block: int) -> int:
        """Fetch a block into the cache; its bytes.

        Raises:
            DataError: it is damaged; FetchError: the storage does not answer; StorageError: the cache fails.
        """
        try:
            content = fetch_block(self.remote, self.corpus, block)
            self.blocks.put(block, content)
        except RemoteError as error:
            if error.problem is Problem.DENIED:  # credentials may be renewed: connect again
                self.remote = Remote(self.place, patience=self.remote.patience)
            raise FetchError(error) from None
        except OSError as error:
            raise StorageError(
                f"the cache {self._use.directory} cannot be written: {error.strerror}",
                remedy="free space there, or name another data.cache.dir",
            ) from None
        return len(content)


def _array(raw: bytes) -> npt.NDArray[Any]:
    table: npt.NDArray[Any] = np.load(io.BytesIO(raw), allow_pickle=False)
    return table
