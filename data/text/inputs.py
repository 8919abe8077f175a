"""Raw text input: split into units of work, read as documents. No tokens here.

Text files are one document each (`--split lines`: one per line), JSONL files one document per line (`--text-field`),
parquet files one per row. `.gz` and `.zst` are unpacked while reading. A unit is a byte range, a range of row groups
or a whole file, so that large files are shared between workers and a shard never depends on their number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_pretrain.errors import DataError

from .files import DAMAGED, PACKED, BoundedReader, Kind, kind_of, open_unpacked, parse_json, readable

_OPTIONS = ("--text-field", "--answer-field")
_EXPANSION = 4
"""Assumed ratio of text to compressed bytes, for balancing shards only."""
_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
_ROWS = 64
"""Rows of a parquet file that are decoded at once."""


@dataclass(frozen=True)
class Unit:
    """One unit of work: bytes [start, stop) of a plain file, row groups [start, stop) of a parquet, or a whole file.

    `size` is its (estimated) bytes of text.
    """

    path: str
    kind: Kind
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Document:
    """A text, with its answer if an answer field was named, and its place.

    Attributes:
        line: number of the line or row; 0 for a whole file.
        repaired: whether invalid UTF-8 or lone surrogates were replaced.
    """

    texts: tuple[str, ...]
    line: int
    repaired: bool

    @property
    def text(self) -> str:
        """Without the answer."""
        return self.texts[0]


def plan_shards(files: Iterable[Path], shard_bytes: int | None, *, lines: bool) -> list[list[Unit]]:
    """Group the input into shards of about `shard_bytes` of text: a function of the files and arguments alone.

    Without `shard_bytes` it is 1/32 of the input, between 8 MiB and 1 GiB. With `lines` a line is a document.
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
    if kind == "parquet" and path.suffix == ".parquet":
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


def read_documents(unit: Unit, text_field: str, *, lines: bool, answer_field: str | None = None) -> Iterator[Document]:
    """Documents of one unit, in file order; fields are those of JSONL or columns of parquet files.

    Raises:
        DataError: unreadable file, invalid JSON, or a record without the fields; names file and line.
        OSError: the storage failed, or the file cannot be read.
    """
    path, names = Path(unit.path), [text_field, *([answer_field] if answer_field is not None else [])]
    if unit.kind == "text" and answer_field is not None:
        raise DataError(f"{path} is plain text and has no field {answer_field!r}", remedy="use JSONL or parquet files")
    with readable(path):
        if unit.kind == "parquet":
            yield from _read_parquet(path, unit, names)
        elif unit.kind == "text" and not lines:
            with open_unpacked(path) as file:
                yield _document([BoundedReader(file, path).rest()], 0)
        else:
            for number, line in _read_lines(path, unit):
                if unit.kind == "text":
                    yield _document([line.rstrip(b"\r\n")], number)
                elif line.strip():
                    yield _json_document(line, number, unit, names)


def _read_lines(path: Path, unit: Unit) -> Iterator[tuple[int, bytes]]:
    """(number, line) of the lines that start inside the unit. Numbers count from the unit's start."""
    with open_unpacked(path) as file:
        whole, pieces = path.suffix in PACKED, BoundedReader(file, path)
        if not whole and unit.start:
            file.seek(unit.start - 1)
            file.readline()  # the line that straddles the start belongs to the previous unit
        number = 0
        while whole or file.tell() < unit.stop:
            line = pieces.line()
            if not line:
                return
            yield number, line
            number += 1


def _line_in_file(unit: Unit, number: int) -> int:
    """1-based number in the whole file of a line of a unit."""
    if Path(unit.path).suffix in PACKED or not unit.start:
        return number + 1
    with Path(unit.path).open("rb") as file:
        before = 0
        while file.tell() < unit.start:
            file.readline()
            before += 1
    return before + number + 1


def _json_document(line: bytes, number: int, unit: Unit, names: list[str]) -> Document:
    valid = True
    try:
        try:
            record = parse_json(line)
        except UnicodeDecodeError:
            record, valid = parse_json(line.decode("utf-8", "replace")), False
    except ValueError as error:
        raise DataError(f"{unit.path}, line {_line_in_file(unit, number)}: not JSON ({error})") from None
    found = [record.get(name) for name in names] if isinstance(record, dict) else []
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(names):
        raise _no_text(record, names, f"{unit.path}, line {_line_in_file(unit, number)}")
    return _document(texts, number, repaired=not valid)


def _no_text(record: Any, names: list[str], where: str) -> DataError:
    """Why a JSON value is not a record with texts in these fields."""
    if not isinstance(record, dict):
        return DataError(f"{where}: {_shown(record)} is not a JSON object")
    name, option = next(pair for pair in zip(names, _OPTIONS, strict=False) if not isinstance(record.get(pair[0]), str))
    if name in record:
        return DataError(f"{where}: field {name!r} is {_shown(record[name])}, not a string")
    keys = ", ".join(map(_shown, list(record)[:20]))
    return DataError(f"{where}: no field {name!r} (the record has {keys or 'none'})", remedy=_name_it(option))


def _shown(value: Any) -> str:
    """A JSON value in a message."""
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else json.dumps(value)[:40]


def _name_it(option: str) -> str:
    return f"`fsdp-data prepare` and `train-tokenizer` take the name with {option}"


def _document(found: Sequence[str | bytes], number: int, *, repaired: bool = False) -> Document:
    """The document of a text and, if there are two, its answer."""
    decoded = [_decode(raw) for raw in found]
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
        if path.suffix in PACKED:
            with open_unpacked(path) as file:
                yield parquet.ParquetFile(pyarrow.BufferReader(BoundedReader(file, path).rest()))
        else:
            with parquet.ParquetFile(path) as file:
                yield file
    except pyarrow.ArrowException as error:
        raise DataError(f"cannot read {path} as parquet: {error}", remedy=DAMAGED) from None


def _read_parquet(path: Path, unit: Unit, names: list[str]) -> Iterator[Document]:
    with _parquet(path) as file:
        for name, option in zip(names, _OPTIONS, strict=False):
            _check_column(path, file.schema_arrow, name, option)
        rows = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        groups = list(range(len(rows)) if path.suffix in PACKED else range(unit.start, unit.stop))
        number = 0
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=names):
            for texts in zip(*(_texts(batch.column(name)) for name in names), strict=True):
                if None in texts:
                    row = sum(rows[: groups[0]]) + number + 1
                    raise DataError(f"{path}, row {row}: no text in column {names[texts.index(None)]!r} (null)")
                yield _document(texts, number)
                number += 1
        promised = sum(rows[group] for group in groups)
        if number != promised:
            raise DataError(f"{path} has {number} rows where its footer promises {promised}", remedy=DAMAGED)


def _check_column(path: Path, schema: Any, name: str, option: str) -> None:
    """Raise DataError unless there is one column of that name, and it holds texts."""
    found = [field for field in schema if field.name == name]
    if len(found) != 1:
        count = f"{len(found)} columns" if found else "no column"
        raise DataError(f"{path} has {count} {name!r} (it has {', '.join(schema.names)})", remedy=_name_it(option))
    kind = found[0].type
    if str(kind.value_type if str(kind).startswith("dictionary") else kind) not in _TEXT_TYPES:
        raise DataError(f"{path}: column {name!r} holds no texts (it is of type {kind})")


def _texts(column: Any) -> list[bytes | None]:
    """Values of a column, undecoded: invalid UTF-8 is repaired and counted as everywhere."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    found: list[bytes | None] = column.cast(pyarrow.large_binary()).to_pylist()
    return found
