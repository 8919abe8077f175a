"""Heartbeats of the ranks of a node, in shared memory: written in under a microsecond, read by anyone at any time.

Each rank has a page, a file in memory that only it writes. A beat is a few stores and no system call, so it may stand
in the innermost loop; a reader never makes a rank wait, and reads on when the interpreter of the rank is wedged. A
sequence number that is odd during a write tells readers to look again.

Times are `time.monotonic_ns()`, one clock for all processes of a node; steps of the wall clock do not exist here.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns
from typing import NamedTuple

_MAGIC = 0x46534450_50414745  # "FSDPPAGE"
_SIZE, _AT_NOTE = 4096, 1024


class Phase(IntEnum):
    """What a rank is doing."""

    START = 0
    LOAD = 1
    DATA = 3
    COMPUTE = 4
    REDUCE = 5
    OPTIMIZER = 6
    SAVE = 7
    END = 9


class Beat(NamedTuple):
    """What a page held at one instant; it is laid out in this order, after a magic number and the sequence number.

    Attributes:
        pid, started: the process, and its start in clock ticks since boot: a process id alone may be used again.
        rank, segment: whose page this is; the segment is 0 until it is known.
        alive_at: when a thread of the rank last ran beside the main one: stale while the interpreter is wedged.
        step: the step it is in.
        phase: what it does.
        beats: how many beats there were; grows with every one.
        phase_at, step_at: when phase and step began, `time.monotonic_ns()`.
        window: how many windows of steps were measured.
        own: seconds of a typical step of the last window that did not depend on other ranks; NaN if not known.
    """

    pid: int
    started: int
    rank: int
    segment: int
    alive_at: int
    step: int
    phase: Phase
    beats: int
    phase_at: int
    step_at: int
    window: int
    own: float


_PLACE = {name: place for place, name in enumerate(("magic", "sequence", *Beat._fields))}
_WHOLE, _SEQUENCE = struct.Struct(f"{len(_PLACE) - 1}qd"), struct.Struct("q")
_BEAT, _STEP, _WINDOW = struct.Struct("qqq"), struct.Struct("qqqqq"), struct.Struct("qd")
_AT_STEP, _AT_PHASE, _AT_WINDOW = (8 * _PLACE[name] for name in ("step", "phase", "window"))
_DATA, _ALIVE, _SEGMENT, _BEATS = int(Phase.DATA), _PLACE["alive_at"], _PLACE["segment"], _PLACE["beats"]
_PHASE = _PLACE["phase"] - _PLACE["pid"]
_PF_EXITING = 0x4
"""Of the flags in `/proc/PID/stat`: include/linux/sched.h."""


def _stat(pid: int) -> list[str]:
    """Fields of `/proc/PID/stat` from the state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none."""
    return int(stat[19]) if (stat := _stat(pid)) else None


def process_state(pid: int) -> str:
    """One letter of `ps`: R runs, S sleeps, D waits for a device, T is stopped, Z has ended; X if there is none."""
    return stat[0] if (stat := _stat(pid)) else "X"


def is_exiting(pid: int) -> bool:
    """Whether the main thread of a process is on its way out, or there is no such process: the kernel ends children
    that want to die with it (`PR_SET_PDEATHSIG`) a moment before it says that the process has ended."""
    return not (stat := _stat(pid)) or bool(int(stat[6]) & _PF_EXITING)


class Page:
    """A rank's own page; one that is there already is replaced."""

    def __init__(self, path: Path, *, rank: int, segment: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        with partial.open("wb+") as file:
            file.truncate(_SIZE)
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._q, self._beats, self._note = memoryview(self._memory).cast("q"), 0, b""
        own, now = os.getpid(), monotonic_ns()
        values = {"pid": own, "started": start_ticks(own) or 0, "rank": rank, "segment": segment}
        for name, value in {**values, "phase": Phase.START, "phase_at": now, "step_at": now, "alive_at": now}.items():
            self._q[_PLACE[name]] = value
        _WINDOW.pack_into(self._memory, _AT_WINDOW, 0, math.nan)
        self._q[_PLACE["magic"]] = _MAGIC
        partial.rename(path)

    def beat(self, phase: int) -> None:
        """Another phase begins, or the present one goes on."""
        self._beats += 1
        self._q[1] = 2 * self._beats - 1
        _BEAT.pack_into(self._memory, _AT_PHASE, phase, self._beats, monotonic_ns())
        self._q[1] = 2 * self._beats

    def step(self, step: int) -> None:
        self._beats += 1
        now = monotonic_ns()
        self._q[1] = 2 * self._beats - 1
        _STEP.pack_into(self._memory, _AT_STEP, step, _DATA, self._beats, now, now)
        self._q[1] = 2 * self._beats

    def alive(self, note: bytes = b"") -> None:
        """A thread beside the main one runs, which may leave a note of up to 3 kB. Needs no sequence number: the time
        is one store, and a note that is being changed is no evidence of a rank that stands still."""
        if note != self._note and len(note) < _SIZE - _AT_NOTE:
            self._memory[_AT_NOTE : _AT_NOTE + len(note) + 1] = note + b"\0"
            self._note = note
        self._q[_ALIVE] = monotonic_ns()

    def belongs_to(self, segment: int) -> None:
        self._q[_SEGMENT] = segment

    def measured(self, window: int, own: float) -> None:
        self._beats += 1
        self._q[1] = 2 * self._beats - 1
        _WINDOW.pack_into(self._memory, _AT_WINDOW, window, own)
        self._q[_BEATS] = self._beats
        self._q[1] = 2 * self._beats


class Reader:
    """Looks at a page again and again. Raises OSError if there is none, or it is being made."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            try:
                self._memory = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise OSError(f"{path}: {error}") from None

    def look(self) -> Beat | None:
        """What it holds; None if it is no page."""
        for _ in range(100):  # a writer killed in the middle: as it stands
            magic, before, *values = _WHOLE.unpack_from(self._memory)
            after = _SEQUENCE.unpack_from(self._memory, 8)[0]
            if before == after and before % 2 == 0:
                break
        if magic != _MAGIC:
            return None
        values[_PHASE] = Phase(values[_PHASE])
        return Beat._make(values)

    def note(self) -> bytes:
        """The note that the thread beside the main one left last."""
        return self._memory[_AT_NOTE:].partition(b"\0")[0]


def read(path: Path) -> Beat | None:
    """What a page holds; None if there is none, or it is being made."""
    try:
        return Reader(path).look()
    except OSError:
        return None


def is_alive(beat: Beat) -> bool:
    """Whether the process that wrote the beat still exists, and is not a zombie."""
    return start_ticks(beat.pid) == beat.started and process_state(beat.pid) not in ("Z", "X")
