"""A change of a live run as one more `[[timeline]]` entry: read from `key=value`, checked, previewed to the bit.

The command and rank 0 use the same functions, so what is previewed is what is applied. People say and see steps; what
lasts has its place and its lengths in samples, since a run that is resumed with another batch has other steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.units import Progress

from .config import Config, sections_in, with_timeline
from .schedule import Schedule
from .timeline import Change, TimelineEntry
from .toml_file import describe, nearest, override

_INTERVALS = ("checkpoint.every", "eval.every", "eval.loss_every")
_OF_RATE = ("optimizer.min_lr", "rewarm", "continuous")
"""Keys whose effect is seen in the learning rate alone."""


def steerable() -> list[str]:
    """The keys that can be changed on a live run."""
    sections = ((name, sections_in(field.annotation)) for name, field in TimelineEntry.model_fields.items())
    keys = [f"{name}.{key}" for name, found in sections if found for key in found[0].model_fields]
    return [*keys, "rewarm", "continuous"]


def ramped(change: str, over: str) -> str:
    """A `key=value` change as a ramp of this length; itself without a length."""
    key, _, value = change.partition("=")
    return f'{key}={{to={value.strip()}, over="{over}"}}' if over else change


def read_entry(changes: Sequence[str], *, at: int, reason: str = "") -> TimelineEntry:
    """The timeline entry of `key=value` changes that count for the steps after `at` samples.

    Args:
        changes: as on the command line.
        reason: for the chronicle.

    Raises:
        ConfigError: it lists every problem.
    """
    raw: dict[str, Any] = {"at": str(Progress(at, "sample")), "reason": reason, "allow_jump": True}
    keys, known, origin = [text.partition("=")[0].strip() for text in changes], steerable(), dict[str, str]()
    problems = [] if changes else ["nothing to change: give KEY=VALUE"]
    for number, (key, text) in enumerate(zip(keys, changes, strict=True)):
        if key in keys[:number]:
            problems.append(f"{key} is given twice")
        elif key in known or "=" not in text:
            problem = override(raw, text, origin)
            problems += [problem] if problem else []
        else:
            hint = nearest(key, known)
            problems.append(f"{key} cannot be changed on a live run" + (f"; did you mean {hint!r}?" if hint else ""))
    if not problems:
        try:
            return TimelineEntry.model_validate(raw)
        except ValidationError as error:
            found = error.errors(include_url=False)
            problems = [describe(item, Path("the request"), origin, known) for item in found]
    lines = "\n".join(f"  - {problem}" for problem in problems)
    raise ConfigError(
        f"{len(problems)} problem{'s' * (len(problems) > 1)} in what is to be set\n{lines}",
        effect="nothing was changed",
        remedy=f"what a live run can be set: {', '.join(known)}",
    )


def lasting(entry: TimelineEntry, schedule: Schedule) -> TimelineEntry:
    """An entry of `read_entry` with its lengths in samples too."""
    at, raw = entry.at.value, plain(entry)

    def samples(length: Progress) -> str:
        end = schedule.batch.ahead(at, length.value) if length.unit == "step" else schedule.behind(at, length)
        return str(Progress(end - at, "sample"))

    for key, change in entry.changes():
        section, _, name = key.partition(".")
        if isinstance(change, Change) and change.over is not None:
            raw[section][name]["over"] = samples(change.over)
    if entry.rewarm is not None:
        raw["rewarm"] = samples(entry.rewarm)
    return TimelineEntry.model_validate(raw)


def steer(config: Config, entry: TimelineEntry) -> Config:
    """The configuration with one more lasting entry. Raises ConfigError, which lists every problem."""
    total = config.schedule.total
    if entry.at.value >= total:
        raise ConfigError(f"the run ends after {total:_} samples: there is no step after {entry.at.value:_}")
    return with_timeline(config, [*config.timeline, entry], Path("the run's configuration with this change"))


@dataclass(frozen=True)
class ShownValue:
    """A value in one step, without and with a change, as text that has every bit."""

    step: int
    key: str
    before: str
    after: str


def preview(before: Config, after: Config, entry: TimelineEntry, *, step: int, consumed: int) -> list[ShownValue]:
    """What an entry changes: around its place, and around the ends of its ramps.

    Args:
        before, after: without and with it.
        step, consumed: where the run is, at the entry's place or before it.
    """
    batch, total = before.schedule.batch, before.schedule.total
    marks = {entry.at.value, *(set(after.schedule.marks) - set(before.schedule.marks))}  # and ends of its ramps
    around = {step + batch.steps_between(consumed, mark) + more for mark in marks for more in (-1, 0, 1)}
    places = {shown: batch.ahead(consumed, shown - step) for shown in sorted(around) if shown >= max(1, step)}
    return [
        ShownValue(shown, key, *(text_of(value_at(config, key, place)) for config in (before, after)))
        for key in shown_keys(entry)
        for shown, place in places.items()
        if place <= total
    ]


def shown_keys(entry: TimelineEntry) -> list[str]:
    """The keys of an entry under which its effect is seen."""
    keys = entry.names()
    rate = ["optimizer.lr"] if {*_OF_RATE, "optimizer.lr", "optimizer.lr_scale"} & {*keys} else []
    return [*rate, *(key for key in keys if key not in (*_OF_RATE, *rate))]


def value_at(config: Config, key: str, consumed: int) -> Any:
    """The value of a steerable key that is in force in the step that ends at `consumed`, as JSON: of `optimizer.lr`,
    what the optimiser gets."""
    schedule = config.schedule
    if key == "eval.loss_every":
        return str(config.heldout_every(consumed))
    if key in _INTERVALS:
        return str(schedule.interval_at(key, consumed))
    return getattr(schedule.values_at(consumed), key.partition(".")[2])


def text_of(value: Any) -> str:
    """A value with every bit: floats as the shortest text that reads back as the same number."""
    return str(value) if isinstance(value, str) else repr(value)


def plain(entry: TimelineEntry) -> dict[str, Any]:
    """An entry as JSON values, as it is in `overrides.toml`."""
    return entry.model_dump(mode="json", exclude_defaults=True)
