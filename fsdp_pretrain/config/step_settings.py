"""Were steps trained with the same settings? A question about values at these steps, not about keys of a file.

A key may be changed without another value in any of the steps: a timeline entry ahead of them, one that was taken away
again, the same place in another unit. And a value may differ although no key does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from .config import Config
from .resume_rules import FREE, changes, differences
from .skips import Skips

SCHEDULED = frozenset(
    "timeline data.skip train.global_batch train.batch_ramp train.batch_ramp.first train.batch_ramp.by "
    "train.batch_ramp.start train.batch_ramp.end train.batch_ramp.duration train.grad_clip train.z_loss "
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


@dataclass(frozen=True)
class Unlike:
    """What differs between two configurations in some steps, as `key: old -> new`."""

    settings: list[str]
    """What is learned: these are other steps."""
    rounding: list[str]
    """How it is computed: the same steps, but for the last digits."""


def unlike(old: Config, new: Config, steps: Iterable[StepCounters]) -> Unlike:
    """What differs between the settings that two configurations have in `steps`; of values, those of the first step in
    which one differs."""
    found = [change for change in changes(old, new) if change.key not in {*SCHEDULED, "train.duration"}]
    return Unlike(
        settings=unlike_values(old, new, steps) + [change.text for change in found if change.kind != FREE],
        rounding=[change.text for change in found if change.key in ROUNDING],
    )


def unlike_values(old: Config, new: Config, steps: Iterable[StepCounters]) -> list[str]:
    """The same for the keys in `SCHEDULED` alone."""
    skips = old.data.skip != new.data.skip
    for step in steps:
        was, is_ = (_values(config, step, skips=skips) for config in (old, new))
        if was != is_:
            return differences(was, is_)
    return []


def _values(config: Config, step: StepCounters, *, skips: bool) -> dict[str, Any]:
    """Everything in a step that its place in the run decides; which samples it has only where they may differ."""
    schedule = config.schedule
    values = {"batch": schedule.batch.batch_at(step.consumed - step.batch), **asdict(schedule.values_at(step.consumed))}
    if skips:
        skipped = Skips((span.first, span.stop) for span in config.data.skip)
        values["samples"] = skipped.take_back(step.cursor, step.batch)
    return values
