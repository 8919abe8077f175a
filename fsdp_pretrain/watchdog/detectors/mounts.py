"""Watches whether mounts answer, corpora are intact, and training waits for data."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import quantiles

from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import counted, human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .base import Detector
from .periodic import AUDIT_DEADLINE, AUDIT_SECONDS, PeriodicProbe, ProbeAnswer

_PROBE_BYTES = 64 * 1024
_SAMPLE = 64
"""Number of files of a corpus among which reads choose."""
_ALARM_AFTER = 2
"""Consecutive failures of a mount that open the alarm."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WAIT_LEAST, _WAIT_TIMES, _WAIT_STEPS, _WAITS = 5.0, 10.0, 50, 3
"""A wait for data is long from so many seconds and so many times the usual wait; of so many steps, so many waited
long to open the alarm."""


def read(paths: Sequence[Path]) -> None:
    """Read 4 KiB at a random place of a random file, from storage instead of the page cache."""
    with random.choice(paths).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(random.randrange(max(1, size - 4096)))
        file.read(4096)


def _write(directory: Path) -> None:
    """Write, sync and remove a small file in a directory, if that exists."""
    if not directory.is_dir():
        return
    probe = directory / f".probe-{os.uname().nodename}"
    try:
        with probe.open("wb") as file:
            file.write(b"\0" * _PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Audit:
    """The result of checking that every shard of a corpus exists with its size."""

    wrong: list[str]  # one line per bad file, with the problem
    shards: list[Path]  # a sample of the good files
    device: int  # `st_dev` of their file system


def _audit(directory: Path) -> _Audit:
    from fsdp_pretrain.data.corpus.manifest import read_manifest  # imports numpy

    wrong, good = [], []
    for entry in read_manifest(directory).shards:
        prefix = entry.prefix(directory)
        binary, index = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
        try:
            size = binary.stat().st_size
            if size != entry.bytes:
                wrong.append(f"{binary} has {size} bytes, the manifest says {entry.bytes}")
                continue
            index.stat()
            good.append(binary)
        except OSError as error:
            wrong.append(f"{error.filename}: {error.strerror}")
    device = (good[0] if good else directory).stat().st_dev
    return _Audit(wrong, random.sample(good, min(_SAMPLE, len(good))), device)


class MountDetector(Detector):
    """Alarms `mount/PATH`, and `data-shard/SOURCE` for corpora that are not intact.

    Args:
        probed: directories in which a small file is written.
        corpora: directories of the sources, by name. One file at a time is read per file system.
    """

    def __init__(self, alarms: AlarmSink, probed: list[Path], corpora: dict[str, Path]) -> None:
        super().__init__(alarms)
        self._writes = {str(path): PeriodicProbe(partial(_write, path)) for path in probed}
        self._reads: dict[str, PeriodicProbe[None]] = {}
        self._failures = Counter[str]()  # consecutive failures by path
        self._audits = {
            name: PeriodicProbe(partial(_audit, path), AUDIT_SECONDS, AUDIT_DEADLINE) for name, path in corpora.items()
        }
        self._corpora, self._intact = corpora, dict[str, _Audit]()

    def tick(self, now: float) -> None:
        """Start due probes, and judge the answers of earlier ones."""
        for name, audit in self._audits.items():
            if (audited := audit.tick(now)) is not None:
                self._judge_corpus(name, audited)
        for path, probe in [*self._writes.items(), *self._reads.items()]:
            if (answer := probe.tick(now)) is not None:
                self._judge_mount(path, answer)

    def _judge_corpus(self, name: str, answer: ProbeAnswer[_Audit]) -> None:
        path, audit = self._corpora[name], answer.value
        wrong = [str(answer.error)] if audit is None else audit.wrong
        if wrong:
            self.open(
                f"data-shard/{name}",
                Severity.CRIT,
                f"source {name}: {counted(len(wrong), 'file')} of {path}: {wrong[0]}",
                "training stops when it reads them",
                "restore the files, or set the path to a copy; see `fsdp-data validate`",
                facts={"wrong": wrong[:10]},
            )
        else:
            self.resolve(f"data-shard/{name}", f"{path} is intact")
        if audit is not None:
            self._intact[name] = audit
            self._read_from_each_file_system()

    def _read_from_each_file_system(self) -> None:
        """Read one file at a time per file system, since many sources often share one."""
        for device in {audit.device for audit in self._intact.values()}:
            names = [name for name, audit in self._intact.items() if audit.device == device]
            paths = [path for name in names for path in self._intact[name].shards]
            key = str(self._corpora[names[0]])
            if paths and key not in self._writes:
                self._reads.setdefault(key, PeriodicProbe(partial(read, paths))).look = partial(read, paths)

    # ------------------------------------------------------------------ one mount

    def _judge_mount(self, path: str, answer: ProbeAnswer[None]) -> None:
        if answer.error is None or answer.errno in _FULL:
            self._failures[path] = 0
            self.resolve(f"mount/{path}", f"{path} answers")
            return
        if answer.errno == errno.ENOENT and path in self._reads:
            for audit in self._audits.values():  # a shard is missing: find out of which corpus
                audit.due = 0.0
            return
        self._failures[path] += 1
        if self._failures[path] >= _ALARM_AFTER:
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
