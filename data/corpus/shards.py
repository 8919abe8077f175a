"""Token shards: the Megatron-Core indexed dataset, a `.bin` file of tokens and a `.idx` file of document lengths.

Index layout (little endian): 9 bytes `MMIDIDX\\0\\0`, u64 version 1, u8 dtype code, u64 sequences, u64 documents + 1,
int32 lengths[sequences] in tokens, int64 pointers[sequences] in bytes, int64 document_indices[documents + 1].
Here every document is one sequence, as in GPT corpora made by Megatron's tools.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_pretrain.errors import DataError, naming, raising
from fsdp_pretrain.files import close_durably

from .files import File

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
LENGTHS_AT = _HEADER.size
"""First byte of the lengths in an index."""
LENGTH_BYTES = 4
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ADVICE = (
    "restore the file from where the corpus came from, or delete the shard's .json and repeat the command that made it"
)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest dtype that Megatron's tools use for a vocabulary: uint16 below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


def encode_index(lengths: npt.NDArray[np.int32], dtype: np.dtype[Any]) -> bytes:
    """The `.idx` file for consecutive documents of these lengths [documents]."""
    pointers = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= dtype.itemsize
    return b"".join(
        (
            _HEADER.pack(MAGIC, 1, _CODES[dtype], len(lengths), len(lengths) + 1),
            lengths.astype("<i4").tobytes(),
            pointers.tobytes(),
            np.arange(len(lengths) + 1, dtype="<i8").tobytes(),
        )
    )


class ShardWriter:
    """Writes `PREFIX.bin` and `PREFIX.idx`, which get their names only when complete and durable."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix, self._dtype = prefix, dtype
        self._lengths: list[int] = []
        self._hash = xxhash.xxh3_128()
        self._file = _partial(prefix, ".bin").open("wb", buffering=1 << 20)

    def append(self, tokens: npt.NDArray[Any]) -> None:
        """Add one document, given as tokens of the writer's dtype."""
        self.extend(tokens, [len(tokens)])

    def extend(self, tokens: npt.NDArray[Any], lengths: Sequence[int]) -> None:
        """Add documents of the given lengths, concatenated in `tokens` of the writer's dtype."""
        data = tokens.tobytes()
        with naming(self._prefix):
            self._file.write(data)
        self._hash.update(data)
        self._lengths.extend(lengths)

    @property
    def documents(self) -> int:
        return len(self._lengths)

    def finish(self) -> dict[str, Any]:
        """Write the index, make both files durable and rename them; returns the shard's manifest entry."""
        lengths = np.asarray(self._lengths, dtype="<i4")
        index = encode_index(lengths, self._dtype)
        with naming(self._prefix):
            close_durably(self._file)
            with _partial(self._prefix, ".idx").open("wb") as file:
                file.write(index)
                close_durably(file)
        for suffix in (".bin", ".idx"):
            _partial(self._prefix, suffix).rename(self._prefix.with_name(self._prefix.name + suffix))
        tokens = int(lengths.sum(dtype=np.int64))
        return {
            "name": self._prefix.name,
            "documents": len(lengths),
            "tokens": tokens,
            "bytes": tokens * self._dtype.itemsize,
            "bin_xxh3": self._hash.hexdigest(),
            "idx_xxh3": xxhash.xxh3_128(index).hexdigest(),
        }

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            self._file.close()
            return
        with suppress(OSError):  # a full disk: what is buffered cannot be written now either
            self._file.close()
        for suffix in (".bin", ".idx"):
            _partial(self._prefix, suffix).unlink(missing_ok=True)


def _partial(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(f"{prefix.name}{suffix}.{socket.gethostname()}.{os.getpid()}.partial")


def is_being_written(path: Path) -> bool:
    """Whether a process of this host is writing this partial file; those of other hosts count as left."""
    name, pid, _ = path.name.rsplit(".", 2)
    return name.endswith(f".{socket.gethostname()}") and Path(f"/proc/{pid}").exists()


class IndexRows(NamedTuple):
    """A part of an index: lengths in tokens, and where each document starts in the `.bin`, in bytes."""

    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]


