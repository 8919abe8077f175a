"""The small JSON files with the state of a run: written as a whole with a checksum, read by one strict reader.

A file has `format` and a `checksum` of its values, so bit flips are detected; a file that a person wrote may have
neither and is only checked against its schema. Reading a damaged file, or one of another format, raises an error.
Non-critical files may be read with `view`, which treats a damaged one as missing; `fsdp-pretrain status` reports it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fsdp_pretrain.errors import StorageError, UserError
from fsdp_pretrain.files import create_file

from .files import replace_file

FORMAT = 3
"""The format that this version writes and reads. Formats 1 and 2 predate 0.1.0, the first release."""
T = TypeVar("T")


class StateFile(BaseModel):
    """Base of the schemas. Unknown keys are ignored: a later version of the same format may have added them."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


Content = StateFile | Mapping[str, Any]


class DamagedFileError(UserError):
    """A state file is damaged, or has another format."""


def write(path: Path, content: Content) -> None:
    """Replace a file, atomically and durably. Raises OSError."""
    replace_file(path, seal(content))


def create(path: Path, content: Content) -> None:
    """Create a file that must not exist, atomically. Raises FileExistsError, OSError."""
    create_file(path, seal(content))


def seal(content: Content) -> str:
    """The JSON text of a file with these values (the set fields of a model), with format and checksum."""
    if isinstance(content, BaseModel):
        content = content.model_dump(mode="json", exclude_unset=True)
    values = {**json.loads(json.dumps(content)), "format": FORMAT}
    values.pop("checksum", None)
    return json.dumps({**values, "checksum": _checksum(values)}, indent=1) + "\n"


def read(path: Path, schema: type[T], *, effect: str = "", remedy: str = "") -> T | None:
    """The contents of a file, of any type that pydantic supports; None if there is no file.

    Raises:
        DamagedFileError: the file is damaged, or of another format; `effect` and `remedy` are for the message.
        StorageError: the file cannot be read.
    """
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}", effect=effect) from None
    try:
        return parse(raw, schema)
    except ValueError as error:
        raise DamagedFileError(f"{path} {error}", effect=effect, remedy=remedy) from None


def view(path: Path, schema: type[T]) -> T | None:
    """The contents of a non-critical file; None if it is missing, damaged or unreadable."""
    try:
        return read(path, schema)
    except UserError:
        return None


def parse(raw: bytes, schema: type[T]) -> T:
    """Parse the bytes of a file. Raises ValueError, whose message continues the file's name."""
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("is damaged: it is not JSON") from None
    if isinstance(values, dict):
        _check(values)
    try:
        parsed: T = _adapter(schema).validate_python(values)
        return parsed
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "its contents"
        raise ValueError(f"is damaged: {place}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def _check(values: dict[str, Any]) -> None:
    """Check and remove format and checksum. No single bit flip removes both."""
    if "format" not in values and "checksum" not in values:
        return  # a person wrote it
    format_ = values.get("format")
    if type(format_) is int and 0 < format_ != FORMAT:
        raise ValueError(f"is of another version: its format is {format_}, this program reads {FORMAT}")
    if values.pop("checksum", None) != _checksum(values):
        raise ValueError("is damaged: its values are not the ones that were written (checksum)")
    values.pop("format", None)


def _checksum(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)
