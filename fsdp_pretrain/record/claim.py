"""A file that says who is at work: made by one, kept fresh by a thread, taken away from a holder that is dead.

Evaluations are claimed with it, and so is the run itself (`record.lock`). Exclusive creation works on network file
systems, where locks of the kernel are often local or absent.
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

from ..errors import StorageError
from . import state_files
from .files import make_directory, now
from .state_files import DamagedFileError, StateFile

BEAT_SECONDS = 10.0
_LOOKS, _LOOK_SECONDS = 10, 0.1


class Held(StateFile):
    """What a claim says of its holder.

    Attributes:
        token: what tells it from every other claim.
        host, namespace, pid, process_started: the process, see `this_process`.
        time: when it was made.
        purpose: what the holder does.
        deadline: seconds that this may take, if it has a limit.
    """

    token: str
    host: str = "?"
    namespace: str | None = None
    pid: int | None = None
    process_started: float | None = None
    time: str = "?"
    purpose: str = "an unknown process"
    deadline: float | None = None


def read(path: Path) -> Held | None:
    """The holder of a claim; None if there is none, or the claim is damaged or being written this moment."""
    return state_files.view(path, Held)


class Claim:
    """A claim that this process holds.

    Args:
        path: the file.
        token: what tells it from every other claim.
        beat: seconds between two signs of life.
    """

    def __init__(self, path: Path, token: str, beat: float = BEAT_SECONDS) -> None:
        self.path, self._token, self._interval = path, token, beat
        self._done = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    @classmethod
    def take(cls, path: Path, *, beat: float = BEAT_SECONDS, **facts: Any) -> Claim | None:
        """Make the file, with `facts` about the holder; None if it exists. Raises OSError."""
        token = uuid.uuid4().hex
        make_directory(path.parent)
        try:
            with path.open("x", encoding="utf-8") as file:
                try:
                    file.write(state_files.seal({"token": token, **this_process(), "time": now(), **facts}))
                    file.flush()
                except OSError:  # a full disk: leave nothing that looks like a holder
                    path.unlink(missing_ok=True)
                    raise
        except FileExistsError:
            return None
        return cls(path, token, beat)

    def _beat(self) -> None:
        while not self._done.wait(self._interval):
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def still_mine(self) -> bool:
        """Whether nobody took it over, which happens to a process that was frozen for long."""
        for _ in range(_LOOKS):
            try:
                held = state_files.read(self.path, Held)
            except DamagedFileError:  # another's that is being written this moment, or flipped bits
                time.sleep(_LOOK_SECONDS)
            except StorageError:
                return False
            else:
                return held is not None and held.token == self._token
        return True  # flipped bits: nobody has made another

    def release(self) -> None:
        """Give it up."""
        self._done.set()
        if self.still_mine():
            self.path.unlink(missing_ok=True)


def this_process() -> dict[str, Any]:
    """What lets others find out whether this process is alive."""
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

    In ticks since boot where the system tells: the time of day would seem to change when the clock is set, and a
    live holder would look like another process that got its id.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:  # killed, and its parent does not care
            return None
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists():
            return float(stat.read_text(errors="replace").rpartition(")")[2].split()[19])
        return process.create_time()
    except (psutil.NoSuchProcess, OSError):
        return None


def is_alive(held: Held) -> bool | None:
    """Whether the holder that a claim names lives; None if that cannot be seen from here."""
    if held.host != socket.gethostname() or held.namespace != _pid_namespace():
        return None
    if held.pid is None or held.process_started is None:
        return None
    started = process_start(held.pid)
    return started is not None and abs(started - held.process_started) <= 1


class Holder:
    """Judges again and again whether the holder of a claim lives; one elsewhere by its beats.

    Silence is measured on the clock of this process, from its first look on, so clocks need not agree.

    Args:
        path: the claim.
        silent: seconds without a beat after which a holder elsewhere counts as dead.
    """

    def __init__(self, path: Path, silent: float) -> None:
        self.path, self._silent = path, silent
        self._sign: tuple[Any, float] | None = None
        self._since = 0.0

    def lives(self, held: Held | None) -> bool | None:
        """Whether it does; None as long as that is not known.

        Args:
            held: what the claim says now.

        Raises:
            OSError: there is no claim any more.
        """
        sign = (held and held.token, self.path.stat().st_mtime)
        alive = is_alive(held) if held is not None else None
        if alive is not None:
            return alive
        before, now = self._sign, time.monotonic()
        if sign != before:
            self._sign, self._since = sign, now
            return None if before is None else True
        return False if now - self._since > self._silent else None


def take_away(path: Path, held: Held | None) -> None:
    """Remove the claim that was seen as `held`. If it is another one meanwhile, that one is given back."""
    aside = path.with_name(f"{path.stem}-stale-{uuid.uuid4().hex[:8]}.json")
    with contextlib.suppress(OSError):
        path.rename(aside)
        if read(aside) != held:  # between the look and the rename another process had renewed it
            with contextlib.suppress(OSError):
                os.link(aside, path)
        aside.unlink(missing_ok=True)
