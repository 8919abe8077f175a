"""What a resume may change: every configuration key is in one of three classes, which only this module assigns.

- free: changes nothing that is learned (paths, mesh, saving, the record). Listed in the journal.
- declared: changes what is learned from here on. Must be on purpose: the start is refused unless `--allow` names the
  key, or a rollback or fork set it.
- forbidden: would make it another model or other data. `checkpoint.state.identity` compares these, and knows which part
  of the mixture is past.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_pretrain.errors import ConfigError

from .config import Config, load_known, schema_keys
from .timeline import TimelineEntry
from .toml_file import nearest

FREE, DECLARED, FORBIDDEN = "free", "declared", "forbidden"

CLASSES: dict[str, str] = {
    "code": FREE,  # what of it is used is compared
    "observers": FREE,
    "run.name": FREE,
    "run.dir": FREE,
    "run.seed": DECLARED,  # of dropout
    "model": FORBIDDEN,
    "model.declared_params": FREE,
    "data.sequence_length": FORBIDDEN,
    "data.stages": DECLARED,  # those ahead; the past is part of the identity
    "data.seed": FORBIDDEN,
    "data.lanes": FORBIDDEN,
    "data.attention": FORBIDDEN,
    "data.positions": FORBIDDEN,
    "data.loss_across_documents": FORBIDDEN,
    "data.objective": FORBIDDEN,
    "data.sources": DECLARED,  # the mixture ahead; the past is part of the identity
    "data.sources.path": FREE,  # the corpus's fingerprint is part of the identity
    "data.cache": FREE,
    "data.skip": DECLARED,
    "data.reshuffle": DECLARED,
    "data.exclude": DECLARED,
    "data.prefetch": FREE,
    "data.read_timeout": FREE,
    "data.max_quarantined": FREE,  # when to refuse, not what to learn
    "train": DECLARED,
    "train.duration": DECLARED,  # to shorten it; to prolong it is free, see `_duration`
    "train.micro_batch": FREE,
    "optimizer": DECLARED,
    "optimizer.decay": DECLARED,  # with its default, see `_decay`
    "parallel": FREE,
    "checkpoint": FREE,
    "eval": FREE,
    "record": FREE,
    "health": FREE,
    "watchdog": FREE,
    "launch": FREE,
    "timeline": DECLARED,  # entries that are past; an entry ahead is free, see `_timeline`
}
"""Class of a key and of all keys below it that are not listed themselves."""


def class_of(key: str) -> str:
    """The class of a dotted key of the schema (no indices). Raises KeyError."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if kind := CLASSES.get(".".join(parts[:length])):
            return kind
    raise KeyError(f"{key} is in no class of changes")


@dataclass(frozen=True)
class ConfigChange:
    """A value that differs: `key` is of the schema, as `--allow` takes it, `text` is `place: old -> new`."""

    key: str
    text: str
    kind: str
    """Class of this change."""
    advice: str = ""
    """How to avoid it, if that is not obvious."""
    at: int | None = None
    """Samples consumed before it changes anything; None: it does at once."""


def changes(old: Config, new: Config) -> list[ConfigChange]:
    """How two configurations of a run differ in what they mean from here on; forbidden changes included."""
    differing = [*_decay(old, new), *_duration(old, new), *_timeline(old, new)]
    for path, was, is_ in leaves(values_of(old), values_of(new)):
        key = ".".join(path[:2] + path[3:] if path[:2] == ("data", "sources") else path)
        if key not in ("optimizer.decay", "train.duration"):
            differing.append(ConfigChange(key, _line(".".join(path), was, is_), class_of(key)))
    order = list(schema_keys())
    return sorted(differing, key=lambda change: order.index(change.key))


def values_of(config: Config) -> dict[str, Any]:
    """The values of a configuration without its timeline; sources by name, because their order means nothing."""
    tree = config.model_dump(mode="json")
    tree["data"]["sources"] = {source["name"]: source for source in tree["data"]["sources"]}
    del tree["timeline"]  # see `_timeline`
    return tree


def _duration(old: Config, new: Config) -> Iterator[ConfigChange]:
    """The change of the duration: free if it is longer, because the run only continues after its former end."""
    was, is_ = old.train.duration, new.train.duration
    if was != is_:
        longer = new.schedule.samples(is_) >= old.schedule.samples(was)
        yield ConfigChange("train.duration", f"train.duration: {was} -> {is_}", FREE if longer else DECLARED)


def _decay(old: Config, new: Config) -> Iterator[ConfigChange]:
    """The change of the learning rate's end: by default that of the run, so that another duration changes the curve."""
    was, is_ = (config.optimizer.decay or config.train.duration for config in (old, new))
    if was == is_ or not new.schedule.decays or old.schedule.decay == new.schedule.decay:
        return
    advice = "" if new.optimizer.decay else f'optimizer.decay="{was}" keeps the curve of the learning rate as it was'
    end = "" if new.optimizer.decay else ", the end of the run"
    both = old.optimizer.curve == new.optimizer.curve == "wsd"  # then nothing changes before the decay
    at = min(old.schedule.decay_start, new.schedule.decay_start) if both else None
    yield ConfigChange("optimizer.decay", f"optimizer.decay: {was} -> {is_}{end}", DECLARED, advice, at)


