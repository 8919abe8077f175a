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
from operator import attrgetter
from pathlib import Path
from typing import Any

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.units import Progress

from .config import Config, load_known, schema_keys
from .schedule import Placed
from .timeline import Change, TimelineEntry
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
    until: int | None = None
    """Samples consumed after which it changes nothing; None: it always does."""


def changes(old: Config, new: Config) -> list[ConfigChange]:
    """How two configurations of a run differ in what they mean from here on; forbidden changes included.

    Amounts of training are compared in samples: what is written in steps moves with the batch, though its text stays.
    """
    order, parts = list(schema_keys()), (_warmup, _decay, _decay_length, _duration, _timeline)
    differing = [change for part in parts for change in part(old, new)]
    for path, was, is_ in leaves(_tree(old), _tree(new)):
        key = ".".join(path[:2] + path[3:] if path[:2] == ("data", "sources") else path)
        while key not in order:  # below a key whose table is free, such as `eval.gen_kwargs`
            key = key.rpartition(".")[0]
        if key not in ("optimizer.warmup", "optimizer.decay", "optimizer.decay_length", "train.duration"):
            differing.append(ConfigChange(key, _line(".".join(path), was, is_), class_of(key)))
    return sorted(differing, key=lambda change: order.index(change.key))


def _tree(config: Config) -> dict[str, Any]:
    """The values of a configuration without its timeline; sources by name, because their order means nothing."""
    tree = config.model_dump(mode="json")
    tree["data"]["sources"] = {source["name"]: source for source in tree["data"]["sources"]}
    del tree["timeline"]  # see `_timeline`
    return tree


def _duration(old: Config, new: Config) -> Iterator[ConfigChange]:
    """The change of the duration: free if it is longer, because the run only continues after its former end."""
    was, is_, before, after = old.train.duration, new.train.duration, old.schedule.end, new.schedule.end
    if was != is_ or before != after:
        text = _amount("train.duration", was, is_, before, after)
        yield ConfigChange("train.duration", text, FREE if after >= before else DECLARED)


def _warmup(old: Config, new: Config) -> Iterator[ConfigChange]:
    """The change of the warm-up. All curves but two begin to decay at its end."""
    was, is_, before, after = old.optimizer.warmup, new.optimizer.warmup, old.schedule.warmup, new.schedule.warmup
    if before == after:
        return
    flat = old.optimizer.curve == new.optimizer.curve and new.optimizer.curve in ("constant", "wsd")
    until = max(before, after) if flat else max(old.schedule.decay, new.schedule.decay)
    advice = f'optimizer.warmup="{Progress(before, "sample")}" keeps it as it was' if was == is_ else ""
    text = _amount("optimizer.warmup", was, is_, before, after)
    yield ConfigChange("optimizer.warmup", text, DECLARED, advice, until=until)


def _decay(old: Config, new: Config) -> Iterator[ConfigChange]:
    """The change of the learning rate's end: by default that of the run, so that another duration changes the curve."""
    was, is_ = (config.optimizer.decay or config.train.duration for config in (old, new))
    before, after = old.schedule.decay, new.schedule.decay
    if not new.schedule.decays or before == after:
        return
    kept, given = was if new.schedule.samples(was) == before else Progress(before, "sample"), new.optimizer.decay
    keeps = f'optimizer.decay="{kept}" keeps the curve of the learning rate as it was'
    text = _amount("optimizer.decay", was, is_, before, after) + ("" if given else ", the end of the run")
    both = old.optimizer.curve == new.optimizer.curve == "wsd"  # then nothing changes before the decay
    at = min(old.schedule.decay_start, new.schedule.decay_start) if both else None
    advice = "" if given and was != is_ else keeps
    yield ConfigChange("optimizer.decay", text, DECLARED, advice, at, max(before, after))


def _decay_length(old: Config, new: Config) -> Iterator[ConfigChange]:
    """The change of the length of a `wsd` decay."""
    was, is_ = old.optimizer.decay_length, new.optimizer.decay_length
    before, after = (config.schedule.decay - config.schedule.decay_start for config in (old, new))
    if (was is None) != (is_ is None) or (was is not None and before != after):
        advice = f'optimizer.decay_length="{Progress(before, "sample")}" keeps it as it was' if was == is_ else ""
        until = max(old.schedule.decay, new.schedule.decay) if was and is_ else None
        text = _amount("optimizer.decay_length", was, is_, before, after)
        yield ConfigChange("optimizer.decay_length", text, DECLARED, advice, until=until)


