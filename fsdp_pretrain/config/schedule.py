"""Schedules as pure functions of `consumed`, the number of samples trained. No torch, no hidden state.

Only this module turns configured durations into numbers. Two conventions matter:

- a step of batch B takes `consumed` from c to c + B; step numbers start at 1;
- the step that *brings* consumed to s uses the learning rate of s, so the first step is not wasted on lr 0, and the
  value logged beside `consumed` is the value of the curve at that point (as in Megatron's logs).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fsdp_pretrain.units import Progress

from .curves import LearningRateCurve
from .piecewise import Piecewise
from .sequence_stages import SequenceStages
from .steering import SteeredValues, StepValues
from .timeline import TimelineEntry


@dataclass(frozen=True)
class Ramp:
    """Batch-size ramp: from `first` by `by` samples, in equal intervals between consumed `start` and `end`.

    Same law as Megatron's `--rampup-batch-size`: the batch grows by `by` each time another 1/n of the interval has
    been consumed, n being the number of increments.
    """

    first: int
    by: int
    start: int
    end: int


@dataclass(frozen=True)
class Stage:
    """A stretch of constant batch: begins after `step` steps at `consumed` samples."""

    step: int
    consumed: int
    batch: int


def share_of(cursor: int, size: int, rank: int, world: int) -> range:
    """Samples of the global batch [cursor, cursor + size) that belong to `rank`: one of `world` equal slices."""
    share = size // world
    return range(cursor + rank * share, cursor + (rank + 1) * share)


class BatchSchedule:
    """Global batch in samples as a function of consumed samples, and the step <-> consumed arithmetic.

    Raises ValueError if the ramp does not reach the `full` batch in whole increments, or ends before it starts.
    """

    def __init__(self, full: int, ramp: Ramp | None = None) -> None:
        self.full, self.ramp, starts, batches = full, ramp, [0], [full]
        if ramp is not None:
            length, increments = ramp.end - ramp.start, (full - ramp.first) // ramp.by
            if length <= 0:
                raise ValueError(f"the batch ramp ends at {ramp.end} samples, not after its start at {ramp.start}")
            if ramp.first >= full or (full - ramp.first) % ramp.by:
                raise ValueError(
                    f"the batch ramp does not reach {full} samples from {ramp.first} in whole increments of {ramp.by}"
                )
            starts += [ramp.start - (-passed * length // increments) for passed in range(1, increments + 1)]
            batches = [ramp.first + ramp.by * passed for passed in range(increments + 1)]
        self._batches = Piecewise.steps(starts, batches)
        self.stages, step, consumed = list[Stage](), 0, 0
        for start in starts[1:]:
            if start > consumed:  # a large batch may overshoot a whole interval
                batch = self.batch_at(consumed)
                self.stages.append(Stage(step, consumed, batch))
                steps = math.ceil((start - consumed) / batch)
                step, consumed = step + steps, consumed + steps * batch
        self.stages.append(Stage(step, consumed, full))

    def batch_at(self, consumed: int) -> int:
        """Global batch, in samples, of the step that starts at `consumed`."""
        return self._batches.at(consumed)

    def consumed_at(self, step: int) -> int:
        stage = self.stages[bisect_right(self.stages, step, key=lambda stage: stage.step) - 1]
        return stage.consumed + (step - stage.step) * stage.batch

    def ahead(self, consumed: int, steps: int) -> int:
        """Samples consumed after `steps` more steps, from wherever a run is: one that was resumed with another batch is
        not where as many steps from the beginning would have led."""
        while steps and self.ramp is not None and consumed < self.ramp.end:
            consumed, steps = consumed + self.batch_at(consumed), steps - 1
        return consumed + steps * self.full

    def steps_between(self, consumed: int, until: int) -> int:
        """The number of whole steps from `consumed` after which at least `until` samples have been consumed."""
        steps = 0
        while consumed < until and self.ramp is not None and consumed < self.ramp.end:
            consumed, steps = consumed + self.batch_at(consumed), steps + 1
        return steps + max(0, -(-(until - consumed) // self.full))

    def step_at(self, consumed: int) -> int:
        """The number of whole steps after which at least `consumed` samples have been consumed."""
        stage = self.stages[bisect_right(self.stages, consumed, key=lambda stage: stage.consumed) - 1]
        return stage.step + -(-(consumed - stage.consumed) // stage.batch)


class Schedule(SteeredValues):
    """Everything that changes over a run, as numbers. Raises ValueError, whose `args` are all contradictions found.

    The last step is the first that reaches `duration`. `lr` is the peak of the learning rate, reached after a `warmup`
    from 0; `curve` (see `curves`) leads to `min_lr` at `decay`, counted from the start of the run (None: at its
    end), within the last `decay_length` of that for `wsd`. `lengths` are those of the samples trained, if not all have
    `sequence_length` tokens. `values` are all other values of a step, and the interval between checkpoints, by key;
    `timeline` changes them.
    """

    def __init__(
        self,
        *,
        sequence_length: int,
        batch: BatchSchedule,
        duration: Progress,
        curve: str,
        lr: float,
        min_lr: float,
        warmup: Progress,
        decay: Progress | None,
        warmup_shape: str = "linear",
        decay_shape: str = "1-sqrt",
        decay_length: Progress | None = None,
        values: Mapping[str, Any] | None = None,
        timeline: Sequence[TimelineEntry] = (),
        lengths: SequenceStages | None = None,
    ) -> None:
        self.batch, self.lengths = batch, lengths or SequenceStages.constant(sequence_length)
        self.steps = batch.step_at(self.samples(duration))
        self.total = batch.consumed_at(self.steps)
        self.warmup = self.samples(warmup)
        self.decay = self.samples(decay) if decay is not None else self.total
        self.decays = curve != "constant"
        problems = list[str]()
        if self.steps < 1:
            problems.append(f"a duration of {duration} is less than one step")
        if self.warmup > self.decay:
            problems.append(
                f"the warm-up of {warmup} ({self.warmup:_} samples) is longer than the decay ({self.decay:_} samples)"
            )
        self.decay_start = self.warmup if decay_length is None else self._ahead(self.decay, decay_length)
        """Where the learning rate leaves its peak, in samples."""
        if self.decay_start < self.warmup:
            problems.append(f"optimizer.decay_length = {decay_length} begins within the warm-up of {warmup}")
        if problems:
            raise ValueError(*problems)
        super().__init__(
            {"optimizer.lr": lr, "optimizer.min_lr": min_lr, **(values or {})},
            timeline,
            curve=LearningRateCurve(curve, self.warmup, self.decay, self.decay_start, warmup_shape, decay_shape),
            place=self.samples,
            behind=self.behind,
        )

    def samples(self, progress: Progress) -> int:
        """Samples consumed after `progress` from the start of the run, rounded up."""
        if progress.unit == "step":
            return self.batch.consumed_at(progress.value)
        if progress.unit == "token":
            return self.lengths.samples(progress.value)
        return progress.value

    def tokens(self, samples: int) -> int:
        """Tokens of the first `samples` samples trained."""
        return self.lengths.tokens(samples)

    def behind(self, at: int, length: Progress) -> int:
        """The place that is `length` behind another, both in samples."""
        if length.unit == "step":
            return self.batch.consumed_at(self.batch.step_at(at) + length.value)
        if length.unit == "token":
            return self.samples(Progress(self.tokens(at) + length.value, "token"))
        return at + length.value

    def _ahead(self, at: int, length: Progress) -> int:
        """The place that is `length` ahead of another, both in samples; negative if before the start of the run."""
        if length.unit == "step":
            steps = self.batch.step_at(at) - length.value
            return self.batch.consumed_at(steps) if steps >= 0 else -1
        if length.unit == "token":
            tokens = self.tokens(at) - length.value
            return self.samples(Progress(tokens, "token")) if tokens >= 0 else -1
        return at - length.value

    def lr_at(self, consumed: int) -> float:
        """Learning rate of the step that brings the counter to `consumed`."""
        return self.values_at(consumed).lr

    def steered(self, values: StepValues) -> dict[str, Any]:
        """Those of a step's values, besides the learning rate, that change in the course of the run."""
        return {name: getattr(values, name) for name in self.names}

    def due(self, every: Progress | None, *, step: int, before: int, after: int) -> bool:
        """Whether step number `step`, which took `consumed` from `before` to `after`, completed an interval."""
        if every is None:
            return False
        if every.unit == "step":
            return step % every.value == 0
        if every.unit == "token":
            before, after = self.tokens(before), self.tokens(after)
        return after // every.value > before // every.value

    def preview(self) -> list[dict[str, Any]]:
        """Evenly spaced rows of the schedule, the ends of warm-up, decay and ramps, and the steps around entries."""
        points = 9
        marks = {self.total * i // (points - 1) for i in range(points)}
        marks |= {stage.consumed for stage in self.batch.stages if stage.consumed <= self.total}
        marks |= {mark for mark in (self.warmup, self.decay_start, self.decay) if mark <= self.total}
        steps = sorted({max(1, self.batch.step_at(mark)) for mark in marks})
        if len(steps) > 2 * points:  # a long ramp: keep its ends and an even choice between
            steps = [steps[i * (len(steps) - 1) // (2 * points - 1)] for i in range(2 * points)]
        for mark in self.marks:
            at = self.batch.step_at(mark)
            steps += [step for step in (at - 1, at, at + 1) if 1 <= step <= self.steps]
        return [self.at(step) for step in sorted(set(steps))]

    def at(self, step: int) -> dict[str, Any]:
        """The schedule after step number `step`: consumed, tokens, batch, lr and ramps of that step."""
        consumed = self.batch.consumed_at(step)
        return self.row(step, consumed, consumed - self.batch.consumed_at(step - 1))

    def row(self, step: int, consumed: int, batch: int) -> dict[str, Any]:
        """The same of the step of this number that brings the counter to `consumed`."""
        values = self.values_at(consumed)
        return {
            "step": step,
            "consumed": consumed,
            "tokens": self.tokens(consumed),
            "batch": batch,
            "lr": values.lr,
            **self.steered(values),
        }

    def batches(self) -> list[int]:
        """Every distinct global batch of the run, ascending, in samples."""
        stages = [stage for stage in self.batch.stages if stage.consumed < self.total]
        assert all(a.batch < b.batch for a, b in pairwise(stages))
        return [stage.batch for stage in stages]
