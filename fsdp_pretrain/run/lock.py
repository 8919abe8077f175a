"""The lock of a run: one job, rollback or fork at a time.

`RUN/lock.json` is a lease (see `lease`). A holder on this host is checked directly. A holder on another host is
watched: a beat proves that it is alive; after `SILENT_SECONDS` without one it counts as dead. Beats come from a thread,
so they continue during long saves and compilation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_pretrain.errors import BusyError, StorageError

from . import lease, state_files
from .files import RunDir
from .lease import BEAT_SECONDS, Lease, LeaseRecord, drop_if_dead
from .status import Status

SILENT_SECONDS = 90.0
_RETRY_SECONDS = 1.0


class RunLock:
    """The lock of one run.

    `purpose` (`training`, `rollback`, `fork`) is for messages to other processes; a holder on another host counts as
    dead after `silent` seconds without a beat.
    """

    def __init__(self, run: RunDir, purpose: str, *, silent: float = SILENT_SECONDS) -> None:
        self._run, self._purpose, self._silent = run, purpose, silent
        self._claim: Lease | None = None
        self._waiting = False

    def attempt(self) -> bool:
        """Try to take the lock, for about a second. Returns whether it is held now.

        False means that it is not known yet whether the holder is alive: call again. Raises BusyError if the holder is
        alive, StorageError if the run directory cannot be written.
        """
        path = self._run.lock
        try:
            self._claim = Lease.take(path, purpose=self._purpose)
        except OSError as error:
            raise StorageError(f"cannot write to the run directory {self._run.path}: {error.strerror}") from None
        if self._claim is not None:
            return True
        held = lease.read(path)
        free = drop_if_dead(path, self._silent)
        if free is False:
            raise self._busy(held)
        if free is None and self._waiting:
            time.sleep(min(_RETRY_SECONDS, self._silent / 5))
        elif free is None:
            self._waiting = True
            print(f"{self._describe(held)}: waiting up to {self._silent:g}s for a heartbeat from it", flush=True)
        return False

    def _describe(self, held: LeaseRecord | None) -> str:
        held = held or LeaseRecord(token="")
        status = state_files.view(self._run.status, Status) or Status()
        return (
            f"{self._run.path} is held by {held.purpose} on host {held.host}, pid {held.pid or '?'}, since {held.time} "
            f"(segment {status.segment or '?'}, step {'?' if status.step is None else status.step})"
        )

    def _busy(self, held: LeaseRecord | None) -> BusyError:
        return BusyError(
            self._describe(held),
            effect="two writers would mix two lines of training in one run",
            remedy=f"wait for its end, or ask it to stop: fsdp-pretrain control {self._run.path} stop. A holder that "
            f"was killed is detected: on its own host at once, from others after {self._silent:g}s without a heartbeat "
            f"(one every {BEAT_SECONDS:g}s)",
        )

    def check(self) -> None:
        """Raise BusyError if another process took over the lock, as happens after this one was suspended for long."""
        if self._claim is None or not self._claim.still_mine():
            held = lease.read(self._run.lock)
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
    held = lease.read(run.lock)
    alive = lease.is_alive(held) if held is not None else None
    try:
        return alive if alive is not None else time.time() - run.lock.stat().st_mtime < SILENT_SECONDS
    except OSError:
        return False


def holder_died(run: RunDir) -> bool:
    """Whether a process of this host died while it held a run."""
    held = lease.read(run.lock)
    return held is not None and lease.is_alive(held) is False


@contextmanager
def hold(run: RunDir, purpose: str, *, silent: float = SILENT_SECONDS) -> Iterator[RunLock]:
    """Hold a run's lock for the block. Raises BusyError, StorageError."""
    lock = RunLock(run, purpose, silent=silent)
    while not lock.attempt():
        pass
    try:
        yield lock
    finally:
        lock.release()
