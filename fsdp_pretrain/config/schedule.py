"""Schedules as pure functions of `consumed`, the number of samples trained. No torch, no hidden state.

Only this module turns configured durations into numbers. Two conventions matter:

- a step of batch B takes `consumed` from c to c + B; step numbers start at 1;
- the step that *brings* consumed to s uses the learning rate of s, so the first step is not wasted on lr 0, and the
  value logged beside `consumed` is the value of the curve at that point (as in Megatron's logs).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from fsdp_pretrain.units import Progress

from .curves import LearningRateCurve
from .data_section import DataSection
from .piecewise import Piecewise
from .sections import BatchRampSection, CheckpointSection, OptimizerSection, TrainSection
from .skips import Skips
from .timeline import Change, TimelineEntry

_LR, _MIN_LR, _SHRINK = "optimizer.lr", "optimizer.min_lr", "optimizer.embedding_shrink"
_SAVES = "checkpoint.every"
_OF_STEP = (
    "optimizer.lr_scale",
    "optimizer.weight_decay",
    "optimizer.betas",
    "train.grad_clip",
    "train.z_loss",
    _SHRINK,
    "optimizer.shrink_paths",
)
"""Keys whose values are fields of `StepValues`."""


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
    """A part of the run with a constant batch, which begins after `step` steps at `consumed` samples."""

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
        starts, batches = [0], [full]
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
        self.stages = list[Stage]()
        step = consumed = 0
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
        """Samples consumed after `step` steps from the start of the run."""
        stage = self.stages[bisect_right(self.stages, step, key=lambda stage: stage.step) - 1]
        return stage.consumed + (step - stage.step) * stage.batch

    def ahead(self, consumed: int, steps: int) -> int:
        """Samples consumed after `steps` more steps from `consumed`.

        Works from any place: a run that was resumed with another batch is not at `consumed_at` its step.
        """
        while steps and self.ramp is not None and consumed < self.ramp.end:
            consumed, steps = consumed + self.batch_at(consumed), steps - 1
        return consumed + steps * self.full

    def steps_between(self, consumed: int, until: int) -> int:
        """Whole steps from `consumed` after which at least `until` samples have been consumed."""
        steps = 0
        while consumed < until and self.ramp is not None and consumed < self.ramp.end:
            consumed, steps = consumed + self.batch_at(consumed), steps + 1
        return steps + max(0, -(-(until - consumed) // self.full))

    def step_at(self, consumed: int) -> int:
        """Whole steps from the start of the run after which at least `consumed` samples have been consumed."""
        stage = self.stages[bisect_right(self.stages, consumed, key=lambda stage: stage.consumed) - 1]
        return stage.step + -(-(consumed - stage.consumed) // stage.batch)


def _samples(size: Progress, sequence_length: int, name: str) -> int:
    """A batch size or ramp in samples. Raises ValueError if tokens are not whole samples."""
    if size.unit == "token":
        if size.value % sequence_length:
            raise ValueError(f"{name} = {size} is not a whole number of samples of {sequence_length} tokens")
        return size.value // sequence_length
    return size.value


def _build_ramp(section: BatchRampSection, length: int) -> Ramp:
    samples = {
        name: _samples(getattr(section, name), length, f"train.batch_ramp.{name}")
        for name in ("first", "by", "start", "duration")
    }
    return Ramp(samples["first"], samples["by"], samples["start"], samples["start"] + samples["duration"])


@dataclass(frozen=True)
class StepValues:
    """Everything that schedules decide for one step. `lr` is the rate that the optimiser gets, `lr_scale` included."""

    lr: float
    lr_scale: float
    weight_decay: float
    betas: tuple[float, float]
    grad_clip: float
    z_loss: float
    embedding_shrink: float
    shrink_paths: Literal["input", "both"]

    @property
    def shrink_head(self) -> bool:
        """Whether the gradient through the logits is shrunk too."""
        return self.shrink_paths == "both"


@dataclass(frozen=True)
class Placed:
    """A timeline entry, its place, and the ends of its ramps in the order of `entry.changes()`, all in samples."""

    at: int
    entry: TimelineEntry
    ends: tuple[int, ...]


class Schedule:
    """Everything that changes over a run, as numbers: the sections' schedules, with the changes of the timeline.

    The last step is the first that reaches `train.duration`, also where the batch was another one before. An entry of
    the timeline at `at` counts for steps that end behind `at`, as if the run had restarted there with other settings:
    the step that ends at `at` itself still has the old values, and a ramp over n reaches its end at `at` + n.

    Raises ValueError, whose `args` are all contradictions found.
    """

    def __init__(
        self,
        data: DataSection,
        train: TrainSection,
        optimizer: OptimizerSection,
        checkpoint: CheckpointSection,
        timeline: Sequence[TimelineEntry] = (),
    ) -> None:
        length, ramp = data.sequence_length, train.batch_ramp
        full = _samples(train.global_batch, length, "train.global_batch")
        self.batch = BatchSchedule(full, None if ramp is None else _build_ramp(ramp, length))
        self.lengths = data.sequence_stages.trained(Skips((span.first, span.stop) for span in data.skip))
        self.end = self.samples(train.duration)
        """The run is complete after the first step that reaches it, in samples."""
        self.steps = self.batch.step_at(self.end)
        self.total = self.batch.consumed_at(self.steps)
        """Samples of a run that has these batches from its first step on."""
        warmup, decay_length = optimizer.warmup, optimizer.decay_length
        self.warmup = self.samples(warmup)
        self.decay = self.total if optimizer.decay is None else self.samples(optimizer.decay)
        self.decays = optimizer.curve != "constant"
        self.decay_start = self.warmup if decay_length is None else self._earlier(self.decay, decay_length)
        """Where the learning rate leaves its peak, in samples."""
        if problems := list(self._contradictions(train.duration, warmup, decay_length)):
            raise ValueError(*problems)
        shapes = optimizer.warmup_shape, optimizer.decay_shape
        self._curve = LearningRateCurve(optimizer.curve, self.warmup, self.decay, self.decay_start, *shapes)
        sections = {"optimizer": optimizer, "train": train, "checkpoint": checkpoint}
        self._values = dict[str, Piecewise[Any]]()
        for key in (_LR, _MIN_LR, _SAVES, *_OF_STEP):
            section, _, name = key.partition(".")
            self._values[key] = Piecewise(getattr(sections[section], name))
        steered = {_SHRINK} if optimizer.embedding_shrink != 1.0 else set[str]()
        self.timeline = sorted(map(self._placed, timeline), key=lambda placed: placed.at)
        """The entries in order, with their places."""
        for place in self.timeline:
            for key, value in place.entry.changes():
                self._change(self._values[key], place.at, value)
                steered.add(key)
        self._check_floor()
        self._of_step = [(key.partition(".")[2], self._values[key]) for key in _OF_STEP]
        self._steered = [key.partition(".")[2] for key in _OF_STEP if key in steered]

    def _contradictions(self, duration: Progress, warmup: Progress, decay_length: Progress | None) -> Iterator[str]:
        if self.steps < 1:
            yield f"a duration of {duration} is less than one step"
        if self.warmup > self.decay:
            yield f"the warm-up of {warmup} ({self.warmup:_} samples) is longer than the decay ({self.decay:_} samples)"
        if self.decay_start < self.warmup:
            yield f"optimizer.decay_length = {decay_length} begins within the warm-up of {warmup}"

    def _placed(self, entry: TimelineEntry) -> Placed:
        place, *ramps = entry.lengths()
        at = self.samples(place)
        return Placed(at, entry, tuple(self.behind(at, ramp) for ramp in ramps))

    def _change(self, along: Piecewise[Any], at: int, value: Any) -> None:
        """Apply a change of the timeline. A ramp that ends within the next step changes the value at once."""
        if isinstance(value, Change):
            length = 0 if value.over is None else self.behind(at, value.over) - at
            ramped = length > self.behind(at, Progress(1, "step")) - at
            along.change(at, value.to, *((value.from_, length) if ramped else ()))
        else:
            along.change(at, value)

    def _check_floor(self) -> None:
        for mark in {*self._values[_LR].marks, *self._values[_MIN_LR].marks}:
            peak, floor = (self._values[key].at(mark, behind=True) for key in (_LR, _MIN_LR))
            if floor > peak:
                raise ValueError(
                    f"timeline: from sample {mark:_} on, optimizer.min_lr = {floor:g} is above optimizer.lr = {peak:g}"
                )

    def values_at(self, consumed: int, *, behind: bool = False) -> StepValues:
        """The values of the step that brings the counter to `consumed`; `behind`: the limit of the steps after it."""
        peak, floor = (self._values[key].at(consumed, behind=behind) for key in (_LR, _MIN_LR))
        others = {name: along.at(consumed, behind=behind) for name, along in self._of_step}
        return StepValues(lr=self._curve.lr(consumed, peak, floor) * others["lr_scale"], **others)

    def save_every(self, consumed: int) -> Progress:
        """Interval between checkpoints in the step that ends at `consumed`."""
        every: Progress = self._values[_SAVES].at(consumed)
        return every

    @property
    def marks(self) -> list[int]:
        """The places where something changes or a ramp ends, in samples."""
        return sorted({mark for along in self._values.values() for mark in along.marks})

    def samples(self, progress: Progress) -> int:
        """Samples consumed after `progress` from the start of the run, rounded up."""
        if progress.unit == "step":
            return self.batch.consumed_at(progress.value)
        if progress.unit == "token":
            return self.lengths.samples(progress.value)
        return progress.value

    def last_step(self, step: int, consumed: int) -> int:
        """Number of the run's last step, as planned after step number `step`, which ended at `consumed`."""
        return step + self.batch.steps_between(consumed, self.end)

    def tokens(self, samples: int) -> int:
        """Tokens of the first `samples` samples trained."""
        return self.lengths.tokens(samples)

    def behind(self, at: int, length: Progress) -> int:
        """The place `length` later than `at`, both in samples."""
        if length.unit == "step":
            return self.batch.consumed_at(self.batch.step_at(at) + length.value)
        if length.unit == "token":
            return self.samples(Progress(self.tokens(at) + length.value, "token"))
        return at + length.value

    def _earlier(self, at: int, length: Progress) -> int:
        """The place `length` earlier than `at`, both in samples; negative if before the start of the run."""
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
        """The values of a step, other than the learning rate, that change in the course of the run."""
        return {name: getattr(values, name) for name in self._steered}

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
        """The row of the preview for step number `step`, of `batch` samples, which brings the counter to `consumed`."""
        values = self.values_at(consumed)
        return {
            "step": step,
            "consumed": consumed,
            "tokens": self.tokens(consumed),
            "batch": batch,
            "lr": values.lr,
            **self.steered(values),
        }

    def length_in(self, unit: str) -> int:
        """The length of the run in steps, samples or tokens."""
        return {"step": self.steps, "sample": self.total, "token": self.tokens(self.total)}[unit]

    def batches(self) -> list[int]:
        """Every distinct global batch of the run, ascending, in samples."""
        stages = [stage for stage in self.batch.stages if stage.consumed < self.total]
        assert all(a.batch < b.batch for a, b in pairwise(stages))
        return [stage.batch for stage in stages]
