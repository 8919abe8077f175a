"""Whether mounts answer, corpora are intact, and training waits for data."""

from __future__ import annotations

import errno
from collections import Counter, deque
from pathlib import Path
from statistics import quantiles
from typing import Any

from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from . import looks
from .base import Detector
from .periodic import AUDIT_DEADLINE, AUDIT_SECONDS, PeriodicProbe, ProbeAnswer

_TWICE = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WAIT_LEAST, _WAIT_TIMES, _WAIT_STEPS, _WAITS = 5.0, 10.0, 50, 3


class MountDetector(Detector):
    """Alarms `mount/PATH`, and `data-shard/SOURCE` for corpora that are not intact.

    Args:
        probed: directories in which a small file is written.
        corpora: directory of each source. One file is read per file system.
    """

    def __init__(
        self,
        alarms: AlarmSink,
        probed: list[Path],
        corpora: dict[str, Path],
    ) -> None:
        super().__init__(alarms)
        self._mounts = {str(path): PeriodicProbe(looks.write, path=str(path)) for path in probed}
        self._failures = Counter[str]()  # in a row, by path
        self._audits = {
            name: PeriodicProbe(looks.corpus, AUDIT_SECONDS, AUDIT_DEADLINE, path=str(path))
            for name, path in corpora.items()
        }
        self._corpora, self._shards = corpora, dict[str, tuple[int, list[str]]]()

    def tick(self, now: float) -> None:
        """Start due probes, and judge the answers of earlier ones."""
        for name, audit in self._audits.items():
            answer = audit.tick(now)
            if answer is not None:
                self._judge_corpus(name, answer)
        for path, probe in list(self._mounts.items()):
            answer = probe.tick(now)
            if answer is not None:
                self._judge_mount(path, probe, answer)

    def _judge_corpus(self, name: str, answer: ProbeAnswer) -> None:
        path = self._corpora[name]
        found: dict[str, Any] = answer.value if answer.error is None else {"wrong": [answer.error], "count": 1}
        if found["wrong"]:
            self.open(
                f"data-shard/{name}",
                Severity.CRIT,
                f"source {name}: {found['count']} file{'s' * (found['count'] > 1)} of {path}: {found['wrong'][0]}",
                "training stops when it reads them",
                "restore the files, or set the path to a copy; see `fsdp-data validate`",
                facts={"wrong": found["wrong"]},
            )
        else:
            self.resolve(f"data-shard/{name}", f"{path} is intact")
        if answer.error is None:
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
                self._mounts[key] = PeriodicProbe(looks.read, paths=paths)
            elif "paths" in self._mounts[key].arguments:
                self._mounts[key].arguments["paths"] = paths

    # ------------------------------------------------------------------ one mount

    def _judge_mount(self, path: str, probe: PeriodicProbe, answer: ProbeAnswer) -> None:
        if answer.error is None or answer.errno in _FULL:
            self._failures[path] = 0
            self.resolve(f"mount/{path}", f"{path} answers")
            return
        if answer.errno == errno.ENOENT and "paths" in probe.arguments:
            for audit in self._audits.values():  # a shard is gone: find out of which corpus
                audit.due = 0.0
            return
        self._failures[path] += 1
        if self._failures[path] >= _TWICE:
            self.open(
                f"mount/{path}",
                Severity.CRIT,
                f"{path} {'does not answer' if answer.late else 'fails'}: {answer.error}, "
                f"{self._failures[path]} times in a row",
                "reading data or saving will hang or fail",
                "check that the file system is mounted and its servers respond",
                facts={"hanging": answer.late},
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
