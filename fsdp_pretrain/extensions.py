"""Users' own parts of a run: families, optimisers and observers of packages that a configuration names in `[code]`.

A package has an object `extension` (see `Extension`). Its parts are named `PACKAGE:PART` where names of our own may
stand. A package's `__init__` should import no torch: it is imported to read configurations, also by commands that need
none; the code of a part is imported where it is used.

Only packages that a person trusts are imported: those that a configuration of one's own names, and those named with
`--code`. A checkpoint may come from others, so what its configuration names must have been trusted before.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel

from .errors import ConfigError

VARIABLE = "FSDP_PRETRAIN_CODE"
"""Environment variable with the trusted packages, which child processes inherit."""
Kind = Literal["families", "objectives", "optimizers", "observers"]
CHOOSES: dict[Kind, str] = {"families": "family", "objectives": "kind", "optimizers": "kind", "observers": "use"}
"""The key of a part's section that holds its name."""


@dataclass(frozen=True)
class Part:
    """A part of a package.

    Attributes:
        settings: its section in the configuration: of a family, a subclass of `LlamaModel`, `GPTModel` or `GLMModel`,
            with `family: Literal["PACKAGE:PART"]`; of an objective, one of `CausalObjective` with `kind`; of an
            optimiser, one of `OptimizerSection` with `kind`; of an observer, one of `ObserverSection` with `use`.
        code: where its class is, as `"module:name"`: a `Decoder` of these settings; an `OwnObjective`; an `UpdateRule`;
            an `Observer` that is made from (settings, `ObserverContext`).
        layout: of a family, where its `HFLayout` is, or None if it cannot be exported.
    """

    settings: type[BaseModel]
    code: str
    layout: str | None = None

    def load(self) -> Any:
        """The class that `code` names. Raises ConfigError."""
        return import_object(self.code)


@dataclass(frozen=True)
class Extension:
    """The parts of a package, by their names."""

    families: Mapping[str, Part] = field(default_factory=dict)
    objectives: Mapping[str, Part] = field(default_factory=dict)
    optimizers: Mapping[str, Part] = field(default_factory=dict)
    observers: Mapping[str, Part] = field(default_factory=dict)


_loaded: dict[str, Extension] = {}


def trust(packages: Iterable[str]) -> None:
    """Allow this process and its children to import packages that a configuration names."""
    if names := [*trusted(), *packages]:
        os.environ[VARIABLE] = ",".join(dict.fromkeys(names))


def trusted() -> list[str]:
    """The packages that may be imported."""
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]


def load(packages: Iterable[str]) -> None:
    """Import packages, and make their parts known. Raises ConfigError: a package is missing, or is no extension."""
    for package in packages:
        if package not in _loaded:
            extension = import_object(f"{package}:extension")
            _check(package, extension)
            _loaded[package] = extension


def parts(kind: Kind) -> dict[str, Part]:
    """All parts of a kind that are known, by their full names."""
    return {
        f"{package}:{name}": part
        for package, extension in _loaded.items()
        for name, part in getattr(extension, kind).items()
    }


def part(kind: Kind, name: str) -> Part:
    """A part by its full name, of a configuration that was checked."""
    return parts(kind)[name]


def import_object(place: str) -> Any:
    """The object at `module:name`. Raises ConfigError, with the user's exception as its cause."""
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a user's module raises
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        raise ConfigError(
            f"cannot import {place}: {type(error).__name__}: {error}",
            remedy="install the package, or set PYTHONPATH"
            if missing
            else f"mend the module: `python -c 'import {module}'` shows the whole error",
        ) from error


def _check(package: str, extension: Any) -> None:
    """Raise ConfigError unless the object is an extension whose sections have the names of their parts."""
    if not isinstance(extension, Extension):
        raise ConfigError(
            f"{package}.extension is a {type(extension).__name__}, not an `Extension`",
            remedy="`fsdp-pretrain init --extension NAME` writes a package to start from",
        )
    problems = []
    for kind, key in CHOOSES.items():
        parts_of_kind = getattr(extension, kind)
        if not isinstance(parts_of_kind, Mapping):
            problems.append(f"{kind} is a {type(parts_of_kind).__name__}, not a mapping of names to parts")
            continue
        for name, part in parts_of_kind.items():
            if not isinstance(part, Part):
                problems.append(f"{kind} {name!r} is no `Part(settings, code)`")
                continue
            if not (isinstance(part.settings, type) and issubclass(part.settings, BaseModel)):
                problems.append(f"{kind} {name!r}: its settings are no class of pydantic")
                continue
            known = part.settings.model_fields.get(key)
            if known is None or get_args(known.annotation) != (f"{package}:{name}",):
                wanted = f'{key}: Literal["{package}:{name}"]'
                problems.append(f"{kind} {name!r}: {part.settings.__name__} must have the key {wanted}")
    if problems:
        raise ConfigError(f"the extension of {package} is not consistent:\n    " + "\n    ".join(problems))


def refuse_untrusted(packages: Iterable[str], where: Path) -> None:
    """Raise ConfigError if a configuration from others names packages that nobody trusted here."""
    if missing := [name for name in packages if name not in trusted()]:
        options = " ".join(f"--code {name}" for name in missing)
        raise ConfigError(
            f"{where} needs the code of {', '.join(missing)}",
            effect="it was not imported: a checkpoint of others only names code",
            remedy=f"if you trust it: {options}, or in a run's own configuration code.packages = {json.dumps(missing)}",
        )


def source_digest(place: str) -> str:
    """The version of a part's source: its distribution's version, and a hash of the package's `.py` files.

    `place`: as `module:name`.
    """
    top = place.partition(":")[0].partition(".")[0]
    module = importlib.import_module(top)
    digest = _digest_of(tuple(getattr(module, "__path__", [])) or (str(module.__file__),))
    try:
        version = metadata.version(top.replace("_", "-"))
    except metadata.PackageNotFoundError:
        version = "unversioned"
    return f"{version} {digest[:16]}"


@lru_cache
def _digest_of(places: tuple[str, ...]) -> str:
    """Of the `.py` files of folders, or of one file; read once, as Python itself reads them."""
    paths = [Path(place) for place in places]
    files = sorted(file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]))
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()
