"""The steered values of every step: what the sections say, and what the timeline makes of it. Pure functions.

An entry at `at` counts for steps that end behind `at`, as if a run had restarted there with other settings. So values
at `at` itself are the last of before, and a ramp over n reaches its end at `at` + n.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import inf
from typing import Any, Generic, Literal, TypeVar

from fsdp_pretrain.units import Progress

from .curves import LearningRateCurve
from .timeline import Change, TimelineEntry

T = TypeVar("T")
_LARGEST_JUMP = 0.1
"""Share of a value that an entry may change at once without saying so."""


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
class Steering:
    """What the sections say: values before any entry, and the entries. Intervals are (until, interval) each."""

    lr_scale: float = 1.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    z_loss: float = 0.0
    shrink_paths: Literal["input", "both"] = "both"
    intervals: dict[str, Sequence[tuple[Progress | None, Progress]]] = field(default_factory=dict)
    timeline: Sequence[TimelineEntry] = ()


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


class Track:
    """A number over time: `base` up to the first change, then the ramp and the end of the newest change."""

    def __init__(self, base: float | Callable[[int], float]) -> None:
        self._base, self._places = base, list[int]()
        self._changes: list[tuple[float, float, int]] = []  # from, to, length in samples

    def change(self, at: int, to: float, start: float | None = None, length: int = 0) -> None:
        """From `at` on, `to`; if `length` is not 0, a ramp from `start` (None: the value there) first."""
        start = self.at(at, behind=True) if start is None else start
        self._places.append(at)
        self._changes.append((start, to, length))

    def at(self, consumed: int, *, behind: bool = False, within: int = 0) -> float:
        """The value of the step that ends at `consumed`; `behind`: the limit of the steps after it, where ramps of
        up to `within` samples are over."""
        newest = (bisect_right if behind else bisect_left)(self._places, consumed) - 1
        if newest < 0:
            return self._base(consumed) if callable(self._base) else self._base
        start, to, length = self._changes[newest]
        passed = consumed - self._places[newest]
        return to if passed >= length or (behind and length <= within) else start + (to - start) * passed / length

    @property
    def marks(self) -> list[int]:
        """Where it changes: the places of changes, and the ends of ramps that no other change cuts short."""
        found = set(self._places)
        for number, (_, _, length) in enumerate(self._changes):
            end = self._places[number] + length
            found |= {end} if all(end < later for later in self._places[number + 1 :]) else set()
        return sorted(found)


class Switch(Generic[T]):
    """A choice over time: `base`, or what it was last changed to."""

    def __init__(self, base: T) -> None:
        self._values, self._places = [base], list[int]()

    def change(self, at: int, to: T) -> None:
        """From `at` on, `to`; replaces what was to come later."""
        keep = bisect_right(self._places, at)
        self._places[keep:], self._values[keep + 1 :] = [at], [to]

    def at(self, consumed: int, *, behind: bool = False) -> T:
        """The choice for the step that ends at `consumed`; `behind`: for the steps after it."""
        return self._values[(bisect_right if behind else bisect_left)(self._places, consumed)]


class SteeredValues:
    """The steered values as functions of samples consumed.

    Args:
        steering: values and entries.
        lr, min_lr, curve: the learning rate.
        shrink: embedding shrink without the timeline; None: off.
        place: samples of a place.
        behind: samples of the place that is a duration behind another, which is in samples.

    Raises:
        ValueError: entries cannot be what they say, one in each of its `args`.
    """

    def __init__(
        self,
        steering: Steering,
        *,
        lr: float,
        min_lr: float,
        curve: LearningRateCurve,
        shrink: Callable[[int], float] | None,
        place: Callable[[Progress], int],
        behind: Callable[[int, Progress], int],
    ) -> None:
        self._curve, self._behind = curve, behind
        self._tracks = {
            "lr": Track(lr), "min_lr": Track(min_lr), "lr_scale": Track(steering.lr_scale),
            "weight_decay": Track(steering.weight_decay), "beta1": Track(steering.betas[0]),
            "beta2": Track(steering.betas[1]), "grad_clip": Track(steering.grad_clip),
            "z_loss": Track(steering.z_loss), "embedding_shrink": Track(1.0 if shrink is None else shrink),
        }  # fmt: skip
        self._paths = Switch(steering.shrink_paths)
        self._rewarms: list[tuple[int, int]] = []
        self._intervals = {key: _ranges(key, ranges, place) for key, ranges in steering.intervals.items()}
        self._thresholds: dict[str, Switch[float | None]] = {}
        placed = sorted(((place(entry.at), entry) for entry in steering.timeline), key=lambda pair: pair[0])
        problems = []
        for at, entry in placed:
            try:
                self._enter(at, entry)
            except ValueError as error:
                problems.append(f"timeline, {entry}: {error}")
        if problems:
            raise ValueError(*problems)
        self._check_floor()
        steered = {key.partition(".")[2] for _, entry in placed for key, _ in entry.changes()}
        steered |= {"rewarm"} if self._rewarms else set()
        steered |= {"embedding_shrink"} if shrink is not None else set()
        self.names = tuple(item.name for item in fields(StepValues) if item.name in steered - {"lr"})
        """Fields of `StepValues` that change, besides `lr`."""
        self.entries = [Placed(at, entry, tuple(self._jumps(at, placed))) for at, entry in placed]

    def _enter(self, at: int, entry: TimelineEntry) -> None:
        if entry.continuous:
            assert entry.optimizer.min_lr is not None
            self._re_anchor(at, entry.optimizer.min_lr.to)
        for key, value in entry.changes():
            section, _, name = key.partition(".")
            if isinstance(value, Change):
                length = 0 if value.over is None else self._behind(at, value.over) - at
                names = ("beta1", "beta2") if name == "betas" else (name,)
                for part, to, start in zip(names, _parts(value.to), _parts(value.from_, len(names)), strict=True):
                    self._tracks[part].change(at, to, start, length)
            elif name == "shrink_paths":
                self._paths.change(at, value)
            elif section == "health":
                self._thresholds.setdefault(name, Switch(None)).change(at, value)
            else:
                self._intervals.setdefault(key, Switch(None)).change(at, value)
        if entry.rewarm is not None:
            self._rewarms.append((at, self._behind(at, entry.rewarm) - at))

    def _check_floor(self) -> None:
        for mark in {*self._tracks["lr"].marks, *self._tracks["min_lr"].marks}:
            peak, floor = (self._tracks[name].at(mark, behind=True) for name in ("lr", "min_lr"))
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
        lr = self._curve.lr(at, *(self._tracks[name].at(at, behind=True) for name in ("lr", "min_lr")))
        if floor > lr:
            raise ValueError(f"optimizer.min_lr = {floor:g} is above the learning rate there, {lr:g}")
        self._tracks["lr"].change(at, self._curve.peak_for(lr, at, floor))

    def values_at(self, consumed: int, *, behind: bool = False) -> StepValues:
        """The values of the step that brings the counter to `consumed`; `behind`: the limit of the steps after it, of
        which a ramp that is no longer than a step is no part."""
        step = self._behind(consumed, Progress(1, "step")) - consumed if behind else 0

        def now(name: str) -> float:
            return self._tracks[name].at(consumed, behind=behind, within=step)

        scale, rewarm = now("lr_scale"), 1.0
        for at, length in self._rewarms:
            if at < consumed or (behind and at == consumed):
                rewarm *= min(1.0, (consumed - at) / length)
        return StepValues(
            lr=self._curve.lr(consumed, now("lr"), now("min_lr")) * scale * rewarm,
            lr_scale=scale,
            rewarm=rewarm,
            weight_decay=now("weight_decay"),
            betas=(now("beta1"), now("beta2")),
            grad_clip=now("grad_clip"),
            z_loss=now("z_loss"),
            embedding_shrink=now("embedding_shrink"),
            shrink_paths=self._paths.at(consumed, behind=behind),
        )

    def interval_at(self, key: str, consumed: int) -> Progress | None:
        """The interval `key` (`checkpoint.every`) in force in the step that ends at `consumed`."""
        return self._intervals[key].at(consumed) if key in self._intervals else None

    def thresholds_at(self, consumed: int) -> dict[str, float]:
        """Keys of `[health]` that an entry changed, and their values."""
        found = {name: switch.at(consumed) for name, switch in self._thresholds.items()}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def marks(self) -> list[int]:
        """Places of entries, and where their ramps end."""
        ends = [mark for track in self._tracks.values() for mark in track.marks]
        return sorted({*(placed.at for placed in self.entries), *ends, *(at + length for at, length in self._rewarms)})

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


def _ranges(
    key: str, ranges: Sequence[tuple[Progress | None, Progress]], place: Callable[[Progress], int]
) -> Switch[Progress | None]:
    """Raises ValueError if the ranges are not in order."""
    switch, last = Switch[Progress | None](ranges[0][1] if ranges else None), 0
    for (until, _), (_, following) in pairwise(ranges):
        assert until is not None
        if place(until) <= last:
            raise ValueError(f"{key}: the range until {until} ends before it begins")
        last = place(until)
        switch.change(last, following)
    return switch


def _parts(value: Any, count: int = 1) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,) * count


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
