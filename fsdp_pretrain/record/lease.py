"""A claim: a file that names the process at work. A thread keeps it fresh; that of a dead holder can be taken over.

Evaluations are claimed with it, and so is the run itself (`record.lock`). Exclusive creation works on network file
systems, where kernel locks are often local or missing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from fsdp_pretrain.errors import StorageError

from . import state_files
from .files import make_directory, now
from .state_files import DamagedFileError, StateFile

BEAT_SECONDS = 10.0
_LOOKS, _LOOK_SECONDS = 10, 0.1


class LeaseRecord(StateFile):
    """The contents of a claim."""

    token: str  # unique
    host: str = "?"  # this and the next three: the process, see `this_process`
    namespace: str | None = None
    pid: int | None = None
    process_started: float | None = None
    time: str = "?"  # when it was made
    purpose: str = "an unknown process"  # what the holder does
    deadline: float | None = None  # seconds that this may take, if it has a limit


def read(path: Path) -> LeaseRecord | None:
    """The contents of a claim; None if there is none, or it is damaged or being written at this moment."""
    return state_files.view(path, LeaseRecord)


class Lease:
    """A claim that this process holds and touches every `beat` seconds."""

    def __init__(self, path: Path, token: str, beat: float) -> None:
        self.path, self._token, self._interval = path, token, beat
        self._done = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    @classmethod
    def take(cls, path: Path, *, beat: float = BEAT_SECONDS, **facts: Any) -> Lease | None:
        """Create the file, with `facts` as in `LeaseRecord`; None if it exists. Raises OSError."""
        token = uuid.uuid4().hex
        make_directory(path.parent)
        try:
            state_files.create(path, {"token": token, **this_process(), "time": now(), **facts})
        except FileExistsError:
            return None
        return cls(path, token, beat)

    def _beat(self) -> None:
        while not self._done.wait(self._interval):
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def still_mine(self) -> bool:
        """Whether no other process took it over, which happens to one that was frozen for long."""
        for _ in range(_LOOKS):
            try:
                held = state_files.read(self.path, LeaseRecord)
            except DamagedFileError:  # another's that is being written at this moment, or flipped bits
                time.sleep(_LOOK_SECONDS)
            except StorageError:
                return False
            else:
                return held is not None and held.token == self._token
        return True  # flipped bits: no other process wrote it

    def release(self) -> None:
        self._done.set()
        if self.still_mine():
            self.path.unlink(missing_ok=True)


def this_process() -> dict[str, str | float | None]:
    """What other processes need to find out whether this one is alive."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "namespace": _pid_namespace(),
        "pid": pid,
        "process_started": process_start(pid),
    }


def _pid_namespace() -> str | None:
    """Containers can share a host name and not their process ids."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (not a path)
    except OSError:
        return None


def process_start(pid: int) -> float | None:
    """When a process began, comparable between processes of a host; None if there is no such live process.

    In ticks since boot where the system has them: the time of day changes when the clock is set, and then a live holder
    would look like another process with the same id.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists():
            return float(stat.read_text(errors="replace").rpartition(")")[2].split()[19])
        return process.create_time()
    except (psutil.NoSuchProcess, OSError):
        return None


def is_alive(held: LeaseRecord) -> bool | None:
    """Whether the holder of a claim is alive; None if that cannot be determined from here."""
    if held.host != socket.gethostname() or held.namespace != _pid_namespace():
        return None
    if held.pid is None or held.process_started is None:
        return None
    started = process_start(held.pid)
    return started is not None and abs(started - held.process_started) <= 1


class LeaseHolder:
    """Watches whether the holder of a claim is alive; on another host it is dead after `silent` seconds without a beat.

    Silence is measured on the clock of this process, from its first look on, so clocks need not agree.
    """

    def __init__(self, path: Path, silent: float) -> None:
        self.path, self._silent = path, silent
        self._sign: tuple[Any, float] | None = None
        self._since = 0.0

    def lives(self, held: LeaseRecord | None) -> bool | None:
        """Whether the holder is alive, by the current claim; None while that is not known. OSError if it is gone."""
        sign = (held and held.token, self.path.stat().st_mtime)
        alive = is_alive(held) if held is not None else None
        if alive is not None:
            return alive
        before, now = self._sign, time.monotonic()
        if sign != before:
            self._sign, self._since = sign, now
            return None if before is None else True
        return False if now - self._since > self._silent else None


def take_away(path: Path, held: LeaseRecord | None) -> None:
    """Remove the claim that was seen as `held`. If it is another one by now, that one is put back."""
    aside = path.with_name(f"{path.stem}-stale-{uuid.uuid4().hex[:8]}.json")
    with contextlib.suppress(OSError):
        path.rename(aside)
        if read(aside) != held:  # between the look and the rename, another process renewed it
            with contextlib.suppress(OSError):
                os.link(aside, path)
        aside.unlink(missing_ok=True)
