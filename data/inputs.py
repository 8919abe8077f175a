"""Raw text in: which files, cut into which pieces of work, read as which documents. No tokens here.

Text files are one document each (`--split lines`: one per line), JSONL files one document per line (`--text-field`),
parquet files one per row. `.gz` and `.zst` are unpacked while reading. A piece of work is a byte range, a range of
row groups or a whole file, so that large files are shared between workers and a shard never depends on their number.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from fsdp_pretrain.errors import DataError

Kind = Literal["text", "jsonl", "parquet"]
_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_PACKED = (".gz", ".zst")
TEXT_SUFFIXES = tuple(suffix + packed for suffix in (".txt", *_KINDS) for packed in ("", *_PACKED))
"""Names of the files that are taken from directories by default."""
_OPTIONS = ("--text-field", "--answer-field")
_EXPANSION = 4
"""Assumed ratio of text to compressed bytes, for balancing shards only."""


@dataclass(frozen=True)
class Unit:
    """One piece of work: bytes [start, stop) of a plain file, row groups [start, stop) of a parquet, or a whole file.

    `size` is its (estimated) bytes of text.
    """

    path: str
    kind: Kind
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Document:
    """A text and where it stands: `line` counts lines, rows or, for a whole file, is 0."""

    text: str
    line: int
    repaired: bool
    """Invalid UTF-8 or lone surrogates were replaced."""
    answer: str | None = None
    """What answers the text, where a field for it was named."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The text, and the answer if there is one."""
        return (self.text,) if self.answer is None else (self.text, self.answer)


def find_files(inputs: Sequence[str], suffixes: Sequence[str] = ()) -> list[Path]:
    """Files named or found in the directories named, without duplicates (symbolic links resolved).

    Args:
        inputs: files and directories, in the order that fixes the document numbers.
        suffixes: when walking directories, take only files ending so; empty: `.txt`, JSONL and parquet.

    Raises:
        DataError: an input does not exist, or nothing is found.
    """
    wanted = tuple(suffix + packed for suffix in suffixes for packed in ("", *_PACKED)) or TEXT_SUFFIXES
    found: dict[Path, Path] = {}
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            for inner in sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(wanted)):
                found.setdefault(inner.resolve(), inner)
        elif path.exists():
            found.setdefault(path.resolve(), path)
        else:
            raise DataError(f"there is no input {path}")
    if not found:
        raise DataError(
            f"no input files in {', '.join(inputs)}",
            remedy=f"files should end in {', '.join(wanted[:4])} ... or be named one by one",
        )
    return list(found.values())


def kind_of(path: Path) -> Kind:
    """How a file is read, by its suffix; anything unknown is text."""
    name = path.name
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return _KINDS.get(Path(name).suffix, "text")