def _amount(key: str, was: Progress | None, is_: Progress | None, before: int, after: int) -> str:
    """A changed amount as text; in samples where the same text means another number of them."""
    if was == is_:
        return f"{key}: {was}: {before:_} -> {after:_} samples"
    return f"{key}: {was or 'absent'} -> {is_ or 'absent'}"


def _timeline(old: Config, new: Config) -> Iterator[ConfigChange]:
    """Entries that were removed, perhaps by an old file, new ones, which change nothing before their place, and those
    that are elsewhere now, since they are counted in steps."""
    were, are = old.schedule.timeline, new.schedule.timeline
    meant = [[_meaning(placed) for placed in timeline] for timeline in (were, are)]
    for index, was in enumerate(were):
        kind = _class_of_entry(was.entry)
        moved = next((placed for placed in are if placed.entry == was.entry), None)
        if _meaning(was) in meant[1]:
            continue
        if moved is None:
            yield ConfigChange("timeline", f"timeline: {was.entry} -> absent", kind)
            continue
        places = (":".join(f"{place:_}" for place in (placed.at, *placed.ends)) for placed in (was, moved))
        text = f"timeline: {was.entry}: {' -> '.join(places)} samples"
        yield ConfigChange("timeline", text, kind, at=min(was.at, moved.at), until=_settled(were, are, index))
    for placed in are:
        if _meaning(placed) not in meant[0] and placed.entry not in old.timeline:
            text = f"timeline: absent -> {placed.entry}"
            yield ConfigChange("timeline", text, _class_of_entry(placed.entry), at=placed.at)


def _meaning(placed: Placed) -> tuple[Any, ...]:
    """What an entry does, in whatever units it is written."""
    values = [
        (key, value.model_copy(update={"over": value.over is not None}) if isinstance(value, Change) else value)
        for key, value in placed.entry.changes()
    ]
    return placed.at, placed.ends, placed.entry.reason, values


def _settled(were: Sequence[Placed], are: Sequence[Placed], index: int) -> int | None:
    """Samples after which it makes no difference that an entry of both timelines has moved: its ramps have ended, and
    those that began before them. None if the order of the entries is another one."""
    if [placed.entry for placed in were] != [placed.entry for placed in are]:
        return None
    until = 0
    for number, pair in enumerate(zip(were[index:], are[index:], strict=True)):
        if number == 0 or min(placed.at for placed in pair) < until:
            until = max(until, *(place for placed in pair for place in (placed.at, *placed.ends)))
    return until


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
    """The changes that must be declared and are not `allowed`, without those that are ahead at `consumed` samples, or
    past and without effect."""
    declared = [change for change in differing if change.kind == DECLARED]
    if consumed is not None:
        declared = [change for change in declared if change.at is None or change.at < consumed]
        declared = [change for change in declared if change.until is None or consumed < change.until]
    return [change for change in declared if not any(_covers(name, change.key) for name in allowed)]


def refuse_replaced(keys: Collection[str], config: Config, consumed: int, how: str = "") -> None:
    """Raise ConfigError if the timeline has replaced the new value of one of these keys before `consumed` samples: the
    change would have no effect. `how`: how it was asked for, such as `--set `."""
    past = [placed.entry for placed in config.schedule.timeline if placed.at <= consumed]
    replaced = {key: (value, entry) for entry in past for key, value in entry.changes() if key in keys}
    for key, (value, entry) in replaced.items():
        if attrgetter(key)(config) != (value.to if isinstance(value, Change) else value):
            raise ConfigError(
                f"{how}{key} would change nothing: the timeline has replaced its value before this checkpoint "
                f"({entry})",
                remedy=f"continue without it, and `fsdp-pretrain control RUN set {key}=VALUE` while the run trains",
            )


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
            "restore these settings or corpora, or train a new run from the weights alone: `fsdp-pretrain checkpoints "
            "RUN export STEP FOLDER --dtype fp32`, then `... NEW_RUN import FOLDER --config CONFIG run.dir=NEW_RUN`"
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
