"""Raw text input, split into units of work and read as documents.

Text files are one document each (`--split lines`: one per line), JSONL files one document per line (`--text-field`),
parquet files one per row. `.gz` and `.zst` are unpacked while reading. A unit is a byte range, a range of row groups
or a whole file, so that large files are shared between workers and a shard never depends on their number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsdp_pretrain.errors import DataError

from .bad_records import BadRecord, OnBad, refuse
from .files import DAMAGED, PACKED, BoundedReader, Kind, kind_of, open_unpacked, parse_json, readable

_NAME_IT = "name the right one with --text-field or --answer-field"
_CALL_IT_TEXT = "mend or remove it; here a text is always read from `text`, so call the field or column that"
_EXPANSION = 4
"""Assumed ratio of text to compressed bytes, only to balance shards."""
_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
_ROWS = 64
"""Rows of a parquet file that are decoded at once."""


@dataclass(frozen=True)
class Unit:
    """One unit of work: bytes [start, stop) of a plain file, row groups [start, stop) of a parquet, or a whole file.

    `size`: its bytes of text, estimated for packed files.
    """

    path: str
    kind: Kind
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Document:
    """A text, with its answer if an answer field was named."""

    texts: tuple[str, ...]  # the text, and the answer if there is one
    line: int  # number of the line or row in its unit, from 0; 0 for a whole file
    repaired: bool  # whether invalid UTF-8 or lone surrogates were replaced

    @property
    def text(self) -> str:
        """The text without the answer."""
        return self.texts[0]


def plan_shards(files: Iterable[Path], shard_bytes: int | None, *, lines: bool) -> list[list[Unit]]:
    """Group the input into shards of about `shard_bytes` of text: a function of the files and arguments alone.

    Args:
        shard_bytes: None: 1/32 of the input, between 8 MiB and 1 GiB.
        lines: whether every line of a text file is a document.
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
    return path.stat().st_size * (_EXPANSION if path.suffix in PACKED or path.suffix == ".parquet" else 1)


def _units(path: Path, size: int, *, lines: bool) -> Iterator[Unit]:
    kind, total = kind_of(path), path.stat().st_size
    if kind == "parquet":
        with readable(path), _parquet(path) as file:
            sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups)]
        for group, text in enumerate(sizes):
            yield Unit(str(path), kind, group, group + 1, max(0, text))
    elif path.suffix in PACKED or (kind == "text" and not lines):
        yield Unit(str(path), kind, 0, total, _text_bytes(path))
    else:
        for start in range(0, total, size):
            stop = min(total, start + size)
            yield Unit(str(path), kind, start, stop, stop - start)


def read_documents(
    unit: Unit, text_field: str, *, lines: bool, answer_field: str | None = None, on_bad: OnBad = refuse
) -> Iterator[Document]:
    """Documents of one unit, in file order.

    Args:
        text_field, answer_field: names of fields in JSONL, or of columns in parquet files.
        lines: whether every line of a text file is a document.
        on_bad: called for each record that is not JSON or has no text in its fields; then reading continues.

    Raises:
        DataError: the file is damaged; or from `on_bad`, by default at the first bad record.
        OSError: the storage failed, or the file cannot be read.
    """
    path, names = Path(unit.path), [text_field, *([answer_field] if answer_field is not None else [])]
    if unit.kind == "text" and answer_field is not None:
        raise DataError(f"{path} is plain text and has no field {answer_field!r}", remedy="use JSONL or parquet files")
    with readable(path):
        if unit.kind == "parquet":
            yield from _read_parquet(path, unit, names, on_bad)
        elif unit.kind == "text" and not lines:
            with open_unpacked(path) as file:
                yield _document([BoundedReader(file, path).rest()], 0)
        else:
            for line in _read_lines(path, unit):
                if unit.kind == "text":
                    yield _document([line.content.rstrip(b"\r\n")], line.number)
                elif line.content.strip():
                    document = _json_document(line, names)
                    if isinstance(document, Document):
                        yield document
                    else:
                        on_bad(_bad_line(path, line, document))