def plan_shards(files: Iterable[Path], shard_bytes: int | None, *, lines: bool) -> list[list[Unit]]:
    """Group the input into shards of about `shard_bytes` of text: a function of the files and arguments alone.

    Args:
        files: in order.
        shard_bytes: None chooses 1/32 of the input between 8 MiB and 1 GiB.
        lines: text files hold one document per line.
    """
    files = list(files)
    total = sum(_text_bytes(path) for path in files)
    size = shard_bytes or min(1 << 30, max(8 << 20, total // 32))
    shards: list[list[Unit]] = [[]]
    filled = 0
    for path in files:
        for unit in _units(path, size, lines=lines):
            if filled and filled + unit.size > size:
                shards.append([])
                filled = 0
            shards[-1].append(unit)
            filled += unit.size
    return [shard for shard in shards if shard]


def _text_bytes(path: Path) -> int:
    return path.stat().st_size * (_EXPANSION if path.suffix in _PACKED or path.suffix == ".parquet" else 1)


def _units(path: Path, size: int, *, lines: bool) -> Iterator[Unit]:
    kind, total = kind_of(path), path.stat().st_size
    if kind == "parquet" and path.suffix == ".parquet":
        with _parquet(path) as file:
            for group in range(file.metadata.num_row_groups):
                yield Unit(str(path), kind, group, group + 1, file.metadata.row_group(group).total_byte_size)
    elif path.suffix in _PACKED or (kind == "text" and not lines):
        yield Unit(str(path), kind, 0, total, _text_bytes(path))
    else:
        for start in range(0, total, size):
            stop = min(total, start + size)
            yield Unit(str(path), kind, start, stop, stop - start)


def read_documents(unit: Unit, text_field: str, *, lines: bool, answer_field: str | None = None) -> Iterator[Document]:
    """Documents of one unit, in file order.

    Args:
        unit: what to read.
        text_field: JSONL field or parquet column.
        lines: text files hold one document per line.
        answer_field: field or column of what answers the text; None for none.

    Raises:
        DataError: unreadable file, invalid JSON, or a record without the fields; names file and line.
    """
    path, names = Path(unit.path), [text_field, *([answer_field] if answer_field is not None else [])]
    if unit.kind == "text" and answer_field is not None:
        raise DataError(f"{path} is plain text and has no field {answer_field!r}", remedy="use JSONL or parquet files")
    try:
        if unit.kind == "parquet":
            yield from _read_parquet(path, unit, names)
        elif unit.kind == "text" and not lines:
            with open_unpacked(path) as file:
                yield _document(file.read(), 0)
        else:
            for number, line in _read_lines(path, unit):
                if unit.kind == "text":
                    yield _document(line.rstrip(b"\r\n"), number)
                elif line.strip():
                    yield _json_document(line, number, path, names)
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def _read_lines(path: Path, unit: Unit) -> Iterator[tuple[int, bytes]]:
    """(number, line) of the lines that begin inside the unit. Numbers count from the unit's start."""
    with open_unpacked(path) as file:
        whole = path.suffix in _PACKED
        if not whole and unit.start:
            file.seek(unit.start - 1)
            file.readline()  # the line that straddles the start belongs to the unit before
        number = 0
        while whole or file.tell() < unit.stop:
            line = file.readline()
            if not line:
                return
            yield number, line
            number += 1


def _json_document(line: bytes, number: int, path: Path, names: list[str]) -> Document:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number + 1} of its part: not JSON ({error})") from None
    found = [record.get(name) if isinstance(record, dict) else None for name in names]
    for name, option, text in zip(names, _OPTIONS, found, strict=False):
        if not isinstance(text, str):
            keys = ", ".join(map(repr, record)) if isinstance(record, dict) else "not an object"
            raise DataError(
                f"{path}, line {number + 1} of its part: no text in field {name!r} (the record has {keys})",
                remedy=f"name the field with {option}",
            )
    return _record([text for text in found if text is not None], number)


def _record(texts: Sequence[str], number: int) -> Document:
    """The document of a record: its text and, if there are two, the answer."""
    document = _document(texts[0], number)
    if len(texts) == 1:
        return document
    answer = _document(texts[1], number)
    return replace(document, answer=answer.text, repaired=document.repaired or answer.repaired)


def _document(raw: bytes | str, number: int) -> Document:
    """Decode; replace what is not UTF-8. JSON can smuggle in lone surrogates, which no tokenizer accepts."""
    try:
        if isinstance(raw, str):
            if not raw.isascii():
                raw.encode("utf-8")
            return Document(raw, number, False)
        return Document(raw.decode("utf-8"), number, False)
    except UnicodeEncodeError:
        assert isinstance(raw, str)
        return Document(raw.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), number, True)
    except UnicodeDecodeError:
        assert isinstance(raw, bytes)
        return Document(raw.decode("utf-8", "replace"), number, True)


@contextmanager
def open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed if its name ends in `.gz` or `.zst`."""
    with path.open("rb") as file:
        if path.suffix == ".gz":
            yield io.BufferedReader(gzip.GzipFile(fileobj=file))  # type: ignore[arg-type]
        elif path.suffix == ".zst":
            import zstandard

            try:
                yield io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))
            except zstandard.ZstdError as error:
                raise DataError(f"cannot unpack {path}: {error}") from None
        else:
            yield file


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    with open_unpacked(path) as file:
        source = pyarrow.BufferReader(file.read()) if path.suffix in _PACKED else path
        try:
            yield parquet.ParquetFile(source)
        except pyarrow.ArrowException as error:
            raise DataError(f"cannot read {path} as parquet: {error}") from None


def _read_parquet(path: Path, unit: Unit, names: list[str]) -> Iterator[Document]:
    with _parquet(path) as file:
        columns = file.schema_arrow.names
        for name, option in zip(names, _OPTIONS, strict=False):
            if name not in columns:
                raise DataError(
                    f"{path} has no column {name!r} (it has {', '.join(columns)})", remedy=f"name it with {option}"
                )
        whole = path.suffix in _PACKED
        groups = range(file.metadata.num_row_groups) if whole else range(unit.start, unit.stop)
        number = 0
        for batch in file.iter_batches(batch_size=1024, row_groups=list(groups), columns=names):
            for texts in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
                if None in texts:
                    raise DataError(f"{path}: row {number} of row groups {groups} has no text (null)")
                yield _record(texts, number)
                number += 1
