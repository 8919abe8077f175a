"""Transfers of single blocks into the cache: several at a time, tried again, and what is wrong with them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from data.corpus.cached import CachedCopy
from fsdp_pretrain.errors import Exit, UserError

from .window import Key

AT_ONCE = 8
"""Blocks in flight."""
PATIENCE = 5.0
"""Seconds for which a request is repeated before its failure is told."""
_FIRST_PAUSE, _LONGEST_PAUSE, _LASTING_PAUSE = 0.5, 20.0, 30.0


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
        copies: the corpora by URL, by fingerprint.

    Attributes:
        in_flight: the blocks that are being fetched.
        failures: blocks that failed, and have not come since.
        blocks, bytes: how much has come.
    """

    def __init__(self, copies: Mapping[str, CachedCopy]) -> None:
        self._copies, self._pool = copies, ThreadPoolExecutor(AT_ONCE, "fetch")
        self.in_flight: dict[Key, Future[int]] = {}
        self.failures: dict[Key, Failure] = {}
        self.blocks = self.bytes = 0
        self.arrived = threading.Event()
        for copy in copies.values():
            copy.remote.patience = PATIENCE

    def may_start(self, key: Key) -> bool:
        """Whether there is a free thread, and it is time to try this block (again)."""
        failure = self.failures.get(key)
        return len(self.in_flight) < AT_ONCE and (failure is None or time.monotonic() >= failure.not_before)

    def start(self, key: Key) -> None:
        """Fetch a block that is not in flight."""
        self.in_flight[key] = self._pool.submit(self._copies[key[0]].fetch, key[1])
        self.in_flight[key].add_done_callback(lambda _: self.arrived.set())

    def take_failed(self) -> list[Key]:
        """The blocks whose transfers have failed since the last call. What has come is counted."""
        self.arrived.clear()
        failed = []
        for key, future in [item for item in self.in_flight.items() if item[1].done()]:
            del self.in_flight[key]
            try:
                self.bytes += future.result()
            except UserError as error:
                self._note(key, error.cause, lasting=error.exit is Exit.REFUSED)
                failed.append(key)
            else:
                self.blocks += 1
                self.failures.pop(key, None)
        return failed

    def _note(self, key: Key, text: str, *, lasting: bool) -> None:
        failure = self.failures.setdefault(key, Failure(text, lasting, time.time()))
        failure.text, failure.lasting, failure.tries = text, lasting, failure.tries + 1
        pause = _LASTING_PAUSE if lasting else min(_FIRST_PAUSE * 2 ** min(failure.tries, 10), _LONGEST_PAUSE)
        failure.not_before = time.monotonic() + pause * random.uniform(0.5, 1.0)

    def forget(self, needed: Collection[Key]) -> None:
        """Forget failures of blocks that are not needed any more."""
        self.failures = {key: failure for key, failure in self.failures.items() if key in needed}

    def problem(self) -> Failure | None:
        """What is wrong now: the failure that has lasted longest."""
        each = self.failures.values()
        return min(each, key=lambda failure: (not failure.lasting, failure.since), default=None)
