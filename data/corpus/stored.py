"""A block of a corpus as it is stored, opened for reading: a part of a local shard, or a file of a cache.

Positions count from the first token of the block, so that both look alike to the packer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.errors import DataError
from fsdp_pretrain.remote import Location, Url

from .cache import LENGTH_BYTES
from .mapping import Mapping
from .shards import Shard


class StoredBlock(ABC):
    """A block of one copy of a corpus.

    Attributes:
        place: of the copy.
        name: of its shard, without suffix, for messages.
        lengths: int32 [documents], tokens of each as stored.
        tokens: [tokens], all documents as stored, one after the other.
    """

    def __init__(self, place: Location, name: str, lengths: npt.NDArray[np.int32], tokens: npt.NDArray[Any]) -> None:
        self.place, self.name, self.lengths, self.tokens = place, name, lengths, tokens

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """[documents], first token of each: int64."""
        lengths = self.lengths.astype(np.int64)
        starts: npt.NDArray[np.int64] = np.cumsum(lengths) - lengths
        return starts

    @property
    def is_gone(self) -> bool:
        """Whether its file was removed, so that its space on disk is free once it is let go."""
        return False

    @abstractmethod
    def load(self, first: int, stop: int) -> None:
        """Load tokens [first, stop), clipped to the block, into memory; see `Mapping.load`. Raises DataError."""

    @abstractmethod
    def resident(self, first: int, stop: int) -> bool:
        """Whether these tokens are known to be in memory."""


class LocalBlock(StoredBlock):
    """Documents [first, first + count) of a shard in files.

    Raises:
        DataError: it cannot be read, or its index is damaged.
    """

    def __init__(self, place: Path, shard: Shard, first: int, count: int) -> None:
        shard.load(("index", first, first + count + 1))
        shard.require_sound(first, first + count)
        self.shard, lengths = shard, shard.lengths[first : first + count]
        self._begin = int(shard.pointers[first]) // shard.dtype.itemsize
        stop = int(shard.pointers[first + count - 1]) // shard.dtype.itemsize + int(lengths[-1])
        super().__init__(place, str(shard.prefix), lengths, shard.tokens[self._begin : stop])

    def load(self, first: int, stop: int) -> None:
        self.shard.load(("tokens", self._begin + first, self._begin + min(stop, len(self.tokens))))

    def resident(self, first: int, stop: int) -> bool:
        return self.shard.resident(("tokens", self._begin + first, self._begin + min(stop, len(self.tokens))))


class CachedBlock(StoredBlock):
    """A block's file in a cache.

    Raises:
        FileNotFoundError: the cache does not hold it.
        DataError: it cannot be read, or is not of the expected `size` in bytes.
    """

    def __init__(self, place: Url, path: Path, documents: int, dtype: np.dtype[Any], size: int) -> None:
        self._begin, self._item = documents * LENGTH_BYTES, dtype.itemsize
        try:
            self._file = Mapping(path)
            self._file.load(0, self._begin)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        raw = self._file.bytes
        if len(raw) != size:
            raise DataError(f"{path} has {len(raw)} bytes instead of {size}", remedy="remove it: it is fetched again")
        lengths = np.frombuffer(raw, "<i4", documents)
        super().__init__(place, str(path), lengths, np.frombuffer(raw, dtype, -1, self._begin))

    @property
    def is_gone(self) -> bool:
        return not self._file.path.exists()

    def load(self, first: int, stop: int) -> None:
        try:
            self._file.load(self._begin + first * self._item, self._begin + stop * self._item)
        except OSError as error:
            raise DataError(f"cannot read {self._file.path}: {error.strerror}", remedy="remove it") from None

    def resident(self, first: int, stop: int) -> bool:
        return self._file.resident(self._begin + first * self._item, self._begin + stop * self._item)
