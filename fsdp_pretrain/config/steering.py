"""The steered values of every step: what the sections say, and what the timeline makes of it. Pure functions.

An entry at `at` counts for steps that end behind `at`, as if a run had restarted there with other settings. So values
at `at` itself are the last of before, and a ramp over n reaches its end at `at` + n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Literal

from fsdp_pretrain.units import Progress

from .curves import LearningRateCurve
from .piecewise import Piecewise
from .timeline import Change, TimelineEntry

_LARGEST_JUMP = 0.1
"""Share of a value that an entry may change at once without saying so."""
_LR, _MIN_LR, _LR_SCALE, _REWARM = "optimizer.lr", "optimizer.min_lr", "optimizer.lr_scale", "rewarm"
_SHRINK = "optimizer.embedding_shrink"
_OF_STEP = {
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
    """Everything steered in one step. `lr` is what the optimiser gets: `lr_scale` and `rewarm` are in it."""

    lr: float
    lr_scale: float
    rewarm: float
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
class Jump:
    """A value that differs between the steps before and after a place. `share`: of the value before, None: a choice."""

    key: str
    before: Any
    after: Any
    share: float | None
    meant: bool
    """It is small, or the entry says that it is meant."""

    def __str__(self) -> str:
        """`lr 4.53e-05 -> 2.46e-05 (-45.7%)`."""
        percent = "" if self.share in (None, inf) else f" ({self.share:+.1%})"
        return f"{self.key} {_short(self.before)} -> {_short(self.after)}{percent}"


@dataclass(frozen=True)
class Placed:
    """A timeline entry and its place in samples; `jumps` are of all entries of this place."""

    at: int
    entry: TimelineEntry
    jumps: tuple[Jump, ...] = ()


class SteeredValues:
    """The steered values as functions of samples consumed.

    Args:
        values: by key, what the sections say; absent: the default.
        timeline: what changes them.
        curve: of the learning rate.
        place: samples of a place.
        behind: samples of the place that is a duration behind another, which is in samples.

    Raises:
        ValueError: entries cannot be what they say, one in each of its `args`.
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
        defaults = {**_OF_STEP, _MIN_LR: 0.0, _LR_SCALE: 1.0, _REWARM: 1.0}
        self._values = {key: Piecewise(value) for key, value in {**defaults, **values}.items()}
        placed = sorted(((place(entry.at), entry) for entry in timeline), key=lambda pair: pair[0])
        problems, steered = list[str](), {_SHRINK} if self._values[_SHRINK].at(0) != _OF_STEP[_SHRINK] else set[str]()
        for at, entry in placed:
            try:
                self._enter(at, entry)
            except ValueError as error:
                problems.append(f"timeline, {entry}: {error}")
            steered |= {key for key, _ in entry.changes()} | ({"rewarm"} if entry.rewarm is not None else set())
        if problems:
            raise ValueError(*problems)
        self._check_floor()
        names = {key.partition(".")[2] or key for key in steered}
        self.names = tuple(item.name for item in fields(StepValues) if item.name in names - {"lr"})
        """Fields of `StepValues` that change, besides `lr`."""
        self.timeline = [Placed(at, entry, tuple(self._jumps(at, placed))) for at, entry in placed]
        """The entries in order, with their places and what jumps there."""

    def _enter(self, at: int, entry: TimelineEntry) -> None:
        if entry.continuous:
            assert entry.optimizer.min_lr is not None
            self._re_anchor(at, entry.optimizer.min_lr.to)
        for key, value in entry.changes():
            along = self._values.setdefault(key, Piecewise(None))
            if isinstance(value, Change):
                along.change(at, value.to, value.from_, self._length(at, value.over))
            else:
                along.change(at, value)
        if entry.rewarm is not None:
            self._values[_REWARM].change(at, 1.0, 0.0, self._length(at, entry.rewarm))

    def _length(self, at: int, over: Progress | None) -> int:
        return 0 if over is None else self._behind(at, over) - at

    def _check_floor(self) -> None:
        for mark in {*self._values[_LR].marks, *self._values[_MIN_LR].marks}:
            peak, floor = (self._values[key].at(mark, behind=True) for key in (_LR, _MIN_LR))
            if floor > peak:
                raise ValueError(
                    f"timeline: from sample {mark:_} on, optimizer.min_lr = {floor:g} is above optimizer.lr = {peak:g}"
                )

    def _re_anchor(self, at: int, floor: float) -> None:
        """Change the peak so that the curve with another floor goes on from the rate at `at`."""
        if at < self._curve.warmup or self._curve.shape == "inverse-sqrt":
            return
        if self._curve.shape == "constant":
            raise ValueError("a constant learning rate has no optimizer.min_lr")
        lr = self._curve.lr(at, *(self._values[key].at(at, behind=True) for key in (_LR, _MIN_LR)))
        if floor > lr:
            raise ValueError(f"optimizer.min_lr = {floor:g} is above the learning rate there, {lr:g}")
        self._values[_LR].change(at, self._curve.peak_for(lr, at, floor))

    def values_at(self, consumed: int, *, behind: bool = False) -> StepValues:
        """The values of the step that brings the counter to `consumed`; `behind`: the limit of the steps after it, of
        which a ramp that is no longer than a step is no part."""
        step = self._behind(consumed, Progress(1, "step")) - consumed if behind else 0

        def now(along: Piecewise[Any]) -> Any:
            return along.at(consumed, behind=behind, within=step)

        scale, rewarm = now(self._values[_LR_SCALE]), self._values[_REWARM].at(consumed, behind=behind)
        lr = self._curve.lr(consumed, now(self._values[_LR]), now(self._values[_MIN_LR])) * scale * rewarm
        others = {key.partition(".")[2]: now(self._values[key]) for key in _OF_STEP}
        return StepValues(lr=lr, lr_scale=scale, rewarm=rewarm, **others)

    def value_at(self, key: str, consumed: int) -> Any:
        """The value of a key such as `checkpoint.every` in the step that ends at `consumed`; None: it has none."""
        return self._values[key].at(consumed) if key in self._values else None

    @property
    def marks(self) -> list[int]:
        """Where something changes, and where ramps end."""
        of_step = [self._values[key] for key in (_LR, _MIN_LR, _LR_SCALE, _REWARM, *_OF_STEP)]
        ends = [mark for along in of_step for mark in along.marks]
        return sorted({*(placed.at for placed in self.timeline), *ends})

    # ------------------------------------------------------------------ continuity

    def _jumps(self, at: int, placed: Sequence[tuple[int, TimelineEntry]]) -> Iterator[Jump]:
        """What jumps at a place; at the beginning of the run, nothing can."""
        if at == 0:
            return
        here = [entry for place, entry in placed if place == at]
        meant = any(entry.allow_jump for entry in here)
        begun = {key.partition(".")[2] for entry in here for key, value in entry.changes() if _begins(value)}
        begun |= {"lr"} if {"min_lr", "lr_scale"} & begun or any(entry.rewarm for entry in here) else set()
        for jump in jumps(self.values_at(at), self.values_at(at, behind=True)):
            yield replace(jump, meant=jump.meant or meant or jump.key in begun)


def jumps(before: StepValues, after: StepValues) -> Iterator[Jump]:
    """What differs between two steps; meant if it is small, or a choice."""
    for item in fields(StepValues):
        was, is_ = getattr(before, item.name), getattr(after, item.name)
        if was != is_ and item.name != "rewarm":
            share = _share(was, is_)
            yield Jump(item.name, was, is_, share, share is None or abs(share) <= _LARGEST_JUMP)


def _begins(value: Any) -> bool:
    return isinstance(value, Change) and value.from_ is not None


def _share(before: Any, after: Any) -> float | None:
    """Relative change: of a beta in the number of steps that it averages over, 1 / (1 - beta). None: no numbers."""
    if isinstance(before, tuple):
        return max((float((1 - was) / (1 - is_) - 1) for was, is_ in zip(before, after, strict=True)), key=abs)
    if isinstance(before, str):
        return None
    return float(after) / before - 1 if before else inf


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
