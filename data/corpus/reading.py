"""Reading from storage that may be slow, hang or fail: watched, timed, and with a second place to turn to.

A read that hangs cannot be interrupted, so reads are made in a thread of their own while the caller waits, but not
forever. A thread that is stuck is left behind (it is a daemon: the process ends without it) and the next read gets a
new one. Handing a read over costs about 20 microseconds; the packer does it once per block and per 64k tokens.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from fsdp_pretrain.deadline import NoAnswerError, Worker
from fsdp_pretrain.errors import DataError, ReadTimeoutError

from .mapping import now_reading

T = TypeVar("T")
READ_TIMEOUT = 300.0
"""Seconds a read may take where no configuration says otherwise."""
_SLOW = 0.1
"""A read that takes this share of the timeout is worth a notice."""


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


def _read(path: Path, act: Callable[[], T]) -> T:
    """In the thread; the watchdog knows a read by the name of this function."""
    now_reading[threading.get_ident()] = path
    return act()


class MirroredPlaces:
    """Directories with the same content, the first of which is used as long as it can be.

    Every read is made in another thread and waited for at most `timeout` seconds. What fails in one place is read from
    the next from then on. A place where a read hangs is not used again at all: every further file could cost the
    timeout once more. A suspended process does not use the timeout up: waiting is counted in short turns. Changes of
    place and slow reads are reported on standard error, and kept for the journal.
    """

    def __init__(self, directories: Sequence[Path], timeout: float) -> None:
        self._places, self._timeout = list(directories), timeout
        self._failed: set[tuple[str, Path]] = set()
        self._worker: Worker | None = None
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
        worker = self._worker = self._worker or Worker("data-read")
        started = time.perf_counter()
        try:
            return worker.call(partial(_read, path, act), self._timeout)
        except NoAnswerError:
            self._worker = None  # left behind with what it is stuck in
            raise ReadTimeoutError(
                f"{now_reading.get(worker.identity, path)} did not answer for {self._timeout:g} s: the read hangs",
                effect="training cannot go on without it; it can be resumed from the last checkpoint",
                remedy="look at the file system or mount (does `head` read the file?), or name a copy of the corpus as "
                "the source's mirror; data.read_timeout is how long a read may take",
            ) from None
        finally:
            if self._worker is worker:
                self._count(now_reading.get(worker.identity, path), time.perf_counter() - started)

    def _count(self, file: Path, took: float) -> None:
        self._times.add(ReadTimes(1, took, took, str(file)))
        if took > self._slowest_reported:
            self._slowest_reported = 2 * took  # the next only if it is much worse: no flood from a slow mount
            self._warn(f"a slow read: {file} took {took:.1f} s to answer")
