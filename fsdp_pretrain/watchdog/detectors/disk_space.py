"""Watches disk space for the next checkpoint, the record, and temporary files.

The trainer refuses a save that does not fit; these detectors warn earlier, since the trend is visible for days.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_pretrain.checkpoint.disk_space import Room, SpaceNeeded
from fsdp_pretrain.checkpoint.upcoming import FEW, RESERVE, first_need, fit, need_after
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.statistics import slope
from fsdp_pretrain.units import human_bytes, human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .base import Detector
from .checkpoint_store import StoreDetector, StoreState
from .periodic import PeriodicProbe

_DAY, _SHORT = 86400.0, 6 * 3600.0
_LEAST_SAMPLES, _IN_A_ROW = 6, 3
_REACH = 100.0
"""Limit of extrapolation, in observed durations of the trend: a minute proves nothing about tomorrow."""
_REMEDY = "free space, or keep fewer checkpoints (checkpoint.keep_last, checkpoint.keep_every)"


class CheckpointSpaceDetector(StoreDetector):
    """Alarm `disk/checkpoints`, and the forecast `disk-forecast/checkpoints`.

    Attributes:
        fit: number of further checkpoints that fit; None if unknown.
        seconds_to_full: forecast of a full file system; None unless it is filling up.
    """

    def __init__(self, alarms: AlarmSink, segment: int, store: Path) -> None:
        super().__init__(alarms, segment)
        self._store = store
        self._need: SpaceNeeded | None = None
        self._samples: deque[tuple[float, int]] = deque(maxlen=2000)  # (time, bytes free) after every checkpoint
        self._sampled: int | None = None  # step of the last sample
        self._soon_full = 0  # consecutive forecasts of a full disk within a day
        self.fit: int | None = None
        self.seconds_to_full: float | None = None

    def figures(self) -> dict[str, Any]:
        """Number of checkpoints that fit, and the forecast."""
        return {"next_checkpoint_fits": self.fit, "disk_full_in": self.seconds_to_full}

    def judge(self, state: StoreState, now: float) -> None:
        """Judge the space for the next checkpoint, and forecast."""
        for entry in filter(self.is_mine, state.entries):
            if entry["kind"] == "start" and entry.get("checkpoint_bytes"):
                self._need = self._need or first_need(entry["checkpoint_bytes"], entry.get("world") or 1)
        if state.newest is not None:
            files = state.newest.files
            self._need = need_after(sum(entry.bytes for entry in files), len(files))
        if self._need is not None and self._need.bytes:
            self._judge_fit(self._need, state)
        if state.verified is not None and state.verified.step != self._sampled and not state.writing:
            self._sampled = state.verified.step
            self._forecast(state.room, now)

    def _judge_fit(self, need: SpaceNeeded, state: StoreState) -> None:
        forecast = fit(need, state.room, writing=sum(state.writing.values()), old=state.prunable)
        self.fit = forecast.count
        if forecast.severity is not None:
            fails = forecast.severity is Severity.CRIT
            self.open(
                "disk/checkpoints",
                forecast.severity,
                forecast.text,
                f"saves will fail there{', and training continues unprotected' if fails else ' soon'}",
                _REMEDY,
                facts={"path": str(self._store), "free": state.room.free, "fit": forecast.count},
            )
        elif forecast.count > FEW:
            self.resolve("disk/checkpoints", f"{forecast.count} checkpoints fit in {self._store}")

    def _forecast(self, room: Room, now: float) -> None:
        """Forecast when the disk is full, from one sample per checkpoint, so that saving and pruning do not count."""
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
        if self._soon_full >= _IN_A_ROW:
            self.open(
                "disk-forecast/checkpoints",
                Severity.WARN,
                f"{self._store} will be full in about {human_time(left)}: {human_bytes(room.free)} free, "
                f"{human_bytes(-rate * 3600)} less every hour",
                "saves will fail there then",
                _REMEDY,
            )
        elif not soon:
            self.resolve("disk-forecast/checkpoints", f"{self._store} is no longer filling up")


class DiskSpaceDetector(Detector):
    """Alarms `disk/NAME`: a share of the bytes and of the inodes should stay free for the record and temporary files.

    Args:
        places: directories by name; they need not exist yet. Only the first on each file system is judged.
        store: directory of checkpoints, if another detector judges its file system.
    """

    def __init__(self, alarms: AlarmSink, places: dict[str, Path], store: Path | None = None) -> None:
        super().__init__(alarms)
        self._places = places if store is None else {"checkpoints": store, **places}
        self._probes = {name: PeriodicProbe(partial(Room.of, path)) for name, path in self._places.items()}
        self._devices: dict[str, int] = {}

    def tick(self, now: float) -> None:
        """Start due probes, and judge the answers of earlier ones."""
        for name, probe in self._probes.items():
            if (room := probe.result(now)) is not None:
                self._devices[name] = room.device
                first = next(place for place in self._places if self._devices.get(place) == room.device)
                if name == first != "checkpoints":
                    self._judge(name, room)

    def _judge(self, name: str, room: Room) -> None:
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
