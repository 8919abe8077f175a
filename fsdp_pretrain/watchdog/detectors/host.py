"""Watches the memory of a host: a forecast of its end, and OOM kills. Reads only /proc and /sys, which do not hang."""

from __future__ import annotations

import contextlib
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
"""Numbers of memory samples, one a minute: kept, needed for a forecast, and used for the present value (median)."""
_SOON, _VERY_SOON = 7200.0, 1800.0
_DECLINE = 0.02
"""Share of the memory by which it must have decreased for a forecast."""
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostMemory:
    """The memory of a host."""

    available: int  # this and the next: bytes for processes, within the limit of this cgroup
    total: int
    oom_kills: int  # processes killed by the OOM killer since boot


def sample_host() -> HostMemory:
    """The memory of this host."""
    memory = psutil.virtual_memory()
    available, total = memory.available, memory.total
    with contextlib.suppress(OSError, ValueError):  # no limit, or it is "max"
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        if limit < total:
            cache = _counters(_CGROUP / "memory.stat").get("inactive_file", 0)
            available, total = min(available, limit - used + cache), limit
    kills = max(_counters(path).get("oom_kill", 0) for path in (Path("/proc/vmstat"), _CGROUP / "memory.events"))
    return HostMemory(available, total, kills)


def _counters(path: Path) -> dict[str, int]:
    """Parse lines of `name number`."""
    with contextlib.suppress(OSError, ValueError):
        return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}
    return {}


class HostDetector(Detector):
    """Alarms `memory/HOST` and `oom-kill/HOST`; `sample` reads the memory of the host."""

    def __init__(self, alarms: AlarmSink, *, host: str, sample: Callable[[], HostMemory] = sample_host) -> None:
        super().__init__(alarms)
        self._host, self._sample = host, sample
        self._due = 0.0
        self._memory: deque[tuple[float, float]] = deque(maxlen=_HOUR)
        self._kills: int | None = None

    def tick(self, now: float) -> None:
        """Once a minute, read and judge the memory."""
        if now < self._due:
            return
        self._due = now + _EVERY
        state = self._sample()
        self._judge_memory(state, now)
        kills = state.oom_kills - (state.oom_kills if self._kills is None else self._kills)
        self._kills = state.oom_kills
        key = f"oom-kill/{self._host}"
        summary = f"{self._host}: {kills} processes killed for lack of memory in a minute"
        if kills:
            effect = "if it was a rank or a data worker, the run ends"
            self.open(key, Severity.WARN, summary, effect, "see the kernel's log", facts={"host": self._host})
        else:
            self.resolve(key, summary)

    def _judge_memory(self, state: HostMemory, now: float) -> None:
        """Forecast when memory runs out at the rate of the last hour."""
        self._memory.append((now, float(state.available)))
        left = float("inf")
        if len(self._memory) >= _LEAST:
            rate = slope(list(self._memory))
            if -rate * (now - self._memory[0][0]) > _DECLINE * state.total:
                left = median(value for _, value in list(self._memory)[-_LATEST:]) / -rate
        key = f"memory/{self._host}"
        free = f"{self._host}: {human_bytes(state.available)} of {human_bytes(state.total)} memory left"
        if left < _SOON:
            self.open(
                key,
                Severity.CRIT if left < _VERY_SOON else Severity.WARN,
                f"{free}, used up in about {human_time(left)}",
                "the system will kill a rank",
                "find what grows; a save now loses least (`fsdp-pretrain control RUN save`)",
                facts={"host": self._host},
            )
        elif left > 2 * _SOON:
            self.resolve(key, f"{free}, it no longer shrinks")
