"""Requests to a running job: the operators' control inbox, and signals.

A request is a file in `RUN/control/`; rank 0 reads and removes it. Requests to rank 0 or to a signalled rank reach all
ranks in the all-reduce that every step does anyway, so all act after the same step.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import Field

from fsdp_pretrain.errors import Interrupted

from . import state_files
from .files import RunDir, now
from .journal import who
from .state_files import StateFile

STEERING = ("pause", "resume", "set")
"""Requests whose contents rank 0 broadcasts. Like `save` and `stop`, they are answered by a journal entry of kind
`control` with the request's id."""
MOST_STEPS, MOST_RANKS = 20, 16
"""Limits of one request to profile: a trace holds every kernel of its steps, megabytes per step."""
_POLL_INTERVAL = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Request(StateFile):
    """A request to a running job; a damaged one has an empty verb.

    `segment` is the start it was sent to. `avoid_hosts` is for a stop (see `send`), `key` for an alarm, `changes` and
    `seen` for a `set`, `steps` and `ranks` for a profile, `at` for `set` and profile.
    """

    id: str = ""  # the stem of its file name
    verb: str = ""
    reason: str = ""
    segment: int | None = None
    changes: list[str] = Field(default_factory=list)  # `section.key=value`
    at: int | None = None
    seen: int | None = None  # number of timeline entries that the sender knew
    avoid_hosts: list[str] = Field(default_factory=list)
    key: str = ""
    steps: int = 0
    ranks: list[int] = Field(default_factory=list)
    by: str = "?"


def put(folder: Path, **content: Any) -> Path:
    """Write a request, with its time and, unless it says `by`, its user, into an inbox. Returns its file. Raises
    OSError."""
    path = folder / f"{time.time_ns()}-{uuid.uuid4().hex[:6]}.json"
    state_files.write(path, {"by": who(), **content, "time": now()})
    return path


def take(folder: Path) -> list[Request]:
    """Remove and return all requests, oldest first, except one that its sender withdraws at this moment."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json") and name[0] != ".")  # noqa: PTH208
    except OSError:
        return []
    requests = []
    for name in names:
        request = state_files.view(folder / name, Request) or Request()
        try:
            (folder / name).unlink()
        except FileNotFoundError:
            continue
        requests.append(request.model_copy(update={"id": name.removesuffix(".json")}))
    return requests


def send(run: RunDir, verb: str, **more: Any) -> Path:
    """Send a request, `stop`, `save`, `profile` or one of `STEERING`, to the job of a run.

    `segment` is the start it is meant for: a start that has not begun to train drops requests to other starts. All may
    have a `reason`, a stop `avoid_hosts`, a list of hosts that the next start should not use; a profile has `steps`,
    `ranks` and `at`, the first step, if it is still ahead. Returns the file, whose stem is the request's id: removing
    it before the job does withdraws the request. Raises OSError, also if there is no run.
    """
    if not run.begun:
        raise FileNotFoundError(errno.ENOENT, "there is no run", str(run.path))
    return put(run.control, verb=verb, **more)


@dataclass
class Requests:
    """Pending requests on this rank; `reason` and `avoid_hosts` are those of the stop. `asked`: whether not only hosts
    are to be left. `steer`: whether there are requests for `Inbox.take_steering`."""

    stop: bool = False
    save: bool = False
    steer: bool = False
    reason: str = ""
    asked: bool = False
    avoid_hosts: tuple[str, ...] = ()
    profile: Request | None = None


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
        self._steering = list[Request]()
        self._orders = list[Request]()

    def discard(self, segment: int) -> list[Request]:
        """Remove and return requests that were sent to another start than `segment`."""
        requests = take(self._run.control) if self._run is not None else []
        for request in requests:
            if request.segment == segment:
                self._sort(request)
        return [request for request in requests if request.segment != segment]

    def listen(self) -> None:
        """Turn SIGTERM, SIGINT and SIGUSR1 into a request to stop; a second SIGINT interrupts at once."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self._requests.stop:
            raise KeyboardInterrupt
        self._requests.stop = self._requests.asked = True
        self._requests.reason = signal.Signals(number).name

    def take(self) -> Requests:
        """The pending requests: a save or profile is returned once, a stop every time.

        Reads the inbox at most twice a second.
        """
        if self._run is not None and time.monotonic() - self._polled >= _POLL_INTERVAL:
            self._polled = time.monotonic()
            for request in take(self._run.control):
                self._sort(request)
        taken = replace(self._requests, steer=bool(self._steering))
        self._requests.save, self._requests.profile = False, None
        return taken

    def take_steering(self) -> list[Request]:
        """The pending requests to steer the run, oldest first; each is returned once."""
        taken, self._steering = self._steering, []
        return taken

    def take_orders(self) -> list[Request]:
        """The requests to save or to stop, oldest first; each is returned once, so that it can be answered."""
        taken, self._orders = self._orders, []
        return taken

    def take_rest(self) -> list[Request]:
        """Read the inbox a last time; returns the requests that were not carried out, oldest first."""
        self._polled = -math.inf
        self.take()
        return sorted([*self.take_orders(), *self.take_steering()], key=lambda request: request.id)

    def _sort(self, request: Request) -> None:
        if request.verb == "stop":
            pending, asked = self._requests, "" if request.avoid_hosts else f"control stop by {request.by}"
            reason = ": ".join(filter(None, (asked, request.reason)))
            pending.stop, pending.asked = True, pending.asked or not request.avoid_hosts
            pending.reason = "; ".join(filter(None, (pending.reason, reason)))
            pending.avoid_hosts = tuple(sorted({*pending.avoid_hosts, *request.avoid_hosts}))
            self._orders.append(request)
        elif request.verb == "save":
            self._requests.save = True
            self._orders.append(request)
        elif request.verb == "profile" and 0 < request.steps <= MOST_STEPS and len(request.ranks) <= MOST_RANKS:
            self._requests.profile = request
        elif request.verb in STEERING:
            self._steering.append(request)
        else:
            print("warning: a request in control/ was damaged and is dropped", file=sys.stderr, flush=True)
