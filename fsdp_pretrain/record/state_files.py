"""The small JSON files that hold the state of a run: written as a whole, with a checksum, read by one strict reader.

Since format 2 a file has `format` and a `checksum` over its values, so no flipped bit goes unnoticed; files of format 1
(release 0.1) have neither and are only checked against their schema. A damaged file, or one of a later format, raises.
A file that decides nothing may be read with `view`, which treats a damaged one as missing; `fsdp-pretrain status` still
reports it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fsdp_pretrain.atomic import create_file
from fsdp_pretrain.errors import StorageError, UserError

from .files import replace_file

FORMAT = 2
"""Of the files that this version writes; it reads all earlier formats."""
T = TypeVar("T")


class StateFile(BaseModel):
    """Base of the schemas. Unknown keys are ignored: a later version of the same format may have added them."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


Content = StateFile | Mapping[str, Any]


class DamagedFileError(UserError):
    """A state file is not what was written, or has a format that this version does not know."""


def write(path: Path, content: Content) -> None:
    """Replace a file, atomically and durably. Raises OSError."""
    replace_file(path, seal(content))


def create(path: Path, content: Content) -> None:
    """Create a file that must not exist, whole or not at all. Raises FileExistsError, OSError."""
    create_file(path, seal(content))


def seal(content: Content) -> str:
    """The text of a file with these values (of a record, those that were set), with a new format and checksum."""
    if isinstance(content, BaseModel):
        content = content.model_dump(mode="json", exclude_unset=True)
    values = {**json.loads(json.dumps(content)), "format": FORMAT}
    values.pop("checksum", None)
    return json.dumps({**values, "checksum": _checksum(values)}, indent=1) + "\n"


def read(path: Path, schema: type[T], *, effect: str = "", remedy: str = "") -> T | None:
    """The contents of a file, of any type that pydantic knows; None if there is no file.

    Raises:
        DamagedFileError: it is damaged, or of a later format; `effect` and `remedy` are for the message.
        StorageError: it cannot be read.
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
    """The contents of a file that decides nothing; None if it is missing or damaged, or cannot be read."""
    try:
        return read(path, schema)
    except UserError:
        return None


def parse(raw: bytes, schema: type[T]) -> T:
    """The contents of a file with these bytes. Raises ValueError, with text to follow the name of the file."""
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("is damaged: it is not JSON") from None
    if isinstance(values, dict):
        _check(values)
    try:
        found: T = _adapter(schema).validate_python(values)
        return found
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "its contents"
        raise ValueError(f"is damaged: {place}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def is_sealed(path: Path) -> bool:
    """Whether a file has a checksum, which release 0.1 did not write. Raises OSError."""
    return b'"checksum"' in path.read_bytes()


def _check(values: dict[str, Any]) -> None:
    """Check and remove format and checksum. No single flipped bit makes format 1 of 2, or removes both keys."""
    format_ = values.get("format", 1)
    if type(format_) is not int or format_ < 1:
        raise ValueError(f"is damaged: its format is {format_!r}")
    if format_ > FORMAT:
        raise ValueError(f"is of a later version: its format is {format_}, this program reads up to {FORMAT}")
    stored = values.pop("checksum", None)
    if (stored is not None or format_ >= FORMAT) and stored != _checksum(values):
        raise ValueError("is damaged: its values are not the ones that were written (checksum)")
    values.pop("format", None)


def _checksum(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)
