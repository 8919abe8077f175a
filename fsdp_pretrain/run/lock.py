"""Leases: files that name the process that holds something. `RUN/lock.json` is the lock of a run: one job, rollback or
fork at a time. Views and evaluations have leases too.

A thread renews the lease, also during long saves and compilation. A holder on this host is checked directly. A holder
on another host is alive while its lease is renewed; after some seconds without a renewal its lease is taken over.
Exclusive file creation works on network file systems, where kernel locks are often local or missing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_pretrain.errors import BusyError, StorageError, raising
from fsdp_pretrain.processes import is_same_process, process_start

from . import state_files, status
from .files import RunDir, make_directory, now
from .state_files import DamagedFileError, StateFile

BEAT_SECONDS, SILENT_SECONDS = 10.0, 90.0
"""Seconds between two beats, and seconds without one after which a holder on another host counts as dead."""
TRAINING = "training"
"""The purpose of a lock whose holder `control` can ask to stop."""
_READS, _RETRY_SECONDS = 10, 0.1
_TURN = 1.0


_released: set[str] = set()
"""Tokens of leases that this process has released: one that it could not read then is not removed."""


class LeaseRecord(StateFile):
    """The contents of a lease file."""

    token: str  # unique
    host: str = "?"  # this and the next three identify the process, see `this_process`
    namespace: str | None = None
    pid: int | None = None
    process_started: float | None = None
    time: str = "?"  # when the lease was taken
    purpose: str = "an unknown process"  # the holder's work
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
        if path.exists():  # saves writing to storage, since some callers poll
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
        """Whether this process still holds it: another may have taken it over while this one was suspended. False also
        if the file cannot be read for a second."""
        mine = False
        for _ in range(_READS):
            try:
                held = state_files.read(self.path, LeaseRecord)
            except DamagedFileError:  # another process is writing it, or bits flipped
                mine = True  # if it stays damaged, bits flipped: nobody else wrote it
                time.sleep(_RETRY_SECONDS)
            except StorageError:  # e.g. a network file system that is coming back
                mine = False
                time.sleep(_RETRY_SECONDS)
            else:
                return held is not None and held.token == self._token
        return mine

    def release(self) -> None:
        self._done.set()
        _released.add(self._token)
        if self.still_mine():
            self.path.unlink(missing_ok=True)


def this_process() -> dict[str, str | float | None]:
    """Facts that identify this process, so that others can check whether it is alive."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "namespace": _pid_namespace(),
        "pid": pid,
        "process_started": process_start(pid),
    }


def _pid_namespace() -> str | None:
    """The namespace of process ids: containers may share a host name but not process ids."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (not a path)
    except OSError:
        return None


def is_alive(held: LeaseRecord | None) -> bool | None:
    """Whether the holder of a lease is alive; None if this process cannot tell."""
    if held is not None and held.token in _released:
        return False
    if held is None or held.host != socket.gethostname() or held.namespace != _pid_namespace():
        return None
    if held.pid is None or held.process_started is None:
        return None
    return is_same_process(held.pid, held.process_started)


def _take_away(path: Path, held: LeaseRecord | None) -> None:
    """Remove the lease that was read as `held`; put it back if another process took it meanwhile."""
    aside = path.with_name(f"{path.stem}-stale-{uuid.uuid4().hex[:8]}.json")
    with contextlib.suppress(OSError):
        path.rename(aside)
        if read(aside) != held:  # taken by another process between read and rename
            with contextlib.suppress(OSError):
                os.link(aside, path)
        aside.unlink(missing_ok=True)


_signs: dict[Path, tuple[Any, float]] = {}
"""By lease, the holder's last sign of life that `drop_if_dead` saw, and when it first saw it."""


