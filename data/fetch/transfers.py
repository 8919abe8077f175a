"""Transfers of single blocks into the cache: several at a time, tried again, and what is wrong with them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from data.corpus.cache import BlockCache, RemoteCorpus, fetch_block
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.remote import Problem, Remote, RemoteError, Traffic
from fsdp_pretrain.units import human_time

from .forecast import Key

AT_ONCE = 8
"""Blocks in flight."""
_PATIENCE = 5.0
"""Seconds for which a request is repeated before its failure is told."""
_FIRST_PAUSE, _LONGEST_PAUSE, _LASTING_PAUSE = 0.5, 20.0, 30.0
_SILENT = 20.0
"""Seconds without an answer that are told."""


@dataclass(frozen=True)
class Copy:
    """One place from which the blocks of a corpus come."""

    corpus: RemoteCorpus
    blocks: BlockCache


@dataclass
class Failure:
    """A block that does not come.

    Attributes:
        lasting: it does not end without a person.
        since: seconds since 1970.
        not_before: `time.monotonic()` of the next try.
    """

    text: str
    lasting: bool
    since: float
    tries: int = 0
    not_before: float = 0.0


class Transfers:
    """Fetches blocks in threads.

    Args:
        copies: the places of each corpus by fingerprint, the preferred one first. They take turns at failures.

    Attributes:
        in_flight: bytes of each block that is being fetched.
        failures: blocks that failed, and have not come since.
        blocks: how many came.
        corrupted: answers with a wrong checksum.
    """

    def __init__(self, copies: Mapping[str, list[Copy]]) -> None:
        self._copies, self._lock = copies, threading.Lock()
        self._connections, self._remotes = list[Remote](), dict[str, Remote]()
        self._pool = ThreadPoolExecutor(AT_ONCE, "fetch")
        self._futures: dict[Key, tuple[float, Future[None]]] = {}
        self.in_flight: dict[Key, int] = {}
        self.failures: dict[Key, Failure] = {}
        self.blocks = self.corrupted = 0
        self.arrived = threading.Event()

    @property
    def traffic(self) -> Traffic:
        """Of all connections."""
        with self._lock:
            each = [vars(remote.traffic) for remote in self._connections]
        return Traffic(**{name: sum(one[name] for one in each) for name in vars(Traffic())})

    def may_start(self, key: Key) -> bool:
        """Whether there is a free thread, and it is time to try this block (again)."""
        failure = self.failures.get(key)
        due = failure is None or time.monotonic() >= failure.not_before
        return due and len(self.in_flight) < AT_ONCE and key not in self.in_flight

    def start(self, key: Key, size: int) -> None:
        copies, failure = self._copies[key[0]], self.failures.get(key)
        future = self._pool.submit(self._transfer, copies[(failure.tries if failure else 0) % len(copies)], key[1])
        self.in_flight[key], self._futures[key] = size, (time.monotonic(), future)
        future.add_done_callback(lambda _: self.arrived.set())

    def take(self) -> list[Key]:
        """The blocks that have come since the last call; what has failed is noted."""
        self.arrived.clear()
        come = []
        for key, (_, future) in list(self._futures.items()):
            if not future.done():
                continue
            del self._futures[key], self.in_flight[key]
            try:
                future.result()
            except UserError as error:
                temporary = isinstance(error, RemoteError) and error.is_temporary
                self._note(key, error.cause, lasting=not temporary)
            except OSError as error:
                place = self._copies[key[0]][0].blocks.directory.parent
                self._note(key, f"the cache {place} cannot be written: {error.strerror}", lasting=False)
            else:
                come.append(key)
                self.blocks += 1
                self.failures.pop(key, None)
        return come

    def _note(self, key: Key, text: str, *, lasting: bool) -> None:
        failure = self.failures.setdefault(key, Failure(text, lasting, time.time()))
        failure.text, failure.lasting, failure.tries = text, lasting, failure.tries + 1
        pause = _LASTING_PAUSE if lasting else min(_FIRST_PAUSE * 2 ** min(failure.tries, 10), _LONGEST_PAUSE)
        failure.not_before = time.monotonic() + pause * random.uniform(0.5, 1.0)

    def forget(self, needed: Collection[Key]) -> None:
        """Forget failures of blocks that are not needed any more."""
        self.failures = {key: failure for key, failure in self.failures.items() if key in needed}

    def problem(self) -> Failure | None:
        """What is wrong now: the failure that has lasted longest, or an answer that does not come."""
        if self.failures:
            return min(self.failures.values(), key=lambda failure: (not failure.lasting, failure.since))
        waited = {time.monotonic() - started: key for key, (started, _) in self._futures.items()}
        if not waited or (longest := max(waited)) < _SILENT:
            return None
        fingerprint, block = waited[longest]
        url = self._copies[fingerprint][0].corpus.url
        text = f"block {block} of {url} has not come for {human_time(longest)}"
        return Failure(text, lasting=False, since=time.time() - longest)

    # ------------------------------------------------------------------ in a thread

    def _transfer(self, copy: Copy, block: int) -> None:
        """Fetch a block. Raises UserError, OSError."""
        with self._lock:
            if (remote := self._remotes.get(copy.corpus.url)) is None:
                remote = self._remotes[copy.corpus.url] = Remote(copy.corpus.url, patience=_PATIENCE)
                self._connections.append(remote)
        try:
            copy.blocks.put(block, *fetch_block(remote, copy.corpus, block, self._count_corrupted))
        except RemoteError as error:
            if error.problem is Problem.DENIED:  # credentials may be renewed: connect again
                with self._lock:
                    self._remotes.pop(copy.corpus.url, None)
            raise

    def _count_corrupted(self) -> None:
        with self._lock:
            self.corrupted += 1