class Shard:
    """A shard opened for reading. Training reads parts (`rows`, and `stored`); tools map whole arrays.

    Attributes:
        index_path, path: paths of the `.idx` and the `.bin`.
        documents: number of sequences; here every document is one.
        bytes: size of the `.bin`.

    Raises:
        DataError: a file is missing, not an index, or of a size that does not fit the other.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.path, self.index_path = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
        size, header = _begin_of(self.index_path)
        if len(header) < _HEADER.size or header[: len(MAGIC)] != MAGIC:
            raise DataError(f"{self.index_path} is not a Megatron-Core index (wrong first bytes)", remedy=_ADVICE)
        _, version, code, self.documents, self._starts = _HEADER.unpack(header)
        if version != 1 or code not in DTYPES:
            raise DataError(
                f"{self.index_path} has version {version} and dtype code {code}; this program reads version 1, integers"
            )
        expected = _HEADER.size + self.documents * 12 + self._starts * 8
        if size != expected:
            raise DataError(
                f"{self.index_path} has {size} bytes, its header promises {expected}: "
                + ("truncated" if size < expected else "the rest belongs to no document"),
                remedy=_ADVICE,
            )
        self.dtype = DTYPES[code]
        self.bytes, _ = _begin_of(self.path)
        last = 0
        if self.documents:
            row = self._rows(self.documents - 1, self.documents)
            last = int(row.pointers[0]) + int(row.lengths[0]) * self.dtype.itemsize
        if last > self._token_bytes:
            raise DataError(
                f"{self.path} has {self._token_bytes} bytes, its index needs {last}: truncated",
                remedy=_ADVICE,
            )

    @property
    def _token_bytes(self) -> int:
        return self.bytes - self.bytes % self.dtype.itemsize

    def lengths_at(self, document: int) -> int:
        """The byte of the index at which the length of a document is stored."""
        return LENGTHS_AT + 4 * document

    def _rows(self, first: int, stop: int) -> IndexRows:
        """The index rows of documents [first, stop), unchecked. Raises DataError."""
        at = LENGTHS_AT + 4 * self.documents
        with _opening(self.index_path):
            index = File(self.index_path)
            lengths = index.read(self.lengths_at(first), self.lengths_at(stop))
            pointers = index.read(at + 8 * first, at + 8 * stop)
        if len(lengths) < 4 * (stop - first) or len(pointers) < 8 * (stop - first):
            raise DataError(f"{self.index_path} is shorter than when it was opened", remedy=_ADVICE)
        return IndexRows(np.frombuffer(lengths, "<i4"), np.frombuffer(pointers, "<i8"))

    def rows(self, first: int, stop: int) -> IndexRows:
        """The index rows of documents [first, stop). Raises DataError if they cannot be read, or a document does not
        end where the next one starts, or the last where the file ends. Each length must be the distance of two
        pointers, so a single change of the index is noticed."""
        rows = self._rows(first, min(stop + 1, self.documents))
        begins = rows.pointers
        if stop == self.documents:
            begins = np.append(begins, self._token_bytes)
        rows = IndexRows(rows.lengths[: stop - first], rows.pointers[: stop - first])
        wrong = np.diff(begins) != rows.lengths.astype(np.int64) * self.dtype.itemsize
        wrong |= (begins[:-1] < 0) | (begins[1:] < begins[:-1]) | (begins[1:] > self._token_bytes)
        wrong |= begins[:-1] % self.dtype.itemsize != 0
        if wrong.any():
            raise DataError(
                f"the index of {self.prefix} is damaged: document {first + int(wrong.argmax())} does not fit "
                "between its neighbours",
                effect="the tokens read would not be those that were prepared",
                remedy=_ADVICE,
            )
        return rows

    # ------------------------------------------------------------------ for tools: memory-mapped

    @cached_property
    def _index(self) -> npt.NDArray[np.uint8]:
        return mapped_file(self.index_path)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """[documents], tokens per document."""
        return np.frombuffer(self._index, "<i4", self.documents, LENGTHS_AT)

    @cached_property
    def pointers(self) -> npt.NDArray[np.int64]:
        """[documents], start of each in `.bin`, in bytes."""
        return np.frombuffer(self._index, "<i8", self.documents, LENGTHS_AT + self.documents * 4)

    @cached_property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """[documents + 1], the first sequence of each."""
        return np.frombuffer(self._index, "<i8", self._starts, LENGTHS_AT + self.documents * 12)

    @cached_property
    def tokens(self) -> npt.NDArray[Any]:
        """[tokens], the whole `.bin` as a flat array."""
        raw = mapped_file(self.path)
        return np.frombuffer(raw, self.dtype, len(raw) // self.dtype.itemsize)

    @property
    def listed_bytes(self) -> int:
        """Bytes of all documents according to the index."""
        return int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize

    @property
    def has_single_sequences(self) -> bool:
        """Whether every document is one sequence, so that `lengths` are the documents'."""
        return np.array_equal(self.document_indices, np.arange(len(self.lengths) + 1))

    def index_problem(self, *, several: bool = False) -> str:
        """Why sequences are not contiguous or do not make up the documents; empty if there is no problem.

        With `several`, a document may have several sequences, and the first may start anywhere in the file.
        """
        starts, size = self.document_indices, self.dtype.itemsize
        if not self.documents:
            return "documents without sequences" if several and starts.any() else ""
        lengths = self.lengths.astype(np.int64)
        if int(lengths.min()) < 0:
            return "a document has a negative length"
        if not several and not self.has_single_sequences:
            return "documents of several sequences"
        if not (len(starts) and starts[0] == 0 and starts[-1] == len(lengths) and (np.diff(starts) >= 0).all()):
            return "its documents do not cover its sequences"
        begin = int(self.pointers[0]) if several else 0
        if begin < 0 or begin % size:
            return "the first document begins outside the file or inside a token"
        wrong = np.flatnonzero(self.pointers != begin + (np.cumsum(lengths) - lengths) * size)
        return f"document {wrong[0]} does not begin where the one before it ends" if len(wrong) else ""

    def document(self, number: int) -> npt.NDArray[Any]:
        """Tokens of document `number`, as a view into the file. Raises DataError."""
        row = self.rows(number, number + 1)
        start = int(row.pointers[0]) // self.dtype.itemsize
        return self.tokens[start : start + int(row.lengths[0])]


def _begin_of(path: Path) -> tuple[int, bytes]:
    """(size of a file in bytes, its first bytes: as many as a header has). Raises DataError."""
    with _opening(path):
        file = File(path)
        return file.size, file.read(0, _HEADER.size).tobytes()


def mapped_file(path: Path) -> npt.NDArray[np.uint8]:
    """A file's bytes, memory-mapped, for tools. Raises DataError."""
    with _opening(path):
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)


def _opening(path: Path) -> AbstractContextManager[None]:
    return raising(DataError, f"cannot open {path}", remedy=_ADVICE)


def file_checksum(path: Path) -> str:
    """xxh3-128 of a file's bytes, hex. Not cryptographic: it detects damage, not tampering."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
