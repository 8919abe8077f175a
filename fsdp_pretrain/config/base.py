"""The base of all configuration sections."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator

from fsdp_pretrain.remote import Location, Url, is_url
from fsdp_pretrain.units import Progress


class Section(BaseModel):
    """Base of the sections. Unknown keys are errors, values are not coerced, numbers are finite, objects immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _some(length: Progress) -> Progress:
    if length.value < 1:
        raise ValueError(f"{length} is no length")
    return length


Positive = Annotated[int, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
NotNegative = Annotated[float, Field(strict=False, ge=0)]
AboveZero = Annotated[float, Field(strict=False, gt=0)]
Share = Annotated[float, Field(strict=False, ge=0, le=1)]
Beta = Annotated[float, Field(strict=False, ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], Field(strict=False)]
Length = Annotated[Progress, AfterValidator(_some)]
"""An amount of training above zero."""


def _absolute(path: Path) -> Path:
    return Path(os.path.normpath(Path.cwd() / path.expanduser()))  # symbolic links stay as written


def _not_empty(value: object) -> object:
    if value == "":
        raise ValueError("an empty path; is a variable of the command line not set?")
    return value


FilePath = Annotated[Path, Field(strict=False), BeforeValidator(_not_empty), AfterValidator(_absolute)]


def _location(value: object) -> Location:
    if isinstance(value, str) and is_url(value):
        return Url(value)
    if not isinstance(value, str | Path):
        raise ValueError(f"{value!r} is neither a path nor a URL")
    _not_empty(value)
    return _absolute(Path(value))


PathOrUrl = Annotated[Location, PlainValidator(_location), PlainSerializer(str)]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


NamedT = TypeVar("NamedT", bound=_Named)


def unique_names(sources: list[NamedT]) -> list[NamedT]:
    """The sources as they are. Raises ValueError if two of them have the same name."""
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise ValueError(f"source names must differ, got {names}")
    return sources
