"""Whether mounts answer, corpora are whole, and training waits for data. No torch."""

from __future__ import annotations

import errno
import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from ..record.step_record import StepRecord
from ..severity import Severity
from ..statistics import score
from ..units import human_time
from ..watchdog_sections import StorageSection
from .alarms import Alarms
from .detector import Detector
from .probe import Answer, Look, Looks

_AUDIT_DEADLINE = 600.0
_TWICE = 2
_SLOW_SCORE, _SLOW_FLOOR, _SLOW_IN_A_ROW, _NO_MATTER = 8.0, 0.25, 5, 1.0
_HISTORY, _LEAST_HISTORY = 200, 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WAIT_LEAST, _WAIT_TIMES, _WAIT_STEPS, _WAITS = 5.0, 10.0, 50, 3


@dataclass
class _Mount:
    """A directory that is read from or written to once in a while."""

    path: str
    look: Look
    failures: int = 0
    slow: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))


class Mounts(Detector):
    """Alarms `mount/PATH`, `mount-slow/PATH`, and `data-shard/SOURCE` for corpora that are not whole any more.

    Args:
        alarms: where incidents are told.
        section: `[watchdog.storage]`.
        looks: makes the looks.
        written: directories in which a small file is written.
        corpora: directory of each source. One file is read of those on each file system.
    """

    def __init__(
        self, alarms: Alarms, section: StorageSection, looks: Looks, written: list[Path], corpora: dict[str, Path]
    ) -> None:
        super().__init__(alarms)
        self._looks, self._every, self._deadline = looks, section.interval.value, section.deadline.value
        self._mounts = {str(path): _Mount(str(path), self._look("write", path=str(path))) for path in written}
        self._audits = {
            name: Look(
                looks,
                "corpus",
                every=section.audit.value,
                deadline=max(_AUDIT_DEADLINE, self._deadline),
                path=str(path),
            )
            for name, path in corpora.items()
        }
        self._corpora, self._shards = corpora, dict[str, tuple[int, list[str]]]()
        self.rates: dict[str, float] = {}
        """Documents per packed token of every source, once its manifest was read."""

    def tick(self, now: float) -> None:
        """Look, and take what earlier looks found."""
        for name, audit in self._audits.items():
            answer = audit.tick(now)
            if answer is not None:
                self._judge_corpus(name, answer)
        for mount in list(self._mounts.values()):
            answer = mount.look.tick(now)
            if answer is not None:
                self._judge_mount(mount, answer)

    def _look(self, name: str, **arguments: Any) -> Look:
        return Look(self._looks, name, every=self._every, deadline=self._deadline, **arguments)

    def _judge_corpus(self, name: str, answer: Answer) -> None:
        found, path = answer.value, self._corpora[name]
        wrong = [answer.error] if answer.error is not None else found["wrong"]
        if wrong:
            count = 1 if answer.error is not None else found["count"]
            self._tell_shard(name, f"{count} file{'s' * (count > 1)} of {path}: {wrong[0]}", wrong)
        else:
            self.alarms.resolve(f"data-shard/{name}", f"{path} is whole")
        if answer.error is None:
            if found["rate"] is not None:
                self.rates[name] = found["rate"]
            self._shards[name] = (found["device"], found["shards"])
            self._read_from_each_file_system()

    def _tell_shard(self, name: str, summary: str, wrong: list[str]) -> None:
        self.alarms.open(
            f"data-shard/{name}",
            Severity.CRIT,
            f"source {name}: {summary}",
            effect="training stops when it gets there, unless the source has a mirror",
            remedy="restore the files, or name a copy (data.sources.mirror); see `fsdp-data validate`",
            facts={"wrong": wrong},
        )

    def _read_from_each_file_system(self) -> None:
        """One read at a time for all corpora on a file system: forty sources are mostly on one."""
        devices: dict[int, list[str]] = {}
        for name, (device, _) in self._shards.items():
            devices.setdefault(device, []).append(name)
        for names in devices.values():
            paths = [path for name in names for path in self._shards[name][1]]
            key = str(self._corpora[names[0]])
            if paths and key in self._mounts and "paths" in self._mounts[key].look.arguments:
                self._mounts[key].look.arguments["paths"] = paths
            elif paths and key not in self._mounts:
                self._mounts[key] = _Mount(key, self._look("read", paths=paths))

    # ------------------------------------------------------------------ one mount

    def _judge_mount(self, mount: _Mount, answer: Answer) -> None:
        if answer.error is None or answer.errno in _FULL:
            mount.failures = 0
            self.alarms.resolve(f"mount/{mount.path}", f"{mount.path} answers")
            if answer.error is None:
                self._judge_latency(mount, answer.seconds)
            return
        if answer.errno == errno.ENOENT and "paths" in mount.look.arguments:
            for audit in self._audits.values():  # a shard is gone: find out whose
                audit.soon()
            return
        mount.failures += 1
        if mount.failures >= _TWICE:
            self.alarms.open(
                f"mount/{mount.path}",
                Severity.CRIT,
                f"{mount.path} {'does not answer' if answer.late else 'fails'}: {answer.error}, "
                f"{mount.failures} times in a row",
                effect="reading data or saving will hang or fail",
                remedy="see whether the file system is mounted and its servers answer",
                facts={"hanging": answer.late},
            )

    def _judge_latency(self, mount: _Mount, seconds: float) -> None:
        known, value = mount.latencies, math.log(max(1e-5, seconds))
        slow = len(known) >= _LEAST_HISTORY and seconds > _NO_MATTER and score(value, known, _SLOW_FLOOR) > _SLOW_SCORE
        mount.slow = mount.slow + 1 if slow else 0
        if not slow:
            known.append(value)
            self.alarms.resolve(f"mount-slow/{mount.path}", f"{mount.path} answers in {human_time(seconds)}")
        elif mount.slow >= _SLOW_IN_A_ROW:
            self.alarms.open(
                f"mount-slow/{mount.path}",
                Severity.WARN,
                f"{mount.path} took {human_time(seconds)} to answer, {mount.slow} times in a row slow",
                effect="reading data and saving may become slow",
                remedy="see whether something else uses the storage",
            )


class Waits(Detector):
    """Alarm `data-wait`: steps wait for data."""

    def __init__(self, alarms: Alarms) -> None:
        super().__init__(alarms)
        self._known: deque[float] = deque(maxlen=512)
        self._long: deque[bool] = deque(maxlen=_WAIT_STEPS)

    def step(self, record: StepRecord) -> None:
        """Look at a record."""
        super().step(record)
        seconds, read = record.seconds.data, record.data_read
        long = seconds > _WAIT_LEAST and seconds > _WAIT_TIMES * self._highest()
        self._long.append(long)
        if not long:
            self._known.append(seconds)
        if sum(self._long) >= _WAITS:
            self.alarms.open(
                "data-wait",
                Severity.WARN,
                f"{sum(self._long)} of {len(self._long)} steps waited long for data, the last {human_time(seconds)}",
                effect="training stands still meanwhile",
                remedy="see whether the storage of the corpora is slow"
                + (f"; the slowest read was of {read.file}" if read.file else ""),
                step=record.step,
            )
        elif not any(self._long):
            self.alarms.resolve("data-wait", "steps do not wait for data any more", step=record.step)

    def _highest(self) -> float:
        return quantiles(self._known, n=100, method="inclusive")[98] if len(self._known) > 1 else 0.0
