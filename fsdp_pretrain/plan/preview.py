"""The schedule as a table, and the entries of the timeline, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.schedule import Schedule
from fsdp_pretrain.data.packing.opening import data_at
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run.step_count import StepCount
from fsdp_pretrain.units import Progress, human_count

_COLUMNS = {"step": "10_", "consumed": "14_", "cursor": "14_", "tokens": "8", "batch": "6_", "lr": "10.3e"}
"""Columns of every table with their formats; the steered values follow them."""


@dataclass(frozen=True)
class TimelineRow:
    """A timeline entry, and the step after which it takes effect."""

    step: int
    samples: int
    tokens: int
    text: str
    reason: str


def rows(config: Config, count: StepCount) -> list[dict[str, Any]]:
    """The preview of the schedule, in the steps that the run has after another batch than it began with."""
    schedule = config.schedule
    steps = {count.step_at(row["consumed"]) for row in schedule.preview()}
    return [_row(schedule, count, step) for step in sorted(steps)]


def _row(schedule: Schedule, count: StepCount, step: int) -> dict[str, Any]:
    consumed = count.consumed_at(step)
    return schedule.row(step, consumed, consumed - count.consumed_at(step - 1))


def entries(config: Config, count: StepCount) -> list[TimelineRow]:
    """The timeline in order."""
    schedule = config.schedule
    return [
        TimelineRow(
            step=count.step_at(placed.at + 1) - 1,
            samples=placed.at,
            tokens=schedule.tokens(placed.at),
            text=placed.entry.keys(),
            reason=placed.entry.reason,
        )
        for placed in schedule.timeline
    ]


def rows_at(config: Config, text: str) -> list[dict[str, Any]]:
    """The schedule at places such as `43_680 steps` or `22_799,22_800 steps`, in that order.

    Raises ConfigError; UserError if the record of the run cannot be read.
    """
    count = StepCount(config)
    parts = [part.strip() for part in text.split(",")]
    unit = parts[-1].lstrip("0123456789_. ")
    return [_row_at(config, count, part if part.strip("0123456789_. ") else f"{part} {unit}") for part in parts]


def _row_at(config: Config, count: StepCount, text: str) -> dict[str, Any]:
    schedule = config.schedule
    try:
        place = Progress.parse(text)
        samples = count.consumed_at(place.value) if place.unit == "step" else schedule.samples(place)
    except ValueError as error:
        raise ConfigError(f"--at: {error}") from None
    steps = count.step_at(schedule.end)
    total = count.consumed_at(steps)
    if not 0 < samples <= total:
        raise ConfigError(
            f"--at {text!r} is {'after the end' if samples else 'before the first step'} of the run, which has "
            f"{steps:_} steps: {total:_} samples, {schedule.tokens(total):_} tokens"
        )
    values = _row(schedule, count, count.step_at(samples))
    consumed = values["consumed"]
    return {**values, **data_at(config, consumed), "sequence_length": schedule.lengths.length_at(consumed - 1)}


def render_rows(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Rows of `Schedule.at` or `rows_at` as a table."""
    columns = {name: layout for name, layout in _COLUMNS.items() if name in rows[0]}
    others = [name for name in rows[0] if name not in (*columns, "shares", "sequence_length")]
    head = [f"{name:>{layout.rstrip('_e').partition('.')[0]}}" for name, layout in columns.items()]
    shares = ["  shares"] if "shares" in rows[0] else []
    yield "  " + " ".join([*head, *(f"{name:>16}" for name in others), *shares])
    for row in rows:
        shown = {**row, "tokens": human_count(row["tokens"])}
        cells = [f"{shown[name]:>{layout}}" for name, layout in columns.items()]
        cells += [f"{_text(row[name]):>16}" for name in others]
        cells += ["  " + ", ".join(f"{name} {share:.3g}" for name, share in row["shares"].items())] if shares else []
        yield "  " + " ".join(cells)


def render_entries(timeline: Sequence[TimelineRow]) -> Iterator[str]:
    """The entries of a timeline."""
    for entry in timeline:
        reason = f" ({entry.reason})" if entry.reason else ""
        yield f"  timeline    after step {entry.step:_}, {entry.samples:_} samples: {entry.text}{reason}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or abs(value) >= 0.01 else f"{value:.3e}"
    return ", ".join(f"{part:g}" for part in value) if isinstance(value, tuple) else str(value)
