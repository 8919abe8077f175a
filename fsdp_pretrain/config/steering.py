"""The steered values of every step: what the sections say, and what the timeline makes of it. Pure functions.

An entry at `at` counts for steps that end behind `at`, as if a run had restarted there with other settings. So values
at `at` itself are the last of before, and a ramp over n reaches its end at `at` + n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_pretrain.units import Progress

from .curves import LearningRateCurve
from .piecewise import Piecewise
from .timeline import Change, TimelineEntry

_LR, _MIN_LR, _SHRINK = "optimizer.lr", "optimizer.min_lr", "optimizer.embedding_shrink"
_SAVES = "checkpoint.every"
_OF_STEP = {
    "optimizer.lr_scale": 1.0,
    "optimizer.weight_decay": 0.1,
    "optimizer.betas": (0.9, 0.95),
    "train.grad_clip": 1.0,
    "train.z_loss": 0.0,
    _SHRINK: 1.0,
    "optimizer.shrink_paths": "both",
}
"""Keys whose values are fields of `StepValues`, and what they are by default."""


@dataclass(frozen=True)
class StepValues:
    """Everything steered in one step. `lr` is what the optimiser gets: `lr_scale` is in it."""

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
    """A timeline entry and its place in samples."""

    at: int
    entry: TimelineEntry


class SteeredValues:
    """The steered values as functions of samples consumed.

    Args:
        values: by key, what the sections say; absent: the default.
        timeline: what changes them.
        curve: of the learning rate.
        place: samples of a place.
        behind: samples of the place that is a duration behind another, which is in samples.

    Raises:
        ValueError: the floor of the learning rate would be above its peak.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        timeline: Sequence[TimelineEntry],
        *,
        curve: LearningRateCurve,
        place: Callable[[Progress], int],
        behind: Callable[[int, Progress], int],
    ) -> None:
        self._curve, self._behind = curve, behind
        self._values = {key: Piecewise(value) for key, value in {**_OF_STEP, _MIN_LR: 0.0, **values}.items()}
        steered = {_SHRINK} if self._values[_SHRINK].at(0) != _OF_STEP[_SHRINK] else set[str]()
        placed = sorted(((place(entry.at), entry) for entry in timeline), key=lambda pair: pair[0])
        for at, entry in placed:
            for key, value in entry.changes():
                self._change(self._values[key], at, value)
                steered.add(key)
        self._check_floor()
        self._of_step = [(key.partition(".")[2], self._values[key]) for key in _OF_STEP]
        self.names = tuple(key.partition(".")[2] for key in _OF_STEP if key in steered)
        """Fields of `StepValues` that change, besides `lr`."""
        self.timeline = [Placed(at, entry) for at, entry in placed]
        """The entries in order, with their places."""

    def _change(self, along: Piecewise[Any], at: int, value: Any) -> None:
        """A ramp that is over when the next step ends is a change at once."""
        if isinstance(value, Change):
            length = 0 if value.over is None else self._behind(at, value.over) - at
            ramped = length > self._behind(at, Progress(1, "step")) - at
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
        """Where something changes, and where ramps end."""
        return sorted({mark for along in self._values.values() for mark in along.marks})
