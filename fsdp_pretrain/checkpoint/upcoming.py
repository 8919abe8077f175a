"""Whether the next checkpoint fits on disk, and whether it is late.

`plan`, `launch`, `status` and the watchdog share these rules, so they cannot contradict each other. Only the trainer,
which knows the size of a save to the byte, may also use the margin and the reserve: `disk_space.make_room`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import quantiles
from typing import Any

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.run import journal
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import Progress, human_time

from .disk_space import Room, SpaceNeeded, attempts, prunable
from .store import Store

FEW = 3
"""If fewer checkpoints than this fit, that is a warning."""
RESERVE = 0.01
"""Share of a file system, at most 20 GiB, that does not count as room for checkpoints."""
CHECK_SECONDS = 60.0
"""Seconds between two checks of a file system by the watchdog."""
SAVES = 20
"""Number of recent saves used to estimate the duration of one."""
_MARGIN, _SPARE_FILES = 1.05, 100
_FILES_BESIDE = 2
_LATE, _VERY_LATE, _TOO_LATE = 1.5, 2.5, 4.0
"""Thresholds of `Late`, in intervals without a verified checkpoint."""
_UNPROTECTED_SECONDS = 6 * 3600.0
"""Age of the newest verified checkpoint that is too late if the next one is overdue, however long the intervals are."""


def need_after(size: int, files: int) -> SpaceNeeded:
    """Space that the next checkpoint needs, given the size and number of files in the newest one's manifest."""
    return SpaceNeeded(size, files + _FILES_BESIDE)


def first_need(size: int, world: int) -> SpaceNeeded:
    """Space that the first checkpoint of a run needs, given the bytes of its tensors, on `world` ranks."""
    return SpaceNeeded(size, world + 1)


@dataclass(frozen=True)
class Fit:
    """How many more checkpoints fit; `severity` is None if enough do."""

    count: int  # how many fit without deleting anything
    severity: Severity | None  # CRIT: the next one does not fit even after deleting old ones; WARN: few fit
    text: str  # the result in words
    room: Room  # the free space that this is based on


def fit(need: SpaceNeeded, room: Room, *, writing: int = 0, old: SpaceNeeded | None = None) -> Fit:
    """How many more checkpoints fit.

    Args:
        writing: bytes written by saves in flight; counted as free, since they are part of the next checkpoint.
        old: space of checkpoints that may be deleted to make room.
    """

    def count(more: SpaceNeeded) -> int:
        fitting = (room.free + writing + more.bytes - room.reserved(RESERVE)) // (_MARGIN * need.bytes)
        if room.files:
            fitting = min(fitting, (room.files_free + more.files - _SPARE_FILES) // need.files)
        return max(0, int(fitting))

    now, pruned, compared = count(SpaceNeeded(0, 0)), count(old or SpaceNeeded(0, 0)), need.compare(room)
    if not pruned:
        return Fit(now, Severity.CRIT, f"the next checkpoint does not fit: {compared}", room)
    if not now:
        return Fit(now, Severity.WARN, f"the next checkpoint fits only when older ones are deleted: {compared}", room)
    text = f"{now} more checkpoint{'s fit' if now > 1 else ' fits'}: each {compared}"
    return Fit(now, Severity.WARN if now < FEW else None, text, room)


def next_fit(run: RunDir, config: Config, need: SpaceNeeded | None = None) -> Fit | None:
    """Whether the next checkpoint of a run fits in its directory.

    Args:
        need: space that it needs, used if the run has no checkpoint and no recorded start.

    Returns:
        None if the size is unknown.

    Raises:
        UserError, OSError: the directory cannot be read.
    """
    store = Store(run.checkpoints)
    newest = store.newest()
    if newest is not None:
        files = newest.files()
        need = need_after(sum(entry.bytes for entry in files), len(files))
    else:
        starts = [entry for entry in journal.read(run) if entry["kind"] == "start" and entry.get("checkpoint_bytes")]
        need = first_need(starts[-1]["checkpoint_bytes"], starts[-1].get("world") or 1) if starts else need
    if need is None or not need.bytes:
        return None
    writing = sum(attempts(run.checkpoints).values())
    return fit(need, Room.of(run.checkpoints), writing=writing, old=prunable(store.scan()))


class Late(IntEnum):
    """How late a checkpoint is. The watchdog warns at LATE, requests a save at VERY_LATE and a stop at TOO_LATE."""

    NO, LATE, VERY_LATE, TOO_LATE = range(4)


@dataclass(frozen=True)
class UnsavedTraining:
    """Training since the last verified checkpoint."""

    every: Progress  # `checkpoint.every`
    steps: int  # this and the next two: trained since then
    samples: int
    tokens: int
    age: float  # seconds since then
    step_seconds: float = 0.0  # typical duration of a step; 0 if unknown
    save_seconds: float = 0.0  # longest duration of a save

    @property
    def intervals(self) -> float:
        """Intervals passed by progress, or by time if those are fewer: while a run stalls, it has nothing to lose."""
        seconds = self._interval
        return min(self._by_progress, self.age / seconds) if seconds else self._by_progress

    @property
    def _by_progress(self) -> float:
        """Intervals passed by progress."""
        return {"step": self.steps, "sample": self.samples, "token": self.tokens}[self.every.unit] / self.every.value

    @property
    def _interval(self) -> float:
        """Seconds per interval."""
        return self.steps * self.step_seconds / self._by_progress if self._by_progress > 0 else 0.0

    def late(self) -> Late:
        """How late the next checkpoint is. Ages below the watchdog's check interval are not late."""
        allowed = max(_LATE * self._interval + self.save_seconds, CHECK_SECONDS)
        if self.age <= allowed or self.intervals <= _LATE:
            return Late.NO
        if self.age > max(_UNPROTECTED_SECONDS, allowed) or self.intervals > _TOO_LATE:
            return Late.TOO_LATE
        return Late.VERY_LATE if self.intervals > _VERY_LATE else Late.LATE

    def __str__(self) -> str:
        return f"no checkpoint was verified for {human_time(self.age)}, {self.intervals:.1f} intervals"


def unsaved_training(intervals: Iterable[Progress], **trained: Any) -> UnsavedTraining:
    """By the longest of these intervals between checkpoints, that of the last save and the present one: a shorter one
    counts from the next save on. `trained`: the other attributes."""
    return min((UnsavedTraining(every, **trained) for every in intervals), key=lambda unsaved: unsaved.intervals)


def longest_save(seconds: Sequence[float]) -> float:
    """The 99% quantile of save durations."""
    if len(seconds) < 2:
        return sum(seconds)
    return min(max(seconds), quantiles(seconds, n=100, method="inclusive")[98])
