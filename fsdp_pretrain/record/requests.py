"""Requests to a running job: the operators' control inbox, and signals.

A request is a file in `RUN/control/`; rank 0 reads and removes it. Requests to rank 0 or to a signalled rank reach all
ranks in the all-reduce that every step does anyway, so all act after the same step.
"""

from __future__ import annotations

import errno
import signal
import sys
import time
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from fsdp_pretrain.errors import Interrupted

from . import inbox
from .files import RunDir
from .profiles import MOST_RANKS, MOST_STEPS, ProfileRequest

_POLL_INTERVAL = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def send(run: RunDir, verb: str, **more: Any) -> None:
    """Send a request, `stop`, `save` or `profile`, to the job of a run. Raises OSError, also if there is no run.

    A stop may have a `reason`, and `avoid_hosts`, a list of hosts that the next start should not use; a profile has
    the fields of `profiles.ProfileRequest`.
    """
    if not run.begun:
        raise FileNotFoundError(errno.ENOENT, "there is no run", str(run.path))
    inbox.put(run.control, verb=verb, **more)


@dataclass
class Requests:
    """Pending requests on this rank; `reason` and `avoid_hosts` belong to the stop."""

    stop: bool = False
    save: bool = False
    reason: str = ""
    avoid_hosts: tuple[str, ...] = ()
    profile: ProfileRequest | None = None


def interrupt_on_signal() -> None:
    """Until `Inbox.listen`, make SIGTERM, SIGINT and SIGUSR1 raise Interrupted in the main thread."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    for later in _SIGNALS:  # torchrun sends SIGTERM to the remaining ranks: do not interrupt their shutdown
        signal.signal(later, signal.default_int_handler if later == signal.SIGINT else signal.SIG_IGN)
    raise Interrupted(f"{signal.Signals(number).name} before training began")


class Inbox:
    """Collects requests on one rank; `run` is None except on rank 0."""

    def __init__(self, run: RunDir | None) -> None:
        self._run, self._polled = run, 0.0
        self._requests = Requests()

    def discard(self) -> int:
        """Remove requests meant for an earlier start. Returns their number."""
        return len(inbox.take(self._run.control)) if self._run is not None else 0

    def listen(self) -> None:
        """Turn SIGTERM, SIGINT and SIGUSR1 into a request to stop; a second SIGINT interrupts at once."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self._requests.stop:
            raise KeyboardInterrupt
        self._requests.stop = True
        self._requests.reason = signal.Signals(number).name

    def take(self) -> Requests:
        """The pending requests: a save or profile is returned once, a stop every time.

        Reads the inbox at most twice a second.
        """
        if self._run is not None and time.monotonic() - self._polled >= _POLL_INTERVAL:
            self._polled = time.monotonic()
            self._read_files(self._run)
        taken = replace(self._requests)
        self._requests.save, self._requests.profile = False, None
        return taken

    def _read_files(self, run: RunDir) -> None:
        for request in inbox.take(run.control):
            if request.verb == "stop":
                self._requests.stop = True
                self._requests.reason = request.reason or f"control stop by {request.by}"
                self._requests.avoid_hosts = tuple(request.avoid_hosts)
            elif request.verb == "save":
                self._requests.save = True
            elif request.verb == "profile" and 0 < request.steps <= MOST_STEPS and len(request.ranks) <= MOST_RANKS:
                ranks = tuple(request.ranks)
                self._requests.profile = ProfileRequest(request.steps, request.at or 0, ranks, request.by)
            else:
                print(f"warning: a request in {run.control} was damaged and is dropped", file=sys.stderr, flush=True)
