"""Do two configurations give some steps the same values? A question about values at these steps, not about keys.

A key may be changed without another value in any of the steps: a timeline entry ahead of them, one that was taken away
again, the same place in another unit. And a value may differ although no key does.
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
"""Keys that are nothing but values of every step."""
ROUNDING = frozenset(
    "train.micro_batch parallel.shard parallel.reshard_after_forward parallel.recompute parallel.attention "
    "parallel.compile".split()
)
"""Free keys on which the last digits of a step depend."""


class StepCounters(Protocol):
    """A step by its counters, as `StepRecord` and `Position` have them: samples trained and read after it, and its
    own."""

    @property
    def consumed(self) -> int: ...
    @property
    def cursor(self) -> int: ...
    @property
    def batch(self) -> int: ...


def same_values(old: Config, new: Config, steps: Iterable[StepCounters]) -> bool:
    """Whether two configurations say the same for what is learned in `steps`."""
    return not value_differences(old, new, steps)


def value_differences(old: Config, new: Config, steps: Iterable[StepCounters]) -> list[str]:
    """What differs in `steps`, as `key: old -> new`; of values, those of the first step in which one differs."""
    found = [change.text for change in changes(old, new) if change.key not in SCHEDULED and change.kind != FREE]
    skips = old.data.skip != new.data.skip
    for step in steps:
        was, is_ = (_values(config, step, skips=skips) for config in (old, new))
        if was != is_:
            return differences(was, is_) + found
    return found


def rounding_differences(old: Config, new: Config) -> list[str]:
    """What differs in how steps are computed: in their last digits."""
    return [change.text for change in changes(old, new) if change.key in ROUNDING]


def _values(config: Config, step: StepCounters, *, skips: bool) -> dict[str, Any]:
    """Everything in a step that its place in the run decides; which samples it has only where they may differ."""
    schedule = config.schedule
    values = {"batch": schedule.batch.batch_at(step.consumed - step.batch), **asdict(schedule.values_at(step.consumed))}
    if skips:
        skipped = Skips((span.first, span.stop) for span in config.data.skip)
        values["samples"] = skipped.take_back(step.cursor, step.batch)
    return values
