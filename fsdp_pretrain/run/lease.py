"""A lease: a file that names the process that holds something. A thread renews it; a dead holder's is taken over.

Evaluations and the run itself (`record.lock`) use it. Exclusive file creation works on network file systems, where
kernel locks are often local or missing.
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

from fsdp_pretrain.errors import StorageError
from fsdp_pretrain.processes import process_start

from . import state_files
from .files import make_directory, now
from .state_files import DamagedFileError, StateFile

BEAT_SECONDS = 10.0
_READS, _RETRY_SECONDS = 10, 0.1


class LeaseRecord(StateFile):
    """The contents of a lease file."""

    token: str  # unique
    host: str = "?"  # this and the next three identify the process, see `this_process`
    namespace: str | None = None
    pid: int | None = None
    process_started: float | None = None
    time: str = "?"  # when it was taken
    purpose: str = "an unknown process"  # what the holder does
    deadline: float | None = None  # time limit of the holder's work in seconds, if any


def read(path: Path) -> LeaseRecord | None:
    """The contents of a lease; None if it is missing, damaged or being written."""
    return state_files.view(path, LeaseRecord)


class Lease:
    """A lease that this process holds and touches every `BEAT_SECONDS`."""

    def __init__(self, path: Path, token: str) -> None:
        self.path, self._token = path, token
        self._done = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    @classmethod
    def take(cls, path: Path, **facts: Any) -> Lease | None:
        """Create the file, with `facts` as in `LeaseRecord`; None if it exists. Raises OSError."""
        if path.exists():  # without writing to storage, since some ask all the time
            return None
        token = uuid.uuid4().hex
        make_directory(path.parent)
        try:
            state_files.create(path, {"token": token, **this_process(), "time": now(), **facts})
        except FileExistsError:
            return None
        return cls(path, token)

    def _beat(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def still_mine(self) -> bool:
        """Whether no other process took it over, as happens after this one was suspended for long. False also if it
        cannot be read for a second."""
        mine = False
        for _ in range(_READS):
            try:
                held = state_files.read(self.path, LeaseRecord)
            except DamagedFileError:  # another process is writing it, or bits flipped
                mine = True  # if it stays so, bits flipped: no other process wrote it
                time.sleep(_RETRY_SECONDS)
            except StorageError:  # as of a network file system that comes back
                mine = False
                time.sleep(_RETRY_SECONDS)
            else:
                return held is not None and held.token == self._token
        return mine

    def release(self) -> None:
        self._done.set()
        if self.still_mine():
            self.path.unlink(missing_ok=True)


def this_process() -> dict[str, str | float | None]:
    """Identifies this process, so that others can check whether it is alive."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "namespace": _pid_namespace(),
        "pid": pid,
        "process_started": process_start(pid),
    }


def _pid_namespace() -> str | None:
    """Containers may share a host name but not process ids."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (not a path)
    except OSError:
        return None


def is_alive(held: LeaseRecord) -> bool | None:
    """Whether the holder of a lease is alive; None if this process cannot tell."""
    if held.host != socket.gethostname() or held.namespace != _pid_namespace():
        return None
    if held.pid is None or held.process_started is None:
        return None
    started = process_start(held.pid)
    return started is not None and abs(started - held.process_started) <= 1


def _take_away(path: Path, held: LeaseRecord | None) -> None:
    """Remove the lease that was read as `held`; if another process renewed it meanwhile, put it back."""
    aside = path.with_name(f"{path.stem}-stale-{uuid.uuid4().hex[:8]}.json")
    with contextlib.suppress(OSError):
        path.rename(aside)
        if read(aside) != held:  # renewed between read and rename
            with contextlib.suppress(OSError):
                os.link(aside, path)
        aside.unlink(missing_ok=True)


_signs: dict[Path, tuple[Any, float]] = {}
"""The last sign of life of holders on other hosts, as `drop_if_dead` saw it, and when it saw it first."""


def drop_if_dead(path: Path, silent: float) -> bool | None:
    """Take a lease away if its holder is dead; whether it is free now. None: that is not known yet, ask again.

    A holder on another host is dead after `silent` seconds without a beat, on this process's clock from its first look:
    hosts' clocks need not agree.
    """
    held = read(path)
    try:
        sign = (held and held.token, path.stat().st_mtime)
    except OSError:  # released
        return True
    alive = is_alive(held) if held is not None else None
    if alive is None:
        before, since = _signs.get(path, (None, 0.0))
        if sign != before:
            _signs[path] = sign, time.monotonic()
            return None if before is None else False
        alive = None if time.monotonic() - since <= silent else False
    if alive is False:
        _signs.pop(path, None)
        _take_away(path, held)
    return None if alive is None else not alive
