"""Disk space for the next checkpoint, the record, and temporary files. No torch.

The trainer refuses a save that does not fit, which is late: the trend is visible for days.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_pretrain.checkpoint.disk_space import Room
from fsdp_pretrain.checkpoint.upcoming import FEW, RESERVE, fit
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.statistics import slope
from fsdp_pretrain.units import human_bytes, human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink
from fsdp_pretrain.watchdog.probes.looks import space
from fsdp_pretrain.watchdog.probes.periodic import PeriodicProbe

from .base import Detector
from .checkpoint_age import CheckpointDetector

_DAY, _SHORT = 86400.0, 6 * 3600.0
_LEAST_SAMPLES, _IN_A_ROW = 6, 3
_REACH = 100.0
"""A trend is extrapolated to this many times its observed duration: a minute says nothing about tomorrow."""
_REMEDY = "free space, or keep fewer checkpoints (checkpoint.keep_last, checkpoint.keep_every)"


@dataclass
class WatchedDirectory:
    """A directory whose file system is watched.

    Attributes:
        name: scope of its alarms.
        path: the directory; it need not exist yet.
        holds: it takes checkpoints.
        device: of its file system, at the last probe.
        samples: (time, bytes free) after every checkpoint; `sampled`: how many checkpoints there were then.
        soon_full: consecutive forecasts of a full disk within a day.
    """

    name: str
    path: Path
    holds: bool
    probe: PeriodicProbe
    device: int | None = None
    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=2000))
    sampled: int = 0
    soon_full: int = 0


class DiskSpaceDetector(Detector):
    """Alarms `disk/NAME`, and the forecast `disk-forecast/NAME`.

    Args:
        places: (name, directory, whether it takes checkpoints). Only the first on each file system is judged.
        checkpoints: knows what the next checkpoint takes; None if this node does not watch them.

    Attributes:
        fit: how many checkpoints fit, by place that takes them.
        seconds_to_full: by place, according to the forecast; only places that are filling up.
    """

    def __init__(
        self,
        alarms: AlarmSink,
        places: list[tuple[str, Path, bool]],
        checkpoints: CheckpointDetector | None = None,
    ) -> None:
        super().__init__(alarms)
        self._checkpoints = checkpoints
        self.places = [
            WatchedDirectory(name, path, holds, PeriodicProbe(space, path=str(path))) for name, path, holds in places
        ]
        self.fit: dict[str, int] = {}
        self.seconds_to_full: dict[str, float] = {}

    def tick(self, now: float) -> None:
        """Start due probes, and judge the answers of earlier ones."""
        for number, place in enumerate(self.places):
            answer = place.probe.tick(now)
            if answer is None or answer.error is not None:  # `MountDetector` reports what hangs or fails
                continue
            writing, room = answer.value.pop("writing"), Room(**answer.value)
            place.device = room.device
            if place.device in [other.device for other in self.places[:number]]:
                continue
            if place.holds and self._checkpoints is not None:
                self._judge_fit(place, room, writing, self._checkpoints)
                self._forecast(place, room, writing, self._checkpoints, now)
            else:
                self._judge_rest(place, room)

    def figures(self) -> dict[str, Any]:
        """What is left for checkpoints."""
        name = "checkpoints"
        return {"next_checkpoint_fits": self.fit.get(name), "disk_full_in": self.seconds_to_full.get(name)}

    def _judge_fit(self, place: WatchedDirectory, room: Room, writing: int, checkpoints: CheckpointDetector) -> None:
        if checkpoints.need is None or checkpoints.need.bytes == 0:
            return
        main = place.name == "checkpoints"
        old = checkpoints.prunable if main else None
        found = fit(checkpoints.need, room, writing=writing, old=old)
        self.fit[place.name] = found.count
        fails = found.severity is Severity.CRIT
        if found.severity is not None:
            self.open(
                f"disk/{place.name}",
                found.severity if main else Severity.WARN,
                found.text,
                f"saves will fail there{', and training goes on unprotected' if fails else ' soon'}",
                _REMEDY,
                facts={"path": str(place.path), "free": room.free, "fit": found.count},
            )
        elif found.count > FEW:
            self.resolve(f"disk/{place.name}", f"{found.count} checkpoints fit in {place.path}")

    def _forecast(
        self, place: WatchedDirectory, room: Room, writing: int, checkpoints: CheckpointDetector, now: float
    ) -> None:
        """Forecast when the disk is full, from one sample per checkpoint, so that saving and pruning do not count."""
        if checkpoints.completed == place.sampled or writing:
            return
        place.sampled = checkpoints.completed
        place.samples.append((now, room.free))
        rates = []
        for window in (_DAY, _SHORT):
            recent = [sample for sample in place.samples if sample[0] >= now - window]
            if len(recent) >= _LEAST_SAMPLES:
                rates.append((slope(recent), recent[-1][0] - recent[0][0]))
        rate, seen = min(rates, default=(0.0, 0.0))
        self.seconds_to_full.pop(place.name, None)
        left = room.free / -rate if rate < 0 else float("inf")
        if left <= _REACH * seen:
            self.seconds_to_full[place.name] = left
        soon = left <= _REACH * seen and left < _DAY
        place.soon_full = place.soon_full + 1 if soon else 0
        if place.soon_full >= _IN_A_ROW:
            self.open(
                f"disk-forecast/{place.name}",
                Severity.WARN,
                f"{place.path} will be full in about {human_time(left)}: {human_bytes(room.free)} free, "
                f"{human_bytes(-rate * 3600)} less every hour",
                "saves will fail there then",
                _REMEDY,
            )
        elif not soon:
            self.resolve(f"disk-forecast/{place.name}", f"{place.path} is no longer filling up")

    def _judge_rest(self, place: WatchedDirectory, room: Room) -> None:
        """For the record and temporary files: a share of the bytes and of the inodes should stay free."""
        shares = [room.free / max(1, room.total)] + ([room.files_free / room.files] if room.files else [])
        share, least = min(shares), room.reserved(RESERVE) / max(1, room.total)
        full, free = share < least / 10, human_bytes(room.free)
        if share < least:
            self.open(
                f"disk/{place.name}",
                Severity.CRIT if full else Severity.WARN,
                f"{place.path} is {'full' if full else 'almost full'}: {free} and {room.files_free} files free",
                "the record is kept in memory, and is lost if the job ends"
                if place.name == "run"
                else "data loaders, compilers or communication between ranks may fail",
                "free space or files",
                facts={"path": str(place.path), "free": room.free},
            )
        elif share > 2 * least:
            self.resolve(f"disk/{place.name}", f"{place.path}: {free} free")
