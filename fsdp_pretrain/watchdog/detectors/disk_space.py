"""Disk space for the next checkpoint, the record, and temporary files.

The trainer refuses a save that does not fit, which is late: the trend is visible for days.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from fsdp_pretrain.checkpoint.disk_space import Room
from fsdp_pretrain.checkpoint.upcoming import FEW, RESERVE, fit
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.statistics import slope
from fsdp_pretrain.units import human_bytes, human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .base import Detector
from .checkpoint_age import CheckpointDetector
from .looks import space
from .periodic import PeriodicProbe

_DAY, _SHORT = 86400.0, 6 * 3600.0
_LEAST_SAMPLES, _IN_A_ROW = 6, 3
_REACH = 100.0
"""A trend is extrapolated to this many times its observed duration: a minute says nothing about tomorrow."""
_REMEDY = "free space, or keep fewer checkpoints (checkpoint.keep_last, checkpoint.keep_every)"


class DiskSpaceDetector(Detector):
    """Alarms `disk/NAME`, and the forecast `disk-forecast/checkpoints`.

    Args:
        places: name -> directory, which need not exist yet. Only the first on each file system is judged.
        checkpoints: knows what the next checkpoint takes, for the place `checkpoints`.

    Attributes:
        probes: by place.
        fit: how many checkpoints fit; None if not known.
        seconds_to_full: according to the forecast; None unless the place of the checkpoints is filling up.
    """

    def __init__(
        self, alarms: AlarmSink, places: dict[str, Path], checkpoints: CheckpointDetector | None = None
    ) -> None:
        super().__init__(alarms)
        self._places, self._checkpoints = places, checkpoints
        self.probes = {name: PeriodicProbe(space, path=str(path)) for name, path in places.items()}
        self._devices: dict[str, int] = {}
        self._samples: deque[tuple[float, int]] = deque(maxlen=2000)  # (time, bytes free) after every checkpoint
        self._sampled = self._soon_full = 0  # checkpoints sampled; forecasts in a row of a full disk within a day
        self.fit: int | None = None
        self.seconds_to_full: float | None = None

    def tick(self, now: float) -> None:
        """Start due probes, and judge the answers of earlier ones."""
        for name, probe in self.probes.items():
            answer = probe.tick(now)
            if answer is None or answer.error is not None:  # `MountDetector` reports what hangs or fails
                continue
            writing, room = answer.value.pop("writing"), Room(**answer.value)
            self._devices[name] = room.device
            first = next(place for place in self._places if self._devices.get(place) == room.device)
            if first != name:
                continue
            if self._checkpoints is not None and name == "checkpoints":
                self._judge_fit(room, writing, self._checkpoints)
                self._forecast(room, writing, self._checkpoints, now)
            else:
                self._judge_rest(name, room)

    def figures(self) -> dict[str, Any]:
        """What is left for checkpoints."""
        return {"next_checkpoint_fits": self.fit, "disk_full_in": self.seconds_to_full}

    def _judge_fit(self, room: Room, writing: int, checkpoints: CheckpointDetector) -> None:
        if checkpoints.need is None or checkpoints.need.bytes == 0:
            return
        path, found = (
            self._places["checkpoints"],
            fit(checkpoints.need, room, writing=writing, old=checkpoints.prunable),
        )
        self.fit = found.count
        if found.severity is not None:
            fails = found.severity is Severity.CRIT
            self.open(
                "disk/checkpoints",
                found.severity,
                found.text,
                f"saves will fail there{', and training goes on unprotected' if fails else ' soon'}",
                _REMEDY,
                facts={"path": str(path), "free": room.free, "fit": found.count},
            )
        elif found.count > FEW:
            self.resolve("disk/checkpoints", f"{found.count} checkpoints fit in {path}")

    def _forecast(self, room: Room, writing: int, checkpoints: CheckpointDetector, now: float) -> None:
        """Forecast when the disk is full, from one sample per checkpoint, so that saving and pruning do not count."""
        if checkpoints.completed == self._sampled or writing:
            return
        self._sampled = checkpoints.completed
        self._samples.append((now, room.free))
        rates = []
        for window in (_DAY, _SHORT):
            recent = [sample for sample in self._samples if sample[0] >= now - window]
            if len(recent) >= _LEAST_SAMPLES:
                rates.append((slope(recent), recent[-1][0] - recent[0][0]))
        rate, seen = min(rates, default=(0.0, 0.0))
        left = room.free / -rate if rate < 0 else float("inf")
        self.seconds_to_full = left if left <= _REACH * seen else None
        soon = self.seconds_to_full is not None and left < _DAY
        self._soon_full = self._soon_full + 1 if soon else 0
        path = self._places["checkpoints"]
        if self._soon_full >= _IN_A_ROW:
            self.open(
                "disk-forecast/checkpoints",
                Severity.WARN,
                f"{path} will be full in about {human_time(left)}: {human_bytes(room.free)} free, "
                f"{human_bytes(-rate * 3600)} less every hour",
                "saves will fail there then",
                _REMEDY,
            )
        elif not soon:
            self.resolve("disk-forecast/checkpoints", f"{path} is no longer filling up")

    def _judge_rest(self, name: str, room: Room) -> None:
        """For the record and temporary files: a share of the bytes and of the inodes should stay free."""
        path = self._places[name]
        shares = [room.free / max(1, room.total)] + ([room.files_free / room.files] if room.files else [])
        share, least = min(shares), room.reserved(RESERVE) / max(1, room.total)
        full, free = share < least / 10, human_bytes(room.free)
        if share < least:
            self.open(
                f"disk/{name}",
                Severity.CRIT if full else Severity.WARN,
                f"{path} is {'full' if full else 'almost full'}: {free} and {room.files_free} files free",
                "the record is kept in memory, and is lost if the job ends"
                if name == "run"
                else "data loaders, compilers or communication between ranks may fail",
                "free space or files",
                facts={"path": str(path), "free": room.free},
            )
        elif share > 2 * least:
            self.resolve(f"disk/{name}", f"{path}: {free} free")
