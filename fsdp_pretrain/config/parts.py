"""Which sections of a configuration belong to parts of extensions, and how these are checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from fsdp_pretrain import extensions
from fsdp_pretrain.errors import ConfigError

from .sections import CodeSection

_PLACES: dict[extensions.Kind, tuple[str, ...]] = {
    "families": ("model",),
    "objectives": ("data", "objective"),
    "optimizers": ("optimizer",),
    "observers": ("observers",),
}
"""The tables where parts are named."""


def packages(raw: dict[str, Any]) -> list[str]:
    """`code.packages` of the values of a file; none if the section is not valid."""
    try:
        return CodeSection.model_validate(raw.get("code", {})).packages
    except ValidationError:
        return []


def load(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Make the parts of `code.packages` known.

    Yields errors in pydantic's form: of a package that cannot be imported, or else of parts that no package has.
    """
    failed = dict[str, str]()
    for package in packages(raw):
        try:
            extensions.load([package])
        except ConfigError as error:
            failed[package] = error.cause
            yield {"type": "value_error", "loc": ("code", "packages"), "msg": error.cause, "input": package}
    for kind, path in _PLACES.items():
        tables: Any = raw
        for key in path:
            tables = tables.get(key) if isinstance(tables, dict) else None
        for index, table in enumerate(tables if isinstance(tables, list) else [tables]):
            name = table.get(extensions.CHOOSES[kind]) if isinstance(table, dict) else None
            if isinstance(name, str) and (":" in name or kind == "observers") and name not in extensions.parts(kind):
                place = (*path, *([index] if isinstance(tables, list) else []), extensions.CHOOSES[kind])
                message = _advice(kind, name, packages(raw), failed)
                yield {"type": "value_error", "loc": place, "msg": message, "input": name}


def _advice(kind: extensions.Kind, name: str, listed: list[str], failed: Mapping[str, str]) -> str:
    """Why a part is unknown, and what to do."""
    package, known = name.partition(":")[0], extensions.parts(kind)
    if package in failed:
        return f"the package {package} cannot be imported"
    if package not in listed:
        return f'its package is not trusted yet; add code.packages = ["{package}"]'
    return f"{package} has no such part; the packages have {', '.join(known) or f'no {kind}'}"


def checker(key: str, value: Any) -> TypeAdapter[Any] | None:
    """Checks the value of a top-level key by the settings of the parts that it names; None if it names none."""
    kind = next((kind for kind, path in _PLACES.items() if path == (key,)), None)
    if kind == "observers" and (known := [part.settings for part in extensions.parts(kind).values()]):
        entry: Any = Annotated[reduce(or_, known), Field(discriminator="use")] if known[1:] else known[0]
        return TypeAdapter(list[entry])
    name = value.get(extensions.CHOOSES[kind]) if kind and isinstance(value, dict) else None
    part = extensions.parts(kind).get(str(name)) if kind else None
    return None if part is None else TypeAdapter(part.settings)


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """The sections of all known parts, by the prefix of their keys."""
    for kind, path in _PLACES.items():
        for part in extensions.parts(kind).values():
            yield ".".join(path) + ".", part.settings
