"""Token files of any format as runs of whole documents, for `validate` and `import`.

    megatron  PREFIX.bin and PREFIX.idx, the Megatron-Core indexed dataset
    arrow     Arrow IPC, file or stream: a list column with a document per row, or an integer column with a document
              per record batch (the layout of fms-fsdp)
    npy       one flat array of tokens, cut at the separator

Files are streamed and memory-mapped. A run holds about 4M tokens and never cuts a document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.data.text.files import DAMAGED, TEXT_SUFFIXES, files_below, readable, require_file
from fsdp_pretrain.errors import DataError

from .shards import Shard

Format = Literal["megatron", "arrow", "npy"]
Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[Any]
RUN_TOKENS = 4_000_000
MEASURED_TOKENS = 1_000_000
"""Tokens per run when it is read more than once, so that it stays in the processor's cache."""
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_SUFFIXES: dict[str, Format] = {".idx": "megatron", ".arrow": "arrow", ".npy": "npy"}


@dataclass(frozen=True)
class Run:
    """Consecutive documents of one file."""

    first: int  # number of the first document within the file
    lengths: Ints  # int64 [documents], tokens of each, as stored (including separators, if the file has any)
    tokens: Tokens  # [lengths.sum()], the documents concatenated; any integer dtype

    @cached_property
    def ends(self) -> Ints:
        """[documents], end of each in `tokens`."""
        return np.cumsum(self.lengths)

    @cached_property
    def starts(self) -> Ints:
        """[documents], start of each in `tokens`."""
        return self.ends - self.lengths

    def document_of(self, at: Ints) -> Ints:
        """Number within the run of the document at each position."""
        return np.searchsorted(self.ends, at, side="right")


@dataclass(frozen=True)
class TokenFile:
    """One file (or pair of files) opened for reading.

    Opening and reading raise DataError if it is truncated, damaged or not of its format, OSError if storage fails.
    """

    chunks: Callable[[int], Iterator[tuple[Ints, Tokens]]]  # (tokens per chunk) -> lengths and tokens of all documents
    shard: Shard | None = None  # the opened shard of the format `megatron`; else None

    def runs(self, size: int = RUN_TOKENS) -> Iterator[Run]:
        """All documents in order, in runs of about `size` tokens and at least one document."""
        first = 0
        for lengths, tokens in _joined(self.chunks(size), size):
            ends, at = np.cumsum(lengths), 0
            while at < len(lengths):
                base = int(ends[at - 1]) if at else 0
                stop = max(at + 1, int(np.searchsorted(ends, base + size)))
                yield Run(first + at, lengths[at:stop], tokens[base : int(ends[stop - 1])])
                at = stop
            first += len(lengths)


def _joined(chunks: Iterator[tuple[Ints, Tokens]], size: int) -> Iterator[tuple[Ints, Tokens]]:
    """Merge chunks to at least `size` tokens each, except the last."""
    held, count = list[tuple[Ints, Tokens]](), 0
    for chunk in chunks:
        held.append(chunk)
        count += len(chunk[1])
        if count >= size:
            yield _join(held)
            held, count = [], 0
    if held:
        yield _join(held)


def _join(held: list[tuple[Ints, Tokens]]) -> tuple[Ints, Tokens]:
    lengths, tokens = zip(*held, strict=True)
    return held[0] if len(held) == 1 else (np.concatenate(lengths), np.concatenate(tokens))


def token_files(path: Path, format: Format | None = None) -> dict[Path, Format]:  # noqa: A002
    """The token files at a path with their formats, ordered by name; for a Megatron pair, the prefix.

    `path` is a file, the prefix of a Megatron pair, or a directory to search. Raises DataError if nothing is found, or
    a directory holds several formats and `format` is None.
    """
    if path.is_dir():
        kind, files = _of_one_format(path, files_below(path), format)
    else:
        index = path.with_name(path.name.removesuffix(".bin").removesuffix(".idx") + ".idx")
        one = index if format in (None, "megatron") and index.exists() else path
        kind, files = (format, [one]) if format else _of_one_format(path, [one], format)
    for file in files:
        require_file(file)
    return {file.with_suffix("") if kind == "megatron" else file: kind for file in files}


def _of_one_format(where: Path, files: Sequence[Path], format: Format | None) -> tuple[Format, list[Path]]:  # noqa: A002
    """The token files among `files`, and their format. Raises DataError, see `token_files`."""
    by_format = dict[Format, list[Path]]()
    for file in files:
        if (kind := _SUFFIXES.get(file.suffix)) is not None and format in (None, kind):
            by_format.setdefault(kind, []).append(file)
    if len(by_format) > 1:
        counts = ", ".join(f"{len(paths)} {kind}" for kind, paths in by_format.items())
        raise DataError(f"{where} holds files of several formats: {counts}", remedy="say which with --format")
    if by_format:
        return next(iter(by_format.items()))
    if not where.exists():
        raise DataError(f"there is no file {where}")
    if any(file.name.endswith(TEXT_SUFFIXES) for file in files):
        raise DataError(f"{where} holds text, not tokens", remedy="make a corpus of it with `fsdp-data prepare`")
    raise DataError(f"{where} holds no {format or 'token'} files (names ending in {', '.join(_SUFFIXES)})")


