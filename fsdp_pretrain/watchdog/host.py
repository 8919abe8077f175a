"""The host: memory, descriptors, clock, stolen time. From /proc and /sys, which do not hang. No torch."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from ..severity import Severity
from ..statistics import slope
from ..units import human_bytes, human_time
from .alarms import Alarms
from .detector import Detector

_EVERY = 60.0
_HOUR = 60
"""Samples of memory that are kept, one a minute."""
_LEAST, _LATEST = 30, 5
_SOON, _VERY_SOON = 7200.0, 1800.0
_DECLINE = 0.02
"""Share of the memory by which it must have become less for a forecast."""
_DESCRIPTORS, _STOLEN, _STOLEN_SAMPLES = 0.8, 0.05, 5
_JUMP, _JUMP_QUIET = 1.0, 3600.0
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostState:
    """A look at a host.

    Attributes:
        available, total: bytes of memory that processes can have, within the limit of this control group.
        oom_kills: processes that were ended for want of memory since boot.
        descriptors: the largest share of its limit that a rank has open.
        cpu, stolen: seconds since boot, of all cores: all of it, and what the hypervisor gave to others.
    """

    available: int
    total: int
    oom_kills: int
    descriptors: float
    cpu: float
    stolen: float


def look(pids: list[int]) -> HostState:
    """The state of this host, and of the processes of its ranks."""
    memory, times = psutil.virtual_memory(), psutil.cpu_times()
    available, total = memory.available, memory.total
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None and limit < total:
        available = min(available, limit - used + _events(_CGROUP / "memory.stat").get("inactive_file", 0))
        total = limit
    kills = max(_events(Path("/proc/vmstat")).get("oom_kill", 0), _events(_CGROUP / "memory.events").get("oom_kill", 0))
    return HostState(
        available,
        total,
        kills,
        max(map(_descriptors, pids), default=0.0),
        sum(times),
        float(getattr(times, "steal", 0.0)),
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such limit, or "max"
        return None


def _events(path: Path) -> dict[str, int]:
    """Lines of `name number`."""
    try:
        return {name: int(value) for name, _, value in map(lambda line: line.partition(" "), path.open())}  # noqa: C417
    except (OSError, ValueError):
        return {}


def _descriptors(pid: int) -> float:
    """Share of its limit that a process has open; 0 if it is gone."""
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        limit = process.rlimit(psutil.RLIMIT_NOFILE)[0]
        if limit > 0:
            return float(process.num_fds() / limit)
    return 0.0


class Host(Detector):
    """Alarms `memory/HOST`, `oom-kill/HOST`, `descriptors/HOST`, `stolen-time/HOST` and `clock/HOST`.

    Args:
        alarms: where incidents are told.
        host: name of this host.
        pids: processes of the ranks here, now.
        look: looks at the host.
        clock: wall-clock time, seconds.
    """

    def __init__(
        self,
        alarms: Alarms,
        *,
        host: str,
        pids: Callable[[], list[int]] = list,
        look: Callable[[list[int]], HostState] = look,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(alarms)
        self._host, self._pids, self._look, self._clock = host, pids, look, clock
        self._due = 0.0
        self._memory: deque[tuple[float, float]] = deque(maxlen=_HOUR)
        self._before: HostState | None = None
        self._stolen: deque[float] = deque(maxlen=_STOLEN_SAMPLES)
        self._offset: float | None = None
        self._jumped_at = 0.0

    def tick(self, now: float) -> None:
        """Look, and take what earlier looks found."""
        self._judge_clock(now)
        if now < self._due:
            return
        self._due = now + _EVERY
        state = self._look(self._pids())
        self._judge_memory(state, now)
        self._judge_descriptors(state)
        if self._before is not None:
            self._judge_kills(state.oom_kills - self._before.oom_kills)
            self._judge_stolen(state, self._before)
        self._before = state

    def _tell(self, name: str, severity: Severity, summary: str, effect: str, remedy: str) -> None:
        self.alarms.open(
            f"{name}/{self._host}",
            severity,
            f"{self._host}: {summary}",
            effect=effect,
            remedy=remedy,
            step=self.at,
            facts={"host": self._host},
        )

    def _end(self, name: str, summary: str) -> None:
        self.alarms.resolve(f"{name}/{self._host}", f"{self._host}: {summary}", step=self.at)

    def _judge_memory(self, state: HostState, now: float) -> None:
        """When there will be no memory left, if it goes on like in the last hour."""
        self._memory.append((now, float(state.available)))
        left, free = None, human_bytes(state.available)
        if len(self._memory) >= _LEAST:
            rate = slope(list(self._memory))
            if -rate * (now - self._memory[0][0]) > _DECLINE * state.total:
                left = median(value for _, value in list(self._memory)[-_LATEST:]) / -rate
        if left is not None and left < _SOON:
            self._tell(
                "memory",
                Severity.CRIT if left < _VERY_SOON else Severity.WARN,
                f"memory will be used up in about {human_time(left)}: {free} of {human_bytes(state.total)} left",
                "the system will kill a rank",
                "see what grows; a save now loses least (`fsdp-pretrain control RUN save`)",
            )
        elif left is None or left > 2 * _SOON:
            self._end("memory", f"{free} of memory left, and it does not shrink as before")

    def _judge_kills(self, kills: int) -> None:
        if kills > 0:
            self._tell(
                "oom-kill",
                Severity.WARN,
                f"{kills} process{'es' * (kills > 1)} killed for want of memory",
                "if it was a rank or a data worker, the run ends",
                "see the kernel's log",
            )
        else:
            self._end("oom-kill", "no more processes were killed for want of memory")

    def _judge_descriptors(self, state: HostState) -> None:
        if state.descriptors > _DESCRIPTORS:
            self._tell(
                "descriptors",
                Severity.WARN,
                f"a rank has {state.descriptors:.0%} of its file descriptors open",
                "opening a shard or a connection will fail",
                "raise `ulimit -n` where the job is started",
            )
        else:
            self._end("descriptors", f"{state.descriptors:.0%} of the file descriptors are open")

    def _judge_stolen(self, state: HostState, before: HostState) -> None:
        if state.cpu > before.cpu:
            self._stolen.append((state.stolen - before.stolen) / (state.cpu - before.cpu))
        if len(self._stolen) == _STOLEN_SAMPLES and min(self._stolen) > _STOLEN:
            self._tell(
                "stolen-time",
                Severity.WARN,
                f"{min(self._stolen):.0%} and more of the CPU time of {_STOLEN_SAMPLES} minutes went to other guests",
                "steps wait for this host",
                "use hosts of your own, or fewer processes on this one",
            )
        elif self._stolen and self._stolen[-1] < _STOLEN:
            self._end("stolen-time", "the CPU time is ours again")

    def _judge_clock(self, now: float) -> None:
        """Steps of the wall clock. Nothing here counts by it, but people compare records by it."""
        offset = self._clock() - now
        jump = 0.0 if self._offset is None else offset - self._offset
        self._offset = offset
        if abs(jump) > _JUMP:
            self._jumped_at = now
            self._tell(
                "clock",
                Severity.WARN,
                f"the clock jumped by {jump:+.1f} s",
                "times in the record before and after do not fit together; nothing else depends on it",
                "see the time service of the host",
            )
        elif now - self._jumped_at > _JUMP_QUIET:
            self._end("clock", "the clock goes steadily")
