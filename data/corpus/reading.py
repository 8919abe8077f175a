"""Reads with a timeout and timings, for storage that may be slow, hang or fail.

A read that hangs cannot be interrupted, so reads run in another thread and the caller waits with a timeout. A stuck
thread is abandoned (it is a daemon: the process ends without it) and the next read gets a new one. Handing a read over
costs about 20 microseconds; the packer does it once per block and per 64k tokens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Lock, get_ident
from typing import TypeVar

from fsdp_pretrain.errors import ReadTimeoutError
from fsdp_pretrain.processes import NoAnswerError, Worker
from fsdp_pretrain.remote import Location, Url

from .files import reading

T = TypeVar("T")
READ_TIMEOUT = 300.0
"""Default timeout of a read, seconds."""


@dataclass(slots=True)
class ReadTimes:
    """Reads from storage (or the page cache) since `CorpusReads.take_times` was last called."""

    reads: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    """Seconds of the longest read."""
    file: str = ""
    """File of the longest read; empty without reads."""

    def add(self, other: ReadTimes) -> None:
        self.reads += other.reads
        self.seconds += other.seconds
        if other.slowest > self.slowest:
            self.slowest, self.file = other.slowest, other.file


def _read(path: Location, act: Callable[[], T]) -> T:
    """In the reading thread: set what it reads, for reports on a rank that hangs, and call `act`."""
    reading[get_ident()] = path
    try:
        return act()
    finally:
        del reading[get_ident()]


class CorpusReads:
    """The reads of a corpus: each runs in another thread, for at most `timeout` seconds.

    Time in which the process is suspended does not count, since the caller waits in short turns. `problem`: returns why
    blocks of a URL do not arrive, or an empty text.
    """

    def __init__(self, timeout: float, problem: Callable[[], str] = str) -> None:
        self._timeout, self._problem = timeout, problem
        self._worker: Worker | None = None
        self._turn = Lock()  # a loader that ends may still read when the next one begins
        self._times, self._notices = ReadTimes(), list[str]()

    def read(self, path: Location, act: Callable[[], T]) -> T:
        """Call `act`, which reads a file or object, and return or raise what it does.

        It runs in another thread, possibly forever, so it must not change anything shared. Raises ReadTimeoutError if
        it takes too long.
        """
        with self._turn:
            return self._watched(path, act)

    def take_times(self) -> ReadTimes:
        """Reads since the last call."""
        times, self._times = self._times, ReadTimes()
        return times

    def take_notices(self) -> list[str]:
        """Reports since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def warn(self, text: str) -> None:
        """Print a warning on standard error, and keep it as a notice for the journal."""
        print(f"warning: {text}", file=sys.stderr, flush=True)
        self._notices.append(text)

    def _watched(self, path: Location, act: Callable[[], T]) -> T:
        worker = self._worker = self._worker or Worker("data-read")
        started = time.perf_counter()
        try:
            return worker.call(partial(_read, path, act), self._timeout)
        except NoAnswerError:
            self._worker = None  # abandoned with its thread
            file = reading.get(worker.identity, path)
            problem = ""
            if isinstance(path, Url):  # the path of a block's file in the cache would tell less
                file, problem = file if isinstance(file, Url) else path, self._problem()
            raise ReadTimeoutError(
                f"{file} did not answer for {self._timeout:g} s: {problem or 'the read hangs'}",
                effect="training cannot continue without it; it can be resumed from the last checkpoint",
                remedy="check the mount (does `head` read the file?), or the network and the credentials; or set the "
                "source's path to a copy of the corpus. data.read_timeout is how long a read may take",
            ) from None
        finally:
            if self._worker is worker:
                took = time.perf_counter() - started
                self._times.add(ReadTimes(1, took, took, str(path)))