def drop_if_dead(path: Path) -> bool | None:
    """Remove a lease if its holder is dead. Returns whether it is free now; None: not known yet, call again.

    A holder on another host is dead after `SILENT_SECONDS` without a beat. They are measured on this process's clock,
    from its first call, because hosts' clocks need not agree.
    """
    held = read(path)
    try:
        sign = (held and held.token, path.stat().st_mtime)
    except OSError:  # released
        return True
    alive = is_alive(held)
    if alive is None:
        before, since = _signs.get(path, (None, 0.0))
        if sign != before:
            _signs[path] = sign, time.monotonic()
            return None if before is None else False
        alive = None if time.monotonic() - since <= SILENT_SECONDS else False
    if alive is False:
        _signs.pop(path, None)
        _take_away(path, held)
    return None if alive is None else not alive


class RunLock:
    """The lock of one run; `purpose` (`training`, `rollback`, `fork`) is for messages to other processes."""

    def __init__(self, run: RunDir, purpose: str) -> None:
        self._run, self._purpose = run, purpose
        self._claim: Lease | None = None
        self._waiting = False

    def attempt(self) -> bool:
        """Try to take the lock, for about a second. Returns whether it is held now.

        False: it is not known yet whether the holder is alive; call again. Raises BusyError if the holder is
        alive, StorageError if the run directory cannot be written.
        """
        held = read(self._run.lock)
        free = drop_if_dead(self._run.lock)
        if free is False:
            raise self._busy(held)
        if free:
            with raising(StorageError, f"cannot write to the run directory {self._run.path}"):
                self._claim = Lease.take(self._run.lock, purpose=self._purpose)
                if self._claim is None and held is not None and read(self._run.lock) == held:
                    os.utime(self._run.lock)  # if a dead holder's lease cannot be removed, this raises the cause
        elif self._waiting:
            time.sleep(min(_TURN, SILENT_SECONDS / 5))
        else:
            self._waiting = True
            print(f"{self._describe(held)}: waiting up to {SILENT_SECONDS:g}s for a heartbeat from it", flush=True)
        return self._claim is not None

    def _describe(self, held: LeaseRecord | None) -> str:
        held = held or LeaseRecord(token="")
        at = status.read(self._run)
        return (
            f"{self._run.path} is held by {held.purpose} on host {held.host}, pid {held.pid or '?'}, since {held.time} "
            f"(segment {at.segment or '?'}, step {'?' if at.step is None else at.step})"
        )

    def _busy(self, held: LeaseRecord | None) -> BusyError:
        waiting = "wait for its end"
        if held is None or held.purpose == TRAINING:
            waiting += f", or ask it to stop: fsdp-pretrain control {self._run.path} stop"
        return BusyError(
            self._describe(held),
            effect="two writers would mix what they write in one directory",
            remedy=f"{waiting}. A holder that was killed is detected: on its own host at once, from others after "
            f"{SILENT_SECONDS:g}s without a heartbeat (one every {BEAT_SECONDS:g}s)",
        )

    def check(self) -> None:
        """Raise BusyError if another process took over the lock, for example while this one was suspended."""
        if self._claim is None or not self._claim.still_mine():
            held = read(self._run.lock)
            raise BusyError(
                f"this process lost the lock of the run; {self._describe(held)}" if held else "the run's lock is gone",
                effect="continuing could overwrite what another job does",
                remedy="nothing, if the other job is wanted; otherwise stop it and start this one again",
            )

    def release(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None


def is_held(run: RunDir) -> bool:
    """Whether a process seems to hold a run: it is alive on this host, or its lease was renewed recently."""
    alive = is_alive(read(run.lock))
    try:
        return alive if alive is not None else time.time() - run.lock.stat().st_mtime < SILENT_SECONDS
    except OSError:
        return False


def holder_died(run: RunDir) -> bool:
    """Whether a process of this host died while it held a run."""
    return is_alive(read(run.lock)) is False


@contextmanager
def hold(run: RunDir, purpose: str) -> Iterator[RunLock]:
    """Hold a run's lock for the block. Raises BusyError, StorageError."""
    lock = RunLock(run, purpose)
    while not lock.attempt():
        pass
    try:
        yield lock
    finally:
        lock.release()