def open_file(
    path: Path,
    format: Format,  # noqa: A002
    eod: int,
    *,
    leading: bool = False,
) -> TokenFile:
    """Open one file of a format.

    Args:
        path: a path from `token_files`.
        eod: id of the separator, at which `npy` is cut.
        leading: whether each separator in `npy` begins a document; otherwise it ends one.

    Raises:
        DataError: the file cannot be read, or is truncated or not of this format.
    """
    if format == "megatron":
        shard = Shard(path)
        return TokenFile(partial(_shard_chunks, shard), shard)
    if format == "arrow":
        return TokenFile(_ArrowFile(path).chunks)
    return TokenFile(partial(_flat_chunks, _read_npy(path), eod, leading))


def _shard_chunks(shard: Shard, size: int) -> Iterator[tuple[Ints, Tokens]]:
    """The chunk of a Megatron shard: all documents, those of several sequences joined."""
    if problem := shard.index_problem(several=True):
        raise DataError(
            f"the index of {shard.prefix} is damaged: {problem}", remedy="restore it or prepare the shard again"
        )
    ends = np.concatenate(([0], np.cumsum(shard.lengths, dtype=np.int64)))
    begin = int(shard.pointers[0]) // shard.dtype.itemsize if len(shard.pointers) else 0
    yield np.diff(ends[shard.document_indices]), shard.tokens[begin : begin + int(ends[-1])]


class _ArrowFile:
    """Arrow IPC, file or stream format: the column `tokens`, or the only one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _arrow(path):
            with path.open("rb") as file:
                self._is_file = file.read(6) == b"ARROW1"
            schema = self._open()[1].schema
            names, described = schema.names, ", ".join(f"{field.name}: {field.type}" for field in schema)
        self._column = "tokens" if "tokens" in names or len(names) != 1 else names[0]
        kind = schema.field(self._column).type if names.count(self._column) == 1 else None
        self._is_list = kind is not None and str(kind).startswith(("list<", "large_list<"))
        if kind is None or str(kind.value_type if self._is_list else kind) not in _INTEGERS:
            raise DataError(f"{path} has no column `tokens` of integers or of lists of integers (it has {described})")

    def _open(self) -> tuple[Any, Any]:
        """(mapped file, reader of its record batches). Arrow's file format is a stream followed by a footer."""
        import pyarrow

        source = pyarrow.memory_map(str(self._path))
        source.seek(8 if self._is_file else 0)
        return source, pyarrow.ipc.open_stream(source)

    def _batches(self) -> Iterator[Any]:
        """The record batches; then a check that the file is complete: the reader accepts a missing end."""
        source, reader = self._open()
        last = source.tell()
        for batch in reader:
            yield batch
            last = source.tell()
        end = source.tell()
        behind, footer = source.size() - end, 0
        if self._is_file and behind >= 10:
            source.seek(source.size() - 10)
            footer = int.from_bytes(source.read(4), "little") + 10
        if end == last or (self._is_file and behind < max(footer, 10)):
            raise DataError(f"{self._path} is cut off: it has no end marker", remedy=DAMAGED)
        if behind > footer:
            raise DataError(f"{self._path} has {behind - footer} bytes after its end", remedy=DAMAGED)

    def chunks(self, size: int) -> Iterator[tuple[Ints, Tokens]]:
        """One chunk per record batch."""
        with _arrow(self._path):
            for number, batch in enumerate(self._batches()):
                batch = batch.select([self._column])
                batch.validate(full=True)  # wrong offsets would read other data, or beyond the file
                column = batch.column(0)
                values = column.flatten() if self._is_list else column
                if column.null_count or values.null_count:
                    raise DataError(f"{self._path} has nulls among its tokens (record batch {number})")
                lengths = column.value_lengths().to_numpy() if self._is_list else [len(column)]
                yield np.asarray(lengths, dtype=np.int64), values.to_numpy()


@contextmanager
def _arrow(path: Path) -> Iterator[None]:
    """Turn pyarrow's errors about a file into DataError."""
    import pyarrow

    try:
        with readable(path):
            yield
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path} as an Arrow IPC file or stream: {error}", remedy=DAMAGED) from None


def _flat_chunks(tokens: Tokens, eod: int, leading: bool, size: int) -> Iterator[tuple[Ints, Tokens]]:
    """One array of tokens, cut after every separator, or before it if they are leading.

    Two adjacent separators give a document that is only a separator. The tokens before the first cut and after the last
    are documents too, without a separator if the array begins or ends inside a document.
    """
    begin, end = 0, len(tokens)
    while begin < end:
        stop, width = begin, size
        while True:
            stop = min(end, begin + width)
            cuts = np.flatnonzero(tokens[begin:stop] == eod) + (0 if leading else 1)
            cuts = cuts[cuts > 0]
            if stop == end or len(cuts):
                break
            width *= 2  # a document longer than a run
        if stop == end and (not len(cuts) or cuts[-1] < end - begin):
            cuts = np.append(cuts, end - begin)
        yield np.diff(cuts, prepend=0).astype(np.int64), tokens[begin : begin + int(cuts[-1])]
        begin += int(cuts[-1])


def _read_npy(path: Path) -> Tokens:
    try:
        with readable(path):
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (DataError, OSError):
        raise
    except Exception as error:  # NumPy evaluates the header as Python text: a damaged one may raise nearly anything
        raise DataError(f"cannot read {path} as a NumPy array: {error}", remedy=DAMAGED) from None
    if not isinstance(tokens, np.memmap) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        shown = f"{tokens.dtype} of shape {tokens.shape}" if isinstance(tokens, np.ndarray) else "an archive"
        raise DataError(f"{path} is not a one-dimensional array of integers but {shown}")
    if (behind := path.stat().st_size - tokens.offset - tokens.nbytes) != 0:
        raise DataError(f"{path} has {behind} bytes after its array", remedy=DAMAGED)
    return tokens
