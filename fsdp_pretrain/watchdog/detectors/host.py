"""The host: memory, descriptors, clock, steal time. From /proc and /sys, which do not hang. No torch."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from fsdp_pretrain.severity import Severity
from fsdp_pretrain.statistics import slope
from fsdp_pretrain.units import human_bytes, human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .base import Detector

_EVERY = 60.0
_HOUR, _LEAST, _LATEST = 60, 30, 5
"""Samples of memory, one a minute: kept; needed for a forecast; whose median is the present value."""
_SOON, _VERY_SOON = 7200.0, 1800.0
_DECLINE = 0.02
"""Share of the memory by which it must have decreased for a forecast."""
_DESCRIPTORS, _STOLEN, _STOLEN_SAMPLES = 0.8, 0.05, 5
_JUMP, _JUMP_QUIET = 1.0, 3600.0
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostState:
    """The state of a host.

    Attributes:
        available, total: bytes of memory for processes, within the limit of this cgroup.
        oom_kills: processes killed by the OOM killer since boot.
        descriptors: the largest share of its file-descriptor limit that a rank uses.
        cpu, stolen: seconds since boot, summed over cores: all CPU time, and steal time.
    """

    available: int
    total: int
    oom_kills: int
    descriptors: float
    cpu: float
    stolen: float


def sample_host(pids: list[int]) -> HostState:
    """The state of this host, and of the processes of its ranks."""
    memory, times = psutil.virtual_memory(), psutil.cpu_times()
    available, total = memory.available, memory.total
    with contextlib.suppress(OSError, ValueError):  # no limit, or it is "max"
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        if limit < total:
            cache = _counters(_CGROUP / "memory.stat").get("inactive_file", 0)
            available, total = min(available, limit - used + cache), limit
    kills = max(_counters(path).get("oom_kill", 0) for path in (Path("/proc/vmstat"), _CGROUP / "memory.events"))
    descriptors = max(map(_descriptors, pids), default=0.0)
    return HostState(available, total, kills, descriptors, sum(times), float(getattr(times, "steal", 0.0)))


def _counters(path: Path) -> dict[str, int]:
    """Parse lines of `name number`."""
    with contextlib.suppress(OSError, ValueError):
        return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}
    return {}


def _descriptors(pid: int) -> float:
    """Share of its limit that a process has open; 0 if it is gone."""
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        limit = process.rlimit(psutil.RLIMIT_NOFILE)[0]
        if limit > 0:
            return float(process.num_fds() / limit)
    return 0.0


class HostDetector(Detector):
    """Alarms `memory/HOST`, `oom-kill/HOST`, `descriptors/HOST`, `stolen-time/HOST` and `clock/HOST`.

    pids: returns the process ids of the ranks here.
    sample: samples the host.
    clock: wall-clock time, seconds.
    """

    def __init__(
        self,
        alarms: AlarmSink,
        *,
        host: str,
        pids: Callable[[], list[int]] = list,
        sample: Callable[[list[int]], HostState] = sample_host,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(alarms)
        self._host, self._pids, self._sample, self._clock = host, pids, sample, clock
        self._due = 0.0
        self._memory: deque[tuple[float, float]] = deque(maxlen=_HOUR)
        self._before: HostState | None = None
        self._stolen: deque[float] = deque(maxlen=_STOLEN_SAMPLES)
        self._offset: float | None = None
        self._jumped_at = 0.0

    def tick(self, now: float) -> None:
        """Check the clock in every pass, the rest once a minute."""
        self._judge_clock(now)
        if now < self._due:
            return
        self._due = now + _EVERY
        state, before = self._sample(self._pids()), self._before
        self._judge_memory(state, now)
        self._judge(
            "descriptors",
            state.descriptors > _DESCRIPTORS,
            f"{state.descriptors:.0%} of the file descriptors of a rank are open",
            "opening a shard or a connection will fail",
            "raise `ulimit -n` where the job is started",
        )
        if before is not None:
            kills = state.oom_kills - before.oom_kills
            self._judge(
                "oom-kill",
                kills > 0,
                f"{kills} process{'es' * (kills != 1)} killed for lack of memory in the last minute",
                "if it was a rank or a data worker, the run ends",
                "see the kernel's log",
            )
            self._judge_stolen(state, before)
        self._before = state

    def _judge(
        self, name: str, wrong: bool, summary: str, effect: str, remedy: str, severity: Severity = Severity.WARN
    ) -> None:
        """Open or resolve an alarm of this host with this summary."""
        key, summary = f"{name}/{self._host}", f"{self._host}: {summary}"
        if wrong:
            self.open(key, severity, summary, effect, remedy, facts={"host": self._host})
        else:
            self.resolve(key, summary)

    def _judge_memory(self, state: HostState, now: float) -> None:
        """Forecast when memory runs out at the rate of the last hour."""
        self._memory.append((now, float(state.available)))
        left = float("inf")
        if len(self._memory) >= _LEAST:
            rate = slope(list(self._memory))
            if -rate * (now - self._memory[0][0]) > _DECLINE * state.total:
                left = median(value for _, value in list(self._memory)[-_LATEST:]) / -rate
        if _SOON <= left <= 2 * _SOON:
            return
        free = f"{human_bytes(state.available)} of {human_bytes(state.total)} memory left"
        self._judge(
            "memory",
            left < _SOON,
            f"{free}, used up in about {human_time(left)}" if left < _SOON else f"{free}, it no longer shrinks",
            "the system will kill a rank",
            "find what grows; a save now loses least (`fsdp-pretrain control RUN save`)",
            Severity.CRIT if left < _VERY_SOON else Severity.WARN,
        )

    def _judge_stolen(self, state: HostState, before: HostState) -> None:
        if state.cpu > before.cpu:
            self._stolen.append((state.stolen - before.stolen) / (state.cpu - before.cpu))
        if not self._stolen or (len(self._stolen) < _STOLEN_SAMPLES and self._stolen[-1] >= _STOLEN):
            return
        self._judge(
            "stolen-time",
            min(self._stolen) > _STOLEN,
            f"at least {min(self._stolen):.0%} of the CPU time of {_STOLEN_SAMPLES} minutes went to other guests",
            "steps wait for this host",
            "use hosts of your own, or fewer processes on this one",
        )

    def _judge_clock(self, now: float) -> None:
        """Jumps of the wall clock. Nothing here depends on it, but people compare records by it."""
        offset = self._clock() - now
        jump = 0.0 if self._offset is None else offset - self._offset
        self._offset = offset
        if abs(jump) > _JUMP:
            self._jumped_at = now
        elif now - self._jumped_at <= _JUMP_QUIET:
            return
        self._judge(
            "clock",
            abs(jump) > _JUMP,
            f"the clock jumped by {jump:+.1f} s" if abs(jump) > _JUMP else "the clock is steady",
            "times in the record before and after do not fit together; nothing else depends on it",
            "check the time service of the host",
        )
