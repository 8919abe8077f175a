"""Room on file systems: for the next checkpoint, for the record, for temporary files. No torch.

The trainer refuses a save that does not fit; by then it is late. From outside the shrinking can be seen for days.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..severity import Severity
from ..statistics import slope
from ..units import human_bytes, human_time
from ..watchdog_sections import StorageSection
from .alarms import Alarms
from .checkpoints import Checkpoints
from .detector import Detector
from .probe import Look, Looks

_LARGEST_RESERVE = 20 << 30
_MARGIN = 1.05
_FEW, _ENOUGH = 3, 4
_SPARE_FILES = 100
_DAY, _SHORT = 86400.0, 6 * 3600.0
_LEAST_SAMPLES, _IN_A_ROW = 6, 3
_REACH = 100.0
"""A trend is continued for so many times as long as it was seen: what a minute shows says nothing of tomorrow."""


@dataclass
class Place:
    """A directory whose file system is watched.

    Attributes:
        name: scope of its alarms.
        path: the directory; it need not exist yet.
        holds: it takes checkpoints.
    """

    name: str
    path: Path
    holds: bool
    look: Look = field(repr=False)
    device: int | None = None


class Space(Detector):
    """Alarms `disk/NAME`, and the forecast `disk-forecast/NAME`.

    Args:
        alarms: where incidents are told.
        section: `[watchdog.storage]`.
        looks: makes the looks.
        places: (name, directory, whether it takes checkpoints). A later one on the file system of an earlier one is
            passed over.
        checkpoints: knows what the next checkpoint takes; None if this node does not watch them.
    """

    def __init__(
        self,
        alarms: Alarms,
        section: StorageSection,
        looks: Looks,
        places: list[tuple[str, Path, bool]],
        checkpoints: Checkpoints | None = None,
    ) -> None:
        super().__init__(alarms)
        self._section, self._checkpoints = section, checkpoints
        every, deadline = section.interval.value, section.deadline.value
        self.places = [
            Place(
                name, path, holds, Look(looks, "space", every=every, deadline=deadline, path=str(path), attempts=holds)
            )
            for name, path, holds in places
        ]
        self._samples: dict[str, deque[tuple[float, float]]] = {place.name: deque(maxlen=2000) for place in self.places}
        self._sampled = dict.fromkeys(self._samples, 0)
        self._soon_full = dict.fromkeys(self._samples, 0)
        self.free: dict[str, int] = {}
        """Bytes of every place at the last look."""
        self.fit: dict[str, int] = {}
        """How many checkpoints fit, of places that take them."""
        self.seconds_to_full: dict[str, float] = {}
        """By the forecast; only of places that fill."""

    def tick(self, now: float) -> None:
        """Look, and take what earlier looks found."""
        for place in self.places:
            answer = place.look.tick(now)
            if answer is None or answer.error is not None:  # what hangs or fails is told by `Mounts`
                continue
            place.device = answer.value["device"]
            before = self.places[: self.places.index(place)]
            if place.device in [other.device for other in before]:
                continue
            self.free[place.name] = answer.value["free"]
            if place.holds and self._checkpoints is not None:
                self._judge_fit(place, answer.value, self._checkpoints)
                self._forecast(place, answer.value, self._checkpoints, now)
            else:
                self._judge_rest(place, answer.value)

    # ------------------------------------------------------------------ checkpoints

    def _judge_fit(self, place: Place, found: dict[str, Any], checkpoints: Checkpoints) -> None:
        """How many checkpoints fit. What the save in flight has written already counts as free for it."""
        need = checkpoints.need
        if need is None or need.bytes == 0:
            return
        reserve = min(_LARGEST_RESERVE, int(self._section.reserve * found["total"]))
        free = found["free"] + found["writing"]
        fit = int((free - reserve) // (_MARGIN * need.bytes))
        lacking = f"{human_bytes(found['free'])} free, a checkpoint takes {human_bytes(need.bytes)}"
        if found["files"]:
            by_files = max(0, found["files_free"] - _SPARE_FILES) // max(1, need.files)
            if by_files < fit:
                fit, lacking = by_files, f"room for {found['files_free']} files, a checkpoint has {need.files}"
        self.fit[place.name] = fit = max(0, fit)
        key, facts = f"disk/{place.name}", {"path": str(place.path), "free": found["free"], "fit": fit}
        if fit < 1:
            self._open(
                key,
                Severity.CRIT if place.name == "checkpoints" else Severity.WARN,
                f"the next checkpoint will not fit in {place.path}: {lacking}",
                effect="saves will fail there, and training goes on unprotected",
                facts=facts,
            )
        elif fit < _FEW:
            self._open(
                key,
                Severity.WARN,
                f"{fit} more checkpoint{'s' * (fit > 1)} fit in {place.path}: {lacking}",
                effect="saves will fail there soon",
                facts=facts,
            )
        elif fit >= _ENOUGH:
            self.alarms.resolve(key, f"{fit} checkpoints fit in {place.path}", step=self.at)

    def _open(self, key: str, severity: Severity, summary: str, **more: Any) -> None:
        remedy = "free space or files, or keep fewer checkpoints (checkpoint.keep_last, checkpoint.keep_every)"
        self.alarms.open(key, severity, summary, step=self.at, remedy=remedy, **more)

    def _forecast(self, place: Place, found: dict[str, Any], checkpoints: Checkpoints, now: float) -> None:
        """When there will be no room, from samples that our own saw-tooth is not in: one per checkpoint."""
        name = place.name
        if checkpoints.completed == self._sampled[name] or found["writing"]:
            return
        self._sampled[name] = checkpoints.completed
        samples = self._samples[name]
        samples.append((now, float(found["free"])))
        rates = []
        for window in (_DAY, _SHORT):
            recent = [sample for sample in samples if sample[0] >= now - window]
            if len(recent) >= _LEAST_SAMPLES:
                rates.append((slope(recent), recent[-1][0] - recent[0][0]))
        rate, seen = min(rates, default=(0.0, 0.0))
        self.seconds_to_full.pop(name, None)
        if rate < 0 and found["free"] / -rate <= _REACH * seen:
            self.seconds_to_full[name] = found["free"] / -rate
        soon = self.seconds_to_full.get(name, _DAY) < _DAY
        self._soon_full[name] = self._soon_full[name] + 1 if soon else 0
        key = f"disk-forecast/{name}"
        if self._soon_full[name] >= _IN_A_ROW:
            left = human_time(self.seconds_to_full[name])
            self._open(
                key,
                Severity.WARN,
                f"{place.path} will be full in about {left}: {human_bytes(found['free'])} free, "
                f"{human_bytes(-rate * 3600)} less every hour",
                effect="saves will fail there then",
            )
        elif not soon:
            self.alarms.resolve(key, f"{place.path} does not fill any more", step=self.at)

    # ------------------------------------------------------------------ everything else

    def _judge_rest(self, place: Place, found: dict[str, Any]) -> None:
        """The record, temporary files: a share of the file system, or of files, should be left."""
        share = found["free"] / max(1, found["total"])
        if found["files"]:
            share = min(share, found["files_free"] / found["files"])
        least = min(self._section.reserve, _LARGEST_RESERVE / max(1, found["total"]))
        key, free = f"disk/{place.name}", human_bytes(found["free"])
        if share < least:
            self.alarms.open(
                key,
                Severity.CRIT if share < least / 10 else Severity.WARN,
                f"{place.path} is {'full' if share < least / 10 else 'almost full'}: {free} and "
                f"{found['files_free']} files free",
                effect="the record waits in memory, and is lost if the job ends"
                if place.name == "run"
                else "data loaders, compilers or communication between ranks may fail",
                remedy="free space or files",
                step=self.at,
                facts={"path": str(place.path), "free": found["free"]},
            )
        elif share > 2 * least:
            self.alarms.resolve(key, f"{place.path}: {free} free", step=self.at)
