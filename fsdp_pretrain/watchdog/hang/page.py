"""Heartbeats of the ranks of a node, in shared memory: written in under a microsecond, readable at any time.

Each rank has a page, a file in memory that only it writes. A beat is a few stores and no system call, so it may be in
the innermost loop; readers never block a rank, and can read while its interpreter is wedged. A sequence number that is
odd during a write tells readers to retry (a seqlock).

Times are `time.monotonic_ns()`, one clock for all processes of a node, unaffected by jumps of the wall clock.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from pathlib import Path
from time import monotonic_ns
from typing import NamedTuple

from fsdp_pretrain.heartbeat import Phase
from fsdp_pretrain.processes import process_stat

_MAGIC = 0x46534450_50414745  # "FSDPPAGE"
_SIZE, _AT_NOTE = 4096, 1024


class Beat(NamedTuple):
    """The contents of a page at one instant, laid out in this order after a magic number and the sequence number."""

    pid: int  # this and the next: the process id, and its start in clock ticks since boot, because pids are reused
    started: int
    rank: int  # this and the next: owner of the page; the segment is 0 until it is known
    segment: int
    alive_at: int  # when the rank's background thread last ran: stale while the interpreter is wedged
    step: int  # the current step
    phase: Phase  # the current phase
    beats: int  # number of beats
    phase_at: int  # this and the next: when phase and step started, `time.monotonic_ns()`
    step_at: int
    window: int  # number of measured windows of steps
    own: float  # seconds of a typical step of the last window, without waiting for other ranks; NaN if unknown


_PLACE = {name: place for place, name in enumerate(("magic", "sequence", *Beat._fields))}
_WHOLE, _SEQUENCE = struct.Struct(f"{len(_PLACE) - 1}qd"), struct.Struct("q")
_BEAT, _STEP, _WINDOW = struct.Struct("qqq"), struct.Struct("qqqqq"), struct.Struct("qd")
_AT_STEP, _AT_PHASE, _AT_WINDOW = (8 * _PLACE[name] for name in ("step", "phase", "window"))
_DATA, _ALIVE, _SEGMENT, _BEATS = int(Phase.DATA), _PLACE["alive_at"], _PLACE["segment"], _PLACE["beats"]
_PHASE = _PLACE["phase"] - _PLACE["pid"]
_PF_EXITING = 0x4
"""Flag in `/proc/PID/stat`: include/linux/sched.h."""


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process."""
    return int(stat[19]) if (stat := process_stat(pid)) else None


def process_state(pid: int) -> str:
    """One letter of `ps`: R runs, S sleeps, D waits for a device, T is stopped, Z has ended; X if there is none."""
    return stat[0] if (stat := process_stat(pid)) else "X"


def is_exiting(pid: int) -> bool:
    """Whether the main thread of a process is exiting, or there is no such process. The kernel kills children with
    `PR_SET_PDEATHSIG` a moment before it reports the end of the parent."""
    return not (stat := process_stat(pid)) or bool(int(stat[6]) & _PF_EXITING)


class Page:
    """A page for its rank to write; an existing file is replaced."""

    def __init__(self, path: Path, *, rank: int, segment: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        with partial.open("wb+") as file:
            file.truncate(_SIZE)
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._q, self._beats, self._note = memoryview(self._memory).cast("q"), 0, b""
        pid, now = os.getpid(), monotonic_ns()
        values = {"pid": pid, "started": start_ticks(pid) or 0, "rank": rank, "segment": segment}
        for name, value in {**values, "phase": Phase.START, "phase_at": now, "step_at": now, "alive_at": now}.items():
            self._q[_PLACE[name]] = value
        _WINDOW.pack_into(self._memory, _AT_WINDOW, 0, math.nan)
        self._q[_PLACE["magic"]] = _MAGIC
        partial.rename(path)

    def beat(self, phase: int) -> None:
        """Enter a phase, or show progress in the current one."""
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
        """Beat of the background thread, with an optional note of up to 3 kB. It needs no sequence number: the time is
        one store, and readers tolerate a note that is being changed."""
        if note != self._note and len(note) < _SIZE - _AT_NOTE:
            self._memory[_AT_NOTE : _AT_NOTE + len(note) + 1] = note + b"\0"
            self._note = note
        self._q[_ALIVE] = monotonic_ns()

    def set_segment(self, segment: int) -> None:
        self._q[_SEGMENT] = segment

    def measured(self, window: int, own: float) -> None:
        self._beats += 1
        self._q[1] = 2 * self._beats - 1
        _WINDOW.pack_into(self._memory, _AT_WINDOW, window, own)
        self._q[_BEATS] = self._beats
        self._q[1] = 2 * self._beats


class Reader:
    """Reads a page repeatedly. Raises OSError if there is no page, or it is being created."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            try:
                self._memory = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise OSError(f"{path}: {error}") from None

    def read(self) -> Beat | None:
        """The current beat; None if the file is not a page."""
        for _ in range(100):  # if the writer was killed during a write, take what is there
            magic, before, *values = _WHOLE.unpack_from(self._memory)
            after = _SEQUENCE.unpack_from(self._memory, 8)[0]
            if before == after and before % 2 == 0:
                break
        if magic != _MAGIC:
            return None
        values[_PHASE] = Phase(values[_PHASE])
        return Beat._make(values)

    def note(self) -> bytes:
        """The last note of the background thread."""
        return self._memory[_AT_NOTE:].partition(b"\0")[0]


def read(path: Path) -> Beat | None:
    """The beat on a page; None if there is no page, or it is being created."""
    try:
        return Reader(path).read()
    except OSError:
        return None
