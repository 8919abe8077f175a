"""Reading from storage that may be slow, hang or fail: watched, timed, and with a second place to turn to.

A read that hangs cannot be interrupted, so reads are made in a thread of their own while the caller waits, but not
forever. A thread that is stuck is left behind (it is a daemon: the process ends without it) and the next read gets a
new one. Handing a read over costs about 20 microseconds; the packer does it once per block and per 64k tokens.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from fsdp_pretrain.errors import DataError, ReadTimeoutError

from .mapping import now_reading

T = TypeVar("T")
READ_TIMEOUT = 300.0
"""Seconds a read may take where no configuration says otherwise."""
_SLOW = 0.1
"""A read that takes this share of the timeout is worth a notice."""
_POLL = 1.0


@dataclass(slots=True)
class ReadTimes:
    """Reads that went to storage (or the page cache) since they were last asked for."""

    reads: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    """Seconds of the longest of them."""
    file: str = ""
    """The file that one was from; empty if there were no reads."""

    def add(self, other: ReadTimes) -> None:
        self.reads += other.reads
        self.seconds += other.seconds
        if other.slowest > self.slowest:
            self.slowest, self.file = other.slowest, other.file


class _Worker:
    """A thread that makes one call at a time."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Path, Callable[[], Any]] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._calls, self._outcomes), daemon=True, name="data-read")
        thread.start()
        self.identity = thread.ident or 0
        weakref.finalize(self, self._calls.put, None).atexit = False

    def call(self, path: Path, act: Callable[[], Any], timeout: float) -> tuple[Any, Exception | None] | None:
        """(result, exception) of a call; None if it took too long."""
        self._calls.put((path, act))
        while timeout > 0:
            try:
                return self._outcomes.get(timeout=min(timeout, _POLL))
            except Empty:
                timeout -= _POLL
        return None


def _serve(
    calls: SimpleQueue[tuple[Path, Callable[[], Any]] | None], outcomes: SimpleQueue[tuple[Any, Exception | None]]
) -> None:
    while (call := calls.get()) is not None:
        path, act = call
        now_reading[threading.get_ident()] = path
        result, raised = None, None
        try:
            result = act()
        except Exception as error:
            raised = error
        outcomes.put((result, raised))
        del call, act, result, raised  # or the last shard would stay open


class Places:
    """Directories with the same content, the first of which is used as long as it can be.

    Every read is made in another thread and waited for at most `timeout` seconds. What fails in one place is read from
    the next from then on. A place where a read hangs is not used again at all: every further file could cost the
    timeout once more. A suspended process does not use the timeout up: waiting is counted in short turns. Changes of
    place and slow reads are reported on standard error, and kept for the journal.
    """

    def __init__(self, directories: Sequence[Path], timeout: float) -> None:
        self._places, self._timeout = list(directories), timeout
        self._failed: set[tuple[str, Path]] = set()
        self._worker: _Worker | None = None
        self._times, self._slowest_reported = ReadTimes(), timeout * _SLOW
        self._notices: list[str] = []

    def read(self, name: str, act: Callable[[Path], T]) -> T:
        """The result of `act(place)`, which reads file `name` of a place, for the first place where it succeeds.

        It runs in another thread, possibly forever: it must not change anything that is shared.

        Raises:
            DataError: of the last place; ReadTimeoutError if it did not answer.
        """
        while True:
            left = [place for place in self._places if (name, place) not in self._failed] or self._places[-1:]
            try:
                return self._watched(left[0] / name, partial(act, left[0]))
            except DataError as error:
                if len(left) == 1:
                    raise
                if isinstance(error, ReadTimeoutError):
                    self._places.remove(left[0])
                    self._warn(f"{error.cause}; it and all further files are read from {left[1]}: {left[1] / name}")
                else:
                    self._failed.add((name, left[0]))
                    self._warn(f"{error.cause}; read from {left[1] / name} instead")

    def take_times(self) -> ReadTimes:
        """The reads since this was last called."""
        times, self._times = self._times, ReadTimes()
        return times

    def take_notices(self) -> list[str]:
        """What was reported since this was last called."""
        notices, self._notices = self._notices, []
        return notices

    def _warn(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)
        self._notices.append(text)

    def _watched(self, path: Path, act: Callable[[], T]) -> T:
        """What `act` returns or raises; ReadTimeoutError if it does neither in time."""
        if self._worker is None:
            self._worker = _Worker()
        started = time.perf_counter()
        outcome = self._worker.call(path, act, self._timeout)
        took = time.perf_counter() - started
        file = now_reading.get(self._worker.identity, path)
        if outcome is None:
            self._worker = None  # left behind with what it is stuck in
            raise ReadTimeoutError(
                f"{file} did not answer for {self._timeout:g} s: the read hangs",
                effect="training cannot go on without it; it can be resumed from the last checkpoint",
                remedy="look at the file system or mount (does `head` read the file?), or name a copy of the corpus as "
                "the source's mirror; data.read_timeout is how long a read may take",
            )
        self._times.add(ReadTimes(1, took, took, str(file)))
        if took > self._slowest_reported:
            self._slowest_reported = 2 * took  # the next only if it is much worse: no flood from a slow mount
            self._warn(f"a slow read: {file} took {took:.1f} s to answer")
        result, error = outcome
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]
