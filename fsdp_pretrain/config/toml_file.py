"""Reading TOML files with includes and `key=value` overrides, and describing problems with their origin.

Independent of the schema; `config.load` combines both.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.remote import CREDENTIALS

_MISSING = object()
_SECRETIVE = "watchdog.notify."
"""Prefix of keys whose values are never shown: someone may have put a secret there by mistake."""


def read_toml(path: Path, origin: dict[str, str], chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A TOML file with its includes merged under it. Raises ConfigError.

    `origin` is filled with the file that each dotted key came from; `chain` are the files that include this one.
    """
    if path.resolve() in chain:
        raise ConfigError(f"{path} includes itself", remedy="remove it from `include`")
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        includer = f", included by {chain[-1]}" if chain else ""
        remedy = "" if chain else "name a TOML file; `fsdp-pretrain init DIR` writes some to begin with"
        raise ConfigError(f"cannot read the configuration {path}{includer}: {error.strerror}", remedy=remedy) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    merged: dict[str, Any] = {}
    includes = own.pop("include", [])
    if not isinstance(includes, list) or not all(isinstance(item, str) for item in includes):
        raise ConfigError(f"{path}: `include` must be a list of file names")
    for item in includes:
        _merge(merged, read_toml(path.parent / item, origin, (*chain, path.resolve())))
    _merge(merged, own)
    for key in _leaves(own):
        origin[key] = str(path)
    return merged


def override(raw: dict[str, Any], text: str, origin: dict[str, str]) -> str | None:
    """Apply one `section.key=value` override to the raw values. Returns the problem, if there is one.

    An entry of a list goes by its number, from 0, or by its `name`: `data.sources.wiki.weight=2`.
    """
    key, equals, literal = text.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", key):
        return f"override {text!r} is not of the form section.key=value"
    try:
        value = tomllib.loads(f"value = {literal}")["value"]
    except tomllib.TOMLDecodeError:
        value = literal
    *parents, last = key.split(".")
    node: Any = raw
    place: list[str] = []  # the key, with numbers for names
    for depth, part in enumerate(parents):
        child = _child(node, part)
        if child is _MISSING:
            if not isinstance(node, dict):
                return f"override {text!r}: there is no {'.'.join(parents[: depth + 1])}"
            child = node[part] = {}
        place.append(str(index(node, part)) if isinstance(node, list) else part)
        node = child
    if isinstance(node, list):
        number = index(node, last)
        if number is None:
            return f"override {text!r}: {'.'.join(parents)} has {len(node)} entries"
        node[number] = value
        place.append(str(number))
    elif isinstance(node, dict):
        node[last] = value
        place.append(last)
    else:
        return f"override {text!r}: {'.'.join(parents)} is a value, not a section"
    resolved = ".".join(place)
    for replaced in [name for name in origin if name.startswith(f"{resolved}.")]:
        del origin[replaced]
    origin[resolved] = f"override of {key}" if key.startswith(_SECRETIVE) else f"override {text!r}"
    return None


def inline(value: Any) -> str:
    """A value as inline TOML, as an override takes it; a key without a value is left out."""
    if isinstance(value, dict):
        items = (f"{json.dumps(key)} = {inline(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    # In TOML, surrogate pairs are no characters, and DEL must be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def index(items: list[Any], part: str) -> int | None:
    """The place of a list's entry that a part of a dotted key means, by its number or its `name`, or None."""
    if part.isdigit():
        return int(part) if int(part) < len(items) else None
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    return names.index(part) if part in names else None


def describe_all(errors: Sequence[Any], path: Path, origin: dict[str, str], keys: Iterable[str]) -> list[str]:
    """Pydantic's errors as texts, without the required key that a misspelt one stands for."""
    keys, names = list(keys), [".".join(map(str, error["loc"])) for error in errors]
    unknown = [name for name, error in zip(names, errors, strict=True) if error["type"] == "extra_forbidden"]
    meant = {nearest(name, keys) for name in unknown}
    told = (error for name, error in zip(names, errors, strict=True) if error["type"] != "missing" or name not in meant)
    return [describe(error, path, origin, keys) for error in told]


def describe(error: Any, path: Path, origin: dict[str, str], keys: Iterable[str]) -> str:
    """One of pydantic's errors as text: `key = value (file or override): problem; suggestion`."""
    key = ".".join(str(part) for part in error["loc"])
    source = _source(key, origin) or str(path)
    kind, message = error["type"], str(error.get("msg", "")).removeprefix("Value error, ")
    if kind == "missing":
        return f"{key}: this key is required" if "." in key else f"[{key}]: this section is missing"
    if kind == "extra_forbidden":
        hint = nearest(key, keys)
        return f"{key} ({source}): unknown key" + (f"; did you mean {hint!r}?" if hint else "")
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        tag, allowed = error["ctx"]["discriminator"].strip("'"), error["ctx"].get("expected_tags")
        return f"{key}.{tag} ({source}): must be one of {allowed}" if allowed else f"{key}.{tag}: this key is required"
    value = error.get("input")
    hidden = isinstance(value, dict | list) or key.startswith(_SECRETIVE) or message.startswith(CREDENTIALS)
    shown = "" if hidden else f" = {value!r}"
    return f"{key}{shown} ({source}): {message[:1].lower()}{message[1:]}"


def _source(key: str, origin: dict[str, str]) -> str | None:
    """Where the value of a key came from: it or the nearest table around it; else the first value in it."""
    around = [name for name in origin if f"{key}.".startswith(f"{name}.")]
    inside = (name for name in origin if name.startswith(f"{key}."))
    name = max(around, key=len) if around else next(inside, None)
    return None if name is None else origin[name]


def nearest(key: str, keys: Iterable[str]) -> str | None:
    """The valid key the user most likely meant: close in spelling, or the same name in another section."""
    plain = re.sub(r"\.\d+(?=\.)", "", key)
    keys = list(keys)
    last = plain.rpartition(".")[2]
    same_name = [name for name in keys if name.rpartition(".")[2] == last]
    if same_name:
        return same_name[0]
    close = difflib.get_close_matches(plain, keys, n=1, cutoff=0.75)
    if close:
        return close[0]
    names = difflib.get_close_matches(last, [name.rpartition(".")[2] for name in keys], n=1, cutoff=0.75)
    return next((name for name in keys if names and name.endswith(names[0])), None)


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _leaves(tree: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else key)
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{prefix}.{index}")
    else:
        yield prefix


def _child(node: Any, part: str) -> Any:
    if isinstance(node, list):
        number = index(node, part)
        return _MISSING if number is None else node[number]
    return node.get(part, _MISSING) if isinstance(node, dict) else _MISSING