def read_texts(path: Path) -> Iterator[str]:
    """The texts of one file: the field `text` of JSONL or parquet, or plain text. Raises DataError."""

    def refuse_record(record: BadRecord) -> None:
        raise DataError(str(record).replace(f"; if all lack it, {_NAME_IT}", ""), remedy=_CALL_IT_TEXT)

    try:
        for unit in (unit for shard in plan_shards([path], None, lines=False) for unit in shard):
            documents = read_documents(unit, "text", lines=False, on_bad=refuse_record)
            yield from (document.text for document in documents)
    except DataError as error:
        if error.remedy != _NAME_IT:
            raise
        raise DataError(error.cause, remedy=_CALL_IT_TEXT) from None


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a unit that begins at byte `first` of its file; `number` and `offset` count from there."""

    content: bytes
    number: int
    first: int
    offset: int


def _read_lines(path: Path, unit: Unit) -> Iterator[_Line]:
    """The lines that start inside the unit."""
    with open_unpacked(path) as file:
        whole, pieces = path.suffix in PACKED, BoundedReader(file, path)
        if not whole and unit.start:
            file.seek(unit.start - 1)
            file.readline()  # the line that straddles the start belongs to the previous unit
        first = 0 if whole else file.tell()
        number = offset = 0
        while whole or first + offset < unit.stop:
            line = pieces.line()
            if not line:
                return
            yield _Line(line, number, first, offset)
            number, offset = number + 1, offset + len(line)


def _bad_line(path: Path, line: _Line, reason: str) -> BadRecord:
    number = _lines_before(path, line.first) + line.number + 1
    return BadRecord(str(path), "line", number, line.first + line.offset, reason)


@lru_cache(maxsize=4)
def _lines_before(path: Path, byte: int) -> int:
    """Number of lines of a plain file before the one that starts at a byte."""
    count = 0
    if byte:
        with path.open("rb") as file:
            while byte > 0 and (piece := file.read(min(byte, 1 << 22))):
                count += piece.count(b"\n")
                byte -= len(piece)
    return count


def _json_document(line: _Line, names: list[str]) -> Document | str:
    """The document in a line, or why there is none."""
    valid = True
    try:
        try:
            record = parse_json(line.content)
        except UnicodeDecodeError:
            record, valid = parse_json(line.content.decode("utf-8", "replace")), False
    except ValueError as error:
        return f"not JSON ({error})"
    values = [record.get(name) for name in names] if isinstance(record, dict) else []
    texts = [text for text in values if isinstance(text, str)]
    if len(texts) < len(names):
        return _no_text(record, names)
    return _document(texts, line.number, repaired=not valid)


def _no_text(record: Any, names: list[str]) -> str:
    """Why a JSON value is not a record with texts in these fields."""
    if not isinstance(record, dict):
        return f"{_shown(record)} is not a JSON object"
    name = next(name for name in names if not isinstance(record.get(name), str))
    if name in record:
        return f"field {name!r} is {_shown(record[name])}, not a string"
    keys = ", ".join(map(_shown, list(record)[:20]))
    return f"no field {name!r} (the record has {keys or 'none'}); if all lack it, {_NAME_IT}"


def _shown(value: Any) -> str:
    """A JSON value as it is shown in a message."""
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else json.dumps(value)[:40]


def _document(raw_texts: Sequence[str | bytes], number: int, *, repaired: bool = False) -> Document:
    """The document of a text and, if there are two, its answer."""
    decoded = [_decode(raw) for raw in raw_texts]
    return Document(tuple(text for text, _ in decoded), number, repaired or any(bad for _, bad in decoded))


def _decode(raw: bytes | str) -> tuple[str, bool]:
    """The text, and whether anything was replaced. JSON can hold lone surrogates, which no tokenizer accepts."""
    if isinstance(raw, str):
        try:
            raw.encode("utf-8")
        except UnicodeEncodeError:
            return raw.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
        return raw, False
    try:
        return raw.decode("utf-8"), False
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace"), True


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except pyarrow.ArrowException as error:
        raise DataError(f"cannot read {path} as parquet: {error}", remedy=DAMAGED) from None


def _read_parquet(path: Path, unit: Unit, names: list[str], on_bad: OnBad) -> Iterator[Document]:
    with _parquet(path) as file:
        for name in names:
            _check_column(path, file.schema_arrow, name)
        rows = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        groups = list(range(unit.start, unit.stop))
        number = 0
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=names):
            for texts in zip(*(_texts(batch.column(name)) for name in names), strict=True):
                if None in texts:
                    row = sum(rows[: groups[0]]) + number + 1
                    reason = f"no text in column {names[texts.index(None)]!r} (null)"
                    on_bad(BadRecord(str(path), "row", row, None, reason))
                else:
                    yield _document(texts, number)
                number += 1
        promised = sum(rows[group] for group in groups)
        if number != promised:
            raise DataError(f"{path} has {number} rows where its footer promises {promised}", remedy=DAMAGED)


def _check_column(path: Path, schema: Any, name: str) -> None:
    """Raise DataError unless exactly one column has this name, and it holds texts."""
    columns = [field for field in schema if field.name == name]
    if len(columns) != 1:
        count = f"{len(columns)} columns" if columns else "no column"
        raise DataError(f"{path} has {count} {name!r} (it has {', '.join(schema.names)})", remedy=_NAME_IT)
    kind = columns[0].type
    if str(kind.value_type if str(kind).startswith("dictionary") else kind) not in _TEXT_TYPES:
        raise DataError(f"{path}: column {name!r} holds no texts (it is of type {kind})")


def _texts(column: Any) -> list[bytes | None]:
    """Values of a column as bytes, so that invalid UTF-8 is repaired and counted as in other formats."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    texts: list[bytes | None] = column.cast(pyarrow.large_binary()).to_pylist()
    return texts
