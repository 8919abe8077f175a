"""Whether two configurations give some steps the same values.

Keys can differ while all these values are the same: a timeline entry ahead of the steps, one that was removed again,
the same place in another unit. And values can differ while all keys are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Protocol

from .config import Config
from .resume_rules import FREE, changes, differences
from .skips import Skips

SCHEDULED = frozenset(
    "timeline data.skip train.duration train.global_batch train.batch_ramp train.batch_ramp.first train.batch_ramp.by "
    "train.batch_ramp.start train.batch_ramp.duration train.grad_clip train.z_loss "
    "optimizer.lr optimizer.min_lr optimizer.lr_scale optimizer.betas optimizer.weight_decay optimizer.curve "
    "optimizer.warmup optimizer.warmup_shape optimizer.decay optimizer.decay_length optimizer.decay_shape "
    "optimizer.embedding_shrink optimizer.shrink_paths".split()
)
"""Keys whose only effect is on the values of steps."""
ROUNDING = frozenset(
    "train.micro_batch parallel.shard parallel.reshard_after_forward parallel.reduce parallel.recompute "
    "parallel.attention parallel.compile".split()
)
"""Free keys on which the last digits of a step depend."""


class StepCounters(Protocol):
    """The counters of a step, as in `StepRecord` and `Position`: samples trained and samples read after it, and its
    batch."""

    @property
    def consumed(self) -> int: ...
    @property
    def cursor(self) -> int: ...
    @property
    def batch(self) -> int: ...


def same_values(old: Config, new: Config, steps: Iterable[StepCounters]) -> bool:
    """Whether two configurations give `steps` the same values, so that the same is learned in them."""
    return not value_differences(old, new, steps)


def value_differences(old: Config, new: Config, steps: Iterable[StepCounters]) -> list[str]:
    """The differences in `steps`, as `key: old -> new`; those of values are given for the first step that has any."""
    of_keys = [change.text for change in changes(old, new) if change.key not in SCHEDULED and change.kind != FREE]
    skips = old.data.skip != new.data.skip
    for step in steps:
        was, is_ = (_values(config, step, skips=skips) for config in (old, new))
        if was != is_:
            return differences(was, is_) + of_keys
    return of_keys


def rounding_differences(old: Config, new: Config) -> list[str]:
    """Changed keys on which only the last digits of a step depend."""
    return [change.text for change in changes(old, new) if change.key in ROUNDING]


def _values(config: Config, step: StepCounters, *, skips: bool) -> dict[str, Any]:
    """Everything that the schedule decides for a step, and with `skips` also which samples it has."""
    schedule = config.schedule
    values = {"batch": schedule.batch.batch_at(step.consumed - step.batch), **asdict(schedule.values_at(step.consumed))}
    if skips:
        skipped = Skips((span.first, span.stop) for span in config.data.skip)
        values["samples"] = skipped.take_back(step.cursor, step.batch)
    return values
