"""Whether mounts answer, corpora are intact, and training waits for data. No torch."""

from __future__ import annotations

import errno
import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from fsdp_pretrain.record.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.statistics import score
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink
from fsdp_pretrain.watchdog.probes.client import AUDIT_DEADLINE, AUDIT_SECONDS, PeriodicProbe, ProbeAnswer, ProbeServer

from .base import Detector

_TWICE = 2
_SLOW_SCORE, _SLOW_FLOOR, _SLOW_IN_A_ROW, _NO_MATTER = 8.0, 0.25, 5, 1.0
_HISTORY, _LEAST_HISTORY = 200, 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WAIT_LEAST, _WAIT_TIMES, _WAIT_STEPS, _WAITS = 5.0, 10.0, 50, 3


@dataclass
class _Mount:
    """A directory that is periodically read from or written to."""

    path: str
    probe: PeriodicProbe
    failures: int = 0
    slow: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))


class MountDetector(Detector):
    """Alarms `mount/PATH`, `mount-slow/PATH`, and `data-shard/SOURCE` for corpora that are not intact.

    Args:
            probed: directories in which a small file is written.
            corpora: directory of each source. One file is read per file system.

        Attributes:
            rates: documents per packed token of every source, once its manifest was read.
    """

    def __init__(
        self,
        alarms: AlarmSink,
        probes: ProbeServer,
        probed: list[Path],
        corpora: dict[str, Path],
    ) -> None:
        super().__init__(alarms)
        self._probes = probes
        self._mounts = {str(path): _Mount(str(path), self._probe("write", path=str(path))) for path in probed}
        self._audits = {
            name: PeriodicProbe(probes, "corpus", AUDIT_SECONDS, AUDIT_DEADLINE, path=str(path))
            for name, path in corpora.items()
        }
        self._corpora, self._shards = corpora, dict[str, tuple[int, list[str]]]()
        self.rates: dict[str, float] = {}

    def tick(self, now: float) -> None:
        """Start due probes, and judge the answers of earlier ones."""
        for name, audit in self._audits.items():
            answer = audit.tick(now)
            if answer is not None:
                self._judge_corpus(name, answer)
        for mount in list(self._mounts.values()):
            answer = mount.probe.tick(now)
            if answer is not None:
                self._judge_mount(mount, answer)

    def _probe(self, name: str, **arguments: Any) -> PeriodicProbe:
        return PeriodicProbe(self._probes, name, **arguments)

    def _judge_corpus(self, name: str, answer: ProbeAnswer) -> None:
        path = self._corpora[name]
        found: dict[str, Any] = answer.value if answer.error is None else {"wrong": [answer.error], "count": 1}
        if found["wrong"]:
            self.open(
                f"data-shard/{name}",
                Severity.CRIT,
                f"source {name}: {found['count']} file{'s' * (found['count'] > 1)} of {path}: {found['wrong'][0]}",
                "training stops when it reads them, unless the source has a mirror",
                "restore the files, or name a copy (data.sources.mirror); see `fsdp-data validate`",
                facts={"wrong": found["wrong"]},
            )
        else:
            self.resolve(f"data-shard/{name}", f"{path} is intact")
        if answer.error is None:
            if found["rate"] is not None:
                self.rates[name] = found["rate"]
            self._shards[name] = (found["device"], found["shards"])
            self._read_from_each_file_system()

    def _read_from_each_file_system(self) -> None:
        """Probe one file at a time per file system: forty sources are mostly on one."""
        for device in {device for device, _ in self._shards.values()}:
            names = [name for name, (where, _) in self._shards.items() if where == device]
            paths = [path for name in names for path in self._shards[name][1]]
            key = str(self._corpora[names[0]])
            if not paths:
                continue
            if key not in self._mounts:
                self._mounts[key] = _Mount(key, self._probe("read", paths=paths))
            elif "paths" in self._mounts[key].probe.arguments:
                self._mounts[key].probe.arguments["paths"] = paths

    # ------------------------------------------------------------------ one mount

    def _judge_mount(self, mount: _Mount, answer: ProbeAnswer) -> None:
        if answer.error is None or answer.errno in _FULL:
            mount.failures = 0
            self.resolve(f"mount/{mount.path}", f"{mount.path} answers")
            if answer.error is None:
                self._judge_latency(mount, answer.seconds)
            return
        if answer.errno == errno.ENOENT and "paths" in mount.probe.arguments:
            for audit in self._audits.values():  # a shard is gone: find out of which corpus
                audit.due = 0.0
            return
        mount.failures += 1
        if mount.failures >= _TWICE:
            self.open(
                f"mount/{mount.path}",
                Severity.CRIT,
                f"{mount.path} {'does not answer' if answer.late else 'fails'}: {answer.error}, "
                f"{mount.failures} times in a row",
                "reading data or saving will hang or fail",
                "check that the file system is mounted and its servers respond",
                facts={"hanging": answer.late},
            )

    def _judge_latency(self, mount: _Mount, seconds: float) -> None:
        known, value = mount.latencies, math.log(max(1e-5, seconds))
        slow = len(known) >= _LEAST_HISTORY and seconds > _NO_MATTER and score(value, known, _SLOW_FLOOR) > _SLOW_SCORE
        mount.slow = mount.slow + 1 if slow else 0
        if not slow:
            known.append(value)
            self.resolve(f"mount-slow/{mount.path}", f"{mount.path} answers in {human_time(seconds)}")
        elif mount.slow >= _SLOW_IN_A_ROW:
            self.open(
                f"mount-slow/{mount.path}",
                Severity.WARN,
                f"{mount.path} took {human_time(seconds)} to answer, {mount.slow} times in a row slow",
                "reading data and saving may become slow",
                "check whether something else uses the storage",
            )


class DataWaitDetector(Detector):
    """Alarm `data-wait`: steps wait for data."""

    def __init__(self, alarms: AlarmSink) -> None:
        super().__init__(alarms)
        self._known: deque[float] = deque(maxlen=512)
        self._long: deque[bool] = deque(maxlen=_WAIT_STEPS)

    def step(self, record: StepRecord) -> None:
        """Compare the wait of a step with the 99% quantile of earlier ones."""
        super().step(record)
        seconds, file = record.seconds.data, record.data_read.file
        usual = quantiles(self._known, n=100, method="inclusive")[98] if len(self._known) > 1 else 0.0
        self._long.append(seconds > max(_WAIT_LEAST, _WAIT_TIMES * usual))
        if not self._long[-1]:
            self._known.append(seconds)
        if sum(self._long) >= _WAITS:
            self.open(
                "data-wait",
                Severity.WARN,
                f"{sum(self._long)} of {len(self._long)} steps waited long for data, the last {human_time(seconds)}",
                "training stands still meanwhile",
                "check whether the storage of the corpora is slow"
                + (f"; the slowest read was of {file}" if file else ""),
            )
        elif not any(self._long):
            self.resolve("data-wait", "steps do not wait for data any more")
