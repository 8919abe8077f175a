"""Milestones of a run for the chronicle, computed in advance from its configuration.

Spikes and slowdowns are often blamed on a schedule change at the same time, such as the end of the warmup or of the
batch ramp. So the chronicle records these milestones.
"""

from __future__ import annotations

from typing import NamedTuple

from fsdp_pretrain.config.config import Config


class Milestone(NamedTuple):
    """A position in consumed samples, and its text."""

    consumed: int
    text: str


def milestones(config: Config) -> list[Milestone]:
    """The milestones between the first and the last step, in order."""
    schedule = config.schedule
    found = list[tuple[int, str]]()
    if schedule.warmup:
        found.append((schedule.warmup, f"the warm-up ends: the learning rate is {schedule.lr_at(schedule.warmup):.3g}"))
    if schedule.decays and schedule.decay < schedule.total:
        found.append((schedule.decay, f"the learning rate has come down to {schedule.lr_at(schedule.decay):.3g}"))
    if schedule.batch.ramp is not None:
        full = schedule.batch.stages[-1].consumed
        found.append((full, f"the batch ramp ends: {schedule.batch.full:_} samples a step from here on"))
    for placed in schedule.timeline:
        facts = "; ".join(filter(None, [placed.entry.keys(), placed.entry.reason]))
        found.append((placed.at + 1, f"timeline: {facts}"))
    found += [(at, f"samples have {length:_} tokens from here on") for at, length in schedule.lengths.changes()]
    return sorted({Milestone(place, text) for place, text in found if 0 < place < schedule.total})
