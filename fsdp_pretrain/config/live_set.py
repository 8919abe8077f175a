"""A change of a live run as one more `[[timeline]]` entry: read from `key=value`, checked, previewed to the bit.

The command and rank 0 use the same functions, so the preview shows what will be applied. People give and see steps. The
stored entry has its place and its lengths in samples, since step numbers change when a run resumes with another batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.units import Progress, counted

from .config import Config, sections_in, with_timeline
from .schedule import Schedule
from .timeline import Change, TimelineEntry
from .toml_file import describe, nearest, override

_RATE = ("optimizer.lr", "optimizer.min_lr", "optimizer.lr_scale")


def steerable() -> list[str]:
    """The keys that can be changed on a live run."""
    sections = ((name, sections_in(field.annotation)) for name, field in TimelineEntry.model_fields.items())
    return [f"{name}.{key}" for name, inner in sections if inner for key in inner[0].model_fields]


def ramped(change: str, over: str) -> str:
    """A `key=value` change as a ramp of the length `over`; the change itself if `over` is empty."""
    key, _, value = change.partition("=")
    return f'{key}={{to={value.strip()}, over="{over}"}}' if over else change


def read_entry(changes: Sequence[str], schedule: Schedule, *, at: int, reason: str = "") -> TimelineEntry:
    """The stored timeline entry of `key=value` changes that count for the steps after `at` samples.

    Args:
        changes: as on the command line.
        schedule: the run's schedule before the changes.
        reason: why, for the journal.

    Raises:
        ConfigError: it lists every problem.
    """
    raw: dict[str, Any] = {"at": str(Progress(at, "sample")), "reason": reason}
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
            return _in_samples(TimelineEntry.model_validate(raw), schedule)
        except ValidationError as error:
            items = error.errors(include_url=False)
            problems = [describe(item, Path("the request"), origin, known) for item in items]
    lines = "\n".join(f"  - {problem}" for problem in problems)
    raise ConfigError(
        f"{counted(len(problems), 'problem')} in what is to be set\n{lines}",
        effect="nothing was changed",
        remedy=f"what a live run can be set: {', '.join(known)}",
    )


def _in_samples(entry: TimelineEntry, schedule: Schedule) -> TimelineEntry:
    """An entry with its lengths in samples; its place is in samples already."""
    at, raw = entry.at.value, entry.model_dump(mode="json")
    for key, change in entry.changes():
        if isinstance(change, Change) and (over := change.over) is not None:
            end = schedule.batch.ahead(at, over.value) if over.unit == "step" else schedule.behind(at, over)
            section, _, name = key.partition(".")
            raw[section][name]["over"] = str(Progress(end - at, "sample"))
    return TimelineEntry.model_validate(raw)


def steer(config: Config, entry: TimelineEntry) -> Config:
    """The configuration with one more stored entry. Raises ConfigError, which lists every problem."""
    end = config.schedule.end
    if entry.at.value >= end:
        raise ConfigError(f"the run ends after {end:_} samples: there is no step after {entry.at.value:_}")
    return with_timeline(config, [*config.timeline, entry], Path("the run's configuration with this change"))


@dataclass(frozen=True)
class ShownValue:
    """A value in one step, without and with a change, as text that has every bit."""

    step: int
    key: str
    before: str
    after: str


def preview(before: Config, after: Config, entry: TimelineEntry, *, step: int, consumed: int) -> list[ShownValue]:
    """The values that an entry changes, in the steps around its place and around the ends of its ramps.

    Args:
        before, after: configurations without and with the entry.
        step, consumed: where the run is, at the entry's place or before it.
    """
    batch = before.schedule.batch
    last = before.schedule.last_step(step, consumed)
    ramp_ends = set(after.schedule.marks) - set(before.schedule.marks)
    marks = {entry.at.value, *ramp_ends}
    around = {step + batch.steps_between(consumed, mark) + more for mark in marks for more in (-1, 0, 1)}
    places = {shown: batch.ahead(consumed, shown - step) for shown in sorted(around) if max(1, step) <= shown <= last}
    values = {shown: [values_of(entry, config, place) for config in (before, after)] for shown, place in places.items()}
    return [
        ShownValue(shown, key, str(was[key]), str(is_[key]))
        for key in values_of(entry, before, consumed)
        for shown, (was, is_) in values.items()
    ]


def values_of(entry: TimelineEntry, config: Config, consumed: int) -> dict[str, Any]:
    """The values of a configuration that an entry changes, in the step that ends at `consumed`.

    If the entry changes the learning rate in any way, `optimizer.lr` is the rate that the optimiser gets.
    """
    keys, steered = [key for key, _ in entry.changes()], config.schedule.values_at(consumed)
    shown: dict[str, Any] = {"optimizer.lr": steered.lr} if {*keys} & {*_RATE} else {}
    for key in keys:
        if key == "checkpoint.every":
            shown[key] = str(config.schedule.save_every(consumed))
        elif key not in ("optimizer.lr", "optimizer.min_lr"):
            shown[key] = getattr(steered, key.partition(".")[2])
    return shown
