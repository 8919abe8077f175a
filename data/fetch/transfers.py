"""Transfers of single blocks into the cache: several at a time, with retries, and what is wrong with them. No torch."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum

from data.corpus.cache import BlockCache, RemoteCorpus, WrongChecksumError, damage, fetch_block
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.remote import Problem, Remote, RemoteError, Traffic
from fsdp_pretrain.units import human_time

from .users import Key

AT_ONCE = 8
"""Blocks in flight."""
_PATIENCE = 5.0
"""Seconds for which a request is repeated before its failure is told."""
_TRIES = 4
"""Of a block whose checksum is wrong, before its object counts as damaged."""
_FIRST_PAUSE, _LONGEST_PAUSE, _LASTING_PAUSE, _FULL_PAUSE = 0.5, 20.0, 30.0, 0.5
_SILENT = 20.0
"""Seconds without an answer that are told."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Copy:
    """One place from which the blocks of a corpus come."""

    corpus: RemoteCorpus
    blocks: BlockCache


class Outcome(Enum):
    """How a transfer ended."""

    DONE = "done"
    THERE = "there"
    """Another process has fetched it."""
    FULL = "full"
    """The cache's disk is full."""
    FAILED = "failed"


@dataclass
class Failure:
    """A block that does not come."""

    text: str
    lasting: bool
    """It does not end without a person."""
    since: float
    """Seconds since 1970."""
    tries: int = 0
    not_before: float = 0.0
    """`time.monotonic()` of the next try."""


@dataclass
class Counts:
    """What transfers have done so far."""

    blocks: int = 0
    corrupted: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    """Of connections that were replaced."""


