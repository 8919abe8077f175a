"""Schedules as pure functions of `consumed`, the number of samples trained. No torch, no hidden state.

Only this module turns configured durations into numbers. Two conventions matter:

- a step of batch B takes `consumed` from c to c + B; step numbers start at 1;
- the step that *brings* consumed to s uses the learning rate of s, so the first step is not wasted on lr 0, and the
  value logged beside `consumed` is the value of the curve at that point (as in Megatron's logs).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fsdp_pretrain.units import Progress

from .sequence_stages import SequenceStages


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
        self.full, self.ramp = full, ramp
        self._increments = 0
        if ramp is not None:
            if ramp.end <= ramp.start:
                raise ValueError(f"the batch ramp ends at {ramp.end} samples, not after its start at {ramp.start}")
            if ramp.first >= full or (full - ramp.first) % ramp.by:
                raise ValueError(
                    f"the batch ramp does not reach {full} samples from {ramp.first} in whole increments of {ramp.by}"
                )
            self._increments = (full - ramp.first) // ramp.by
        self.stages = self._build_stages()

    def batch_at(self, consumed: int) -> int:
        """Global batch, in samples, of the step that starts at `consumed`."""
        ramp = self.ramp
        if ramp is None or consumed >= ramp.end:
            return self.full
        passed = max(0, consumed - ramp.start) * self._increments // (ramp.end - ramp.start)
        return ramp.first + ramp.by * passed

    def _build_stages(self) -> list[Stage]:
        stages, step, consumed = [], 0, 0
        for increment in range(self._increments):
            batch = self.batch_at(consumed)
            boundary = self._boundary(increment + 1)
            if boundary <= consumed:  # a large batch overshot a whole interval
                continue
            stages.append(Stage(step, consumed, batch))
            steps = math.ceil((boundary - consumed) / batch)
            step, consumed = step + steps, consumed + steps * batch
        stages.append(Stage(step, consumed, self.full))
        return stages

    def _boundary(self, increment: int) -> int:
        """The first `consumed` at which `increment` increments have passed."""
        assert self.ramp is not None
        length = self.ramp.end - self.ramp.start
        return self.ramp.start + -(-increment * length // self._increments)

    def consumed_at(self, step: int) -> int:
        stage = self.stages[bisect_right(self.stages, step, key=lambda stage: stage.step) - 1]
        return stage.consumed + (step - stage.step) * stage.batch

    def step_at(self, consumed: int) -> int:
        """The number of whole steps after which at least `consumed` samples have been consumed."""
        stage = self.stages[bisect_right(self.stages, consumed, key=lambda stage: stage.consumed) - 1]
        return stage.step + -(-(consumed - stage.consumed) // stage.batch)


class Piecewise:
    """Linear between points (consumed, value), constant before the first and after the last.

    Two points at one place are a jump, to the second value from there on. Raises ValueError if they are not in order.
    """

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self.places, self._values = [place for place, _ in points], [value for _, value in points]
        for before, after in pairwise(self.places):
            if after < before:
                raise ValueError(f"a point at sample {after:_} follows one at sample {before:_}")

    def at(self, consumed: int) -> float:
        """The value at `consumed` samples."""
        after = bisect_right(self.places, consumed)
        if after in (0, len(self.places)):
            return self._values[max(0, after - 1)]
        start, end = self.places[after - 1 : after + 1]
        first, last = self._values[after - 1 : after + 1]
        return first + (last - first) * (consumed - start) / (end - start)


class Schedule:
    """Everything that changes over a run, as numbers. Raises ValueError if the durations contradict each other.

    The last step is the first that reaches `duration`. `lr` is the peak of the learning rate, reached after a linear
    `warmup` from 0; `curve` (`cosine`, `linear`, `constant`) leads to `min_lr` at `decay`, counted from the start of
    the run (None: at its end). `shrink` are points of the embedding-gradient shrink. `lengths` are those of the samples
    trained, if not all have `sequence_length` tokens.
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
        shrink: Sequence[tuple[Progress, float]] = (),
        lengths: SequenceStages | None = None,
    ) -> None:
        self.batch, self.lengths = batch, lengths or SequenceStages.constant(sequence_length)
        self.steps = batch.step_at(self.samples(duration))
        self.total = batch.consumed_at(self.steps)
        self.warmup = self.samples(warmup)
        self.decay = self.samples(decay) if decay is not None else self.total
        self.decays = curve != "constant"
        self._curve, self._peak, self._floor = curve, lr, min_lr
        try:
            self.shrink = Piecewise([(self.samples(at), value) for at, value in shrink]) if shrink else None
        except ValueError as error:
            raise ValueError(f"optimizer.embedding_shrink: {error}") from None
        if self.steps < 1:
            raise ValueError(f"a duration of {duration} is less than one step")
        if self.warmup > self.decay:
            raise ValueError(
                f"the warm-up of {warmup} ({self.warmup:_} samples) is longer than the decay ({self.decay:_} samples)"
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

    def lr_at(self, consumed: int) -> float:
        """Learning rate of the step that brings the counter to `consumed`."""
        peak, floor, warmup = self._peak, self._floor, self.warmup
        if warmup and consumed <= warmup:
            return peak * consumed / warmup
        if not self.decays:
            return peak
        if consumed >= self.decay:
            return floor
        passed, length = consumed - warmup, self.decay - warmup
        if self._curve == "linear":
            return peak + (floor - peak) * passed / length
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * (passed / length)))

    def ramps_at(self, consumed: int) -> dict[str, float]:
        """Values of the other ramps that are configured, in the step that brings the counter to `consumed`."""
        return {} if self.shrink is None else {"embedding_shrink": self.shrink.at(consumed)}

    def due(self, every: Progress | None, *, step: int, before: int, after: int) -> bool:
        """Whether step number `step`, which took `consumed` from `before` to `after`, completed an interval."""
        if every is None:
            return False
        if every.unit == "step":
            return step % every.value == 0
        if every.unit == "token":
            before, after = self.tokens(before), self.tokens(after)
        return after // every.value > before // every.value

    def preview(self) -> list[dict[str, float | int]]:
        """Evenly spaced rows of the schedule, and the ends of warm-up, decay and ramps."""
        points = 9
        marks = {self.total * i // (points - 1) for i in range(points)}
        marks |= {stage.consumed for stage in self.batch.stages if stage.consumed <= self.total}
        marks |= {mark for mark in (self.warmup, self.decay) if mark <= self.total}
        marks |= {mark for mark in (self.shrink.places if self.shrink else []) if mark <= self.total}
        steps = sorted({max(1, self.batch.step_at(mark)) for mark in marks})
        if len(steps) > 2 * points:  # a long ramp: keep its ends and an even choice between
            steps = [steps[i * (len(steps) - 1) // (2 * points - 1)] for i in range(2 * points)]
        return [self.at(step) for step in steps]

    def at(self, step: int) -> dict[str, float | int]:
        """The schedule after step number `step`: consumed, tokens, batch, lr and ramps of that step."""
        consumed = self.batch.consumed_at(step)
        return {
            "step": step,
            "consumed": consumed,
            "tokens": self.tokens(consumed),
            "batch": consumed - self.batch.consumed_at(step - 1),
            "lr": self.lr_at(consumed),
            **self.ramps_at(consumed),
        }

    def batches(self) -> list[int]:
        """Every distinct global batch of the run, ascending, in samples."""
        stages = [stage for stage in self.batch.stages if stage.consumed < self.total]
        assert all(a.batch < b.batch for a, b in pairwise(stages))
        return [stage.batch for stage in stages]
