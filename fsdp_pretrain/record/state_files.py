"""The small files that say how a run stands: written whole, with a checksum, and read through one strict reader.

Every such file is a JSON object with a schema. Since format 2 it holds `format` and a `checksum` over its values, so no
flipped bit in it goes unnoticed; files of format 1, of release 0.1, have none and are checked against their schema
alone. A file is there, absent, damaged, or of a format that only a later version knows; the last two raise. A file that
decides nothing may be read with `view`, to which a damaged one is absent: `fsdp-pretrain status` names it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from ..atomic import create_file
from ..errors import StorageError, UserError
from .files import replace_file

FORMAT = 2
"""Of the files that this version writes; it reads all earlier ones."""
T = TypeVar("T")


class StateFile(BaseModel):
    """Base of the schemas. A later version of the same format may have added values: they are passed over."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class DamagedFileError(UserError):
    """A small file is not what was written, or is of a format that this version does not know."""


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file, atomically and durably. Raises OSError."""
    replace_file(path, seal(content))


def create(path: Path, content: Mapping[str, Any]) -> None:
    """Make a file that must not exist, whole or not at all. Raises FileExistsError, OSError."""
    create_file(path, seal(content))


def seal(content: Mapping[str, Any]) -> str:
    """The text of a file with these values; a format and checksum that it had are replaced."""
    values = {**json.loads(json.dumps(content)), "format": FORMAT}
    values.pop("checksum", None)
    return json.dumps({**values, "checksum": _checksum(values)}, indent=1) + "\n"


def read(path: Path, schema: type[T], *, effect: str = "", remedy: str = "") -> T | None:
    """The contents of a file; None if there is none.

    Args:
        path: the file.
        schema: what it must hold: a `StateFile`, or any other type that pydantic knows.
        effect, remedy: of its damage, for the message.

    Raises:
        DamagedFileError: it is damaged, or of a later format.
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
    """The contents of a file that decides nothing; None if there is none, or it is damaged, or cannot be read."""
    try:
        return read(path, schema)
    except UserError:
        return None


def parse(raw: bytes, schema: type[T]) -> T:
    """The contents of a file with these bytes. Raises ValueError, its text to follow the name of the file."""
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
    """Whether a file has a checksum: those of release 0.1 have none. Raises OSError."""
    return b'"checksum"' in path.read_bytes()


def _check(values: dict[str, Any]) -> None:
    """Check and take out format and checksum. No single flipped bit makes format 1 of 2, or takes away both keys."""
    format_ = values.get("format", 1)
    if type(format_) is not int or format_ < 1:
        raise ValueError(f"is damaged: its format is {format_!r}")
    if format_ > FORMAT:
        raise ValueError(f"is of a later version: its format is {format_}, this program reads up to {FORMAT}")
    told = values.pop("checksum", None)
    if (told is not None or format_ >= FORMAT) and told != _checksum(values):
        raise ValueError("is damaged: its values are not the ones that were written (checksum)")
    values.pop("format", None)


def _checksum(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)