def _timeline(old: Config, new: Config) -> Iterator[ConfigChange]:
    """Entries that were removed, perhaps by an old file, and new ones, which change nothing before their place."""
    for entry in old.timeline:
        if entry not in new.timeline:
            yield ConfigChange("timeline", f"timeline: {entry} -> absent", _class_of_entry(entry))
    for placed in new.schedule.timeline:
        if placed.entry not in old.timeline:
            yield ConfigChange(
                "timeline", f"timeline: absent -> {placed.entry}", _class_of_entry(placed.entry), at=placed.at
            )


def _class_of_entry(entry: TimelineEntry) -> str:
    return FREE if all(class_of(key) == FREE for key, _ in entry.changes()) else DECLARED


def leaves(old: Any, new: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """(path, old, new) of every leaf in which two trees of dictionaries differ; None where a tree lacks it."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from leaves(old.get(key), new.get(key), (*path, str(key)))
    elif old != new:
        yield path, old, new


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """`key: old -> new` for every leaf in which two trees differ."""
    start = (prefix,) if prefix else ()
    return [_line(".".join(path), was, is_) for path, was, is_ in leaves(old, new, start)]


def _line(place: str, old: Any, new: Any) -> str:
    return f"{place}: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ------------------------------------------------------------------------ what a start recorded


def load_recorded(path: Path, *, own: bool = True) -> Config:
    """Load a configuration that a start recorded, without free keys that this version no longer has.

    `own`: whether the packages that it names are trusted, as those of a run are. A checkpoint may come from others.

    Raises ConfigError, also for other unknown keys, since they may matter.
    """
    config, unknown = load_known(path, own=own)
    wrong = [f"{key}: {_short(value)}" for key, value in unknown.items() if _class_of_unknown(key) != FREE]
    if wrong:
        raise ConfigError(
            f"{path} has keys that this version does not know:\n    " + "\n    ".join(wrong),
            effect="what they meant for the model, the data or the training would be left out",
            remedy="use the version that wrote them: environment.json of the segment, or manifest.json of the "
            "checkpoint, says which",
        )
    return config


def _class_of_unknown(key: str) -> str:
    try:
        return class_of(".".join(part for part in key.split(".") if not part.isdigit()))
    except KeyError:
        return DECLARED


# ------------------------------------------------------------------------ what is allowed


def read_allowed(names: Iterable[str]) -> frozenset[str]:
    """Check that the names given with `--allow` are keys that may be declared, or their tables. Raises ConfigError."""
    keys, problems = schema_keys(), []
    names = frozenset(names)
    for name in sorted(names):
        if name not in keys:
            hint = nearest(name, keys)
            problems.append(f"{name}: there is no such key" + (f"; did you mean {hint!r}?" if hint else ""))
            continue
        kinds = {kind for key, kind in CLASSES.items() if _covers(name, key)} or {class_of(name)}
        if FORBIDDEN in kinds and DECLARED not in kinds:
            problems.append(f"{name}: no resume may change this")
    if problems:
        raise ConfigError("--allow names what cannot be allowed:\n    " + "\n    ".join(problems))
    return names


def _covers(name: str, key: str) -> bool:
    return f"{key}.".startswith(f"{name}.")


def undeclared(
    differing: Iterable[ConfigChange], allowed: Collection[str], consumed: int | None = None
) -> list[ConfigChange]:
    """The changes that must be declared and are not `allowed`, without those that are ahead at `consumed` samples."""
    declared = [change for change in differing if change.kind == DECLARED]
    if consumed is not None:
        declared = [change for change in declared if change.at is None or change.at < consumed]
    return [change for change in declared if not any(_covers(name, change.key) for name in allowed)]


def refuse(where: str, forbidden: Sequence[str], declared: Sequence[ConfigChange], cursor: int) -> None:
    """Raise ConfigError, with every change in one report, if there are any.

    Args:
        where, cursor: the checkpoint, and the samples read at it.
        forbidden: texts of forbidden changes.
        declared: changes from `undeclared`.
    """
    parts, remedies = [], []
    if forbidden:
        parts.append(f"{where} was trained with another model or other data:\n    " + "\n    ".join(forbidden))
        if any(text.startswith("data.sources") for text in forbidden):
            remedies.append(f'the mixture may change from a place that is still ahead: start = "{cursor} samples"')
        if any("computes something else" in text for text in forbidden):
            remedies.append("install the version of the package that trained it")
        remedies.append(
            "restore these settings or corpora, or train a new run from the weights alone: "
            f"fsdp-pretrain checkpoints NEW_RUN import {where} --config CONFIG run.dir=NEW_RUN"
        )
    if declared:
        lines = "\n    ".join(change.text for change in declared)
        parts.append(f"these changes affect what is learned from here on, and need --allow:\n    {lines}")
        keys = dict.fromkeys(change.key for change in declared)
        remedies += [change.advice for change in declared if change.advice]
        remedies.append("if it is meant, add:  " + " ".join(f"--allow {key}" for key in keys))
    if parts:
        raise ConfigError(
            "\n".join(parts),
            effect="one run would mix two different trainings" if forbidden else "nothing was done",
            remedy="\n          ".join(remedies),
        )