class Transfers:
    """Fetches blocks in threads.

    Args:
        copies: the places of each corpus by fingerprint, the preferred one first.

    Attributes:
        in_flight: bytes of each block that is being fetched.
        failures: blocks that failed, and have not come since.
    """

    def __init__(self, copies: Mapping[str, list[Copy]]) -> None:
        self._copies, self._remotes = copies, dict[str, Remote]()
        self._pool, self._lock = ThreadPoolExecutor(AT_ONCE, "fetch"), threading.Lock()
        self._futures: dict[Key, Future[tuple[Outcome, str, bool]]] = {}
        self._started: dict[Key, float] = {}
        self.in_flight: dict[Key, int] = {}
        self.failures: dict[Key, Failure] = {}
        self._counts = Counts()
        self.arrived = threading.Event()

    @property
    def counts(self) -> Counts:
        """A copy, with the traffic of all connections."""
        with self._lock:
            total = Traffic(**vars(self._counts.traffic))
            for remote in self._remotes.values():
                _add(total, remote.traffic)
            return Counts(self._counts.blocks, self._counts.corrupted, total)

    def may_start(self, key: Key) -> bool:
        """Whether there is a free thread, and it is time to try this block (again)."""
        now = time.monotonic()
        failure = self.failures.get(key)
        return (
            len(self.in_flight) < AT_ONCE and key not in self.in_flight and (not failure or now >= failure.not_before)
        )

    def start(self, key: Key, size: int) -> None:
        self.in_flight[key], self._started[key] = size, time.monotonic()
        tries = self.failures[key].tries if key in self.failures else 0
        future = self._pool.submit(self._transfer, key, tries, sum(self.in_flight.values()))
        future.add_done_callback(lambda _: self.arrived.set())
        self._futures[key] = future

    def take(self) -> dict[Key, Outcome]:
        """The transfers that have ended since the last call."""
        self.arrived.clear()
        ended = {}
        for key, future in list(self._futures.items()):
            if not future.done():
                continue
            outcome, text, lasting = future.result()
            del self._futures[key], self.in_flight[key], self._started[key]
            ended[key] = outcome
            if outcome in (Outcome.DONE, Outcome.THERE):
                self.failures.pop(key, None)
            else:
                self._note(key, text, lasting)
                if outcome is Outcome.FULL:  # until evicted blocks are let go; no request was made
                    self.failures[key].not_before = time.monotonic() + _FULL_PAUSE
        return ended

    def _note(self, key: Key, text: str, lasting: bool) -> None:
        failure = self.failures.setdefault(key, Failure(text, lasting, time.time()))
        failure.text, failure.lasting, failure.tries = text, lasting, failure.tries + 1
        pause = _LASTING_PAUSE if lasting else min(_FIRST_PAUSE * 2 ** min(failure.tries, 10), _LONGEST_PAUSE)
        failure.not_before = time.monotonic() + pause * random.uniform(0.5, 1.0)

    def forget(self, needed: Collection[Key]) -> None:
        """Drop failures of blocks that are not needed any more."""
        for key in [key for key in self.failures if key not in needed]:
            del self.failures[key]

    def problem(self) -> Failure | None:
        """What is wrong now: the failure that has lasted longest, or an answer that does not come."""
        found = min(self.failures.values(), key=lambda failure: (not failure.lasting, failure.since), default=None)
        if found is not None:
            return found
        oldest = min(self._started.items(), key=lambda item: item[1], default=None)
        if oldest is None or (waited := time.monotonic() - oldest[1]) < _SILENT:
            return None
        (fingerprint, block), _ = oldest
        url = self._copies[fingerprint][0].corpus.url
        text = f"block {block} of {url} has not come for {human_time(waited)}"
        return Failure(text, False, time.time() - waited)

    # ------------------------------------------------------------------ in a thread

    def _transfer(self, key: Key, tries: int, room: int) -> tuple[Outcome, str, bool]:
        """Fetch a block; (outcome, what is wrong, whether it lasts). The copies of a corpus take turns at failures.
        `room`: bytes of it, and of those that were in flight before it."""
        fingerprint, block = key
        copies = self._copies[fingerprint]
        copy = copies[tries % len(copies)]
        try:
            copy.blocks.path(block).parent.mkdir(parents=True, exist_ok=True)
            if copy.blocks.has(block):
                return Outcome.THERE, "", False
            if shutil.disk_usage(copy.blocks.directory).free < room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            lengths, tokens = self._checked(copy, block)
            copy.blocks.put(block, lengths, tokens)
        except RemoteError as error:
            if error.problem is Problem.DENIED:
                self._renew(copy)  # credentials may be renewed
            return Outcome.FAILED, error.cause, not error.is_temporary
        except UserError as error:
            return Outcome.FAILED, error.cause, True
        except OSError as error:
            full = error.errno in _FULL
            text = f"the cache {copy.blocks.directory.parent} cannot be written: {error.strerror}"
            return Outcome.FULL if full else Outcome.FAILED, text, False
        with self._lock:
            self._counts.blocks += 1
        return Outcome.DONE, "", False

    def _checked(self, copy: Copy, block: int) -> tuple[bytes, bytes]:
        remote = self._remote(copy)
        for attempt in range(_TRIES):
            try:
                return fetch_block(remote, copy.corpus, block)
            except WrongChecksumError as error:
                with self._lock:
                    self._counts.corrupted += 1
                if attempt + 1 == _TRIES:
                    raise damage(remote, copy.corpus, error) from None
        raise AssertionError

    def _remote(self, copy: Copy) -> Remote:
        with self._lock:
            if copy.corpus.url not in self._remotes:
                self._remotes[copy.corpus.url] = Remote(copy.corpus.url, patience=_PATIENCE)
            return self._remotes[copy.corpus.url]

    def _renew(self, copy: Copy) -> None:
        with self._lock:
            if (old := self._remotes.pop(copy.corpus.url, None)) is not None:
                _add(self._counts.traffic, old.traffic)


def _add(total: Traffic, more: Traffic) -> None:
    for name, value in vars(more).items():
        setattr(total, name, getattr(total, name) + value)
