"""The fetcher of a node: brings blocks into the cache in the order in which its ranks will need them.

It knows that order (`forecast`) and decides by it what to fetch and what to drop (`window`). It has no state of its
own: started anew, it looks at the ranks' positions and at the files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from data.corpus.cache import BlockCache
from data.packing import progress
from data.packing.position import Position
from fsdp_pretrain.fetcher_status import FetcherStatus

from .forecast import Key, Upcoming
from .transfers import Copy, Transfers
from .window import Window, window_of

_TURN, _FORECAST_SECONDS = 0.2, 0.05
_STATUS_SECONDS, _LIST_SECONDS, _RECORD_SECONDS = 1.0, 10.0, 300.0
_PLAN_SHARE = 0.1
"""Of the time, at most, spent on deciding what to fetch."""


@dataclass(frozen=True)
class FetcherPlaces:
    """Files of one fetcher.

    Attributes:
        pages: folder of the ranks' positions.
        status: replaced whenever it changes.
        record: a line every some minutes and at the end, under the run directory.
    """

    pages: Path
    status: Path
    record: Path


class Every:
    """Tells when so many seconds have passed; the first time is at once."""

    def __init__(self, seconds: float, *, at_once: bool = True) -> None:
        self._seconds, self._due = seconds, time.monotonic() + (0.0 if at_once else seconds)

    def is_due(self) -> bool:
        if (now := time.monotonic()) < self._due:
            return False
        self._due = now + self._seconds
        return True


class Fetcher:
    """One node's fetcher.

    Args:
        upcoming: uses of blocks by the node's ranks.
        copies: the places of each cached corpus by fingerprint, the preferred one first.
        cache: the cache directory.
        size: bytes that it may hold.
        ranks: of this node.
        node: its number.
        stop: set when it is to end.
    """

    def __init__(
        self,
        upcoming: Upcoming,
        copies: Mapping[str, list[Copy]],
        places: FetcherPlaces,
        *,
        cache: Path,
        size: int,
        ranks: range,
        node: int,
        stop: threading.Event,
    ) -> None:
        self._upcoming, self._places, self._cache, self._size = upcoming, places, cache, size
        self._ranks, self._stop, self._done = ranks, stop, Position()
        self._transfers = Transfers(copies)
        self._sizes = {fingerprint: found[0].corpus.sizes for fingerprint, found in copies.items()}
        self._present: dict[Key, int] = {}  # bytes; what came first is first
        self._window, self._window_until = Window([], [], 0), 0.0
        self._ready_until = 0
        self._evictions = 0
        self._status = FetcherStatus(host=socket.gethostname(), node=node, pid=os.getpid())
        self._list, self._say = Every(_LIST_SECONDS), Every(_STATUS_SECONDS)
        self._record = Every(_RECORD_SECONDS, at_once=False)

    def run(self) -> None:
        """Fetch until it is to end."""
        while not self._stop.is_set():
            self.turn()
            self._transfers.arrived.wait(_TURN)
        self._look_at_ranks()
        self._write_status()
        self._write_record()

    def turn(self) -> None:
        """Look at the ranks, the cache and the ended transfers, and start what can be started."""
        self._look_at_ranks()
        for key in self._transfers.take():
            self._present[key] = int(self._sizes[key[0]][key[1]])
        if self._list.is_due():
            self._list_cache()
        self._forecast()
        self._start_transfers()
        if self._say.is_due():
            self._write_status()
        if self._record.is_due():
            threading.Thread(target=self._write_record, daemon=True).start()  # the run directory may hang

    # ------------------------------------------------------------------ looking

    def _look_at_ranks(self) -> None:
        found = slowest(self._places.pages, self._ranks)
        if found is not None and found.step > self._done.step:
            self._done = found
            self._upcoming.drop(found.step)

    def _list_cache(self) -> None:
        """Blocks of corpora that the run does not train on count, and are dropped first."""
        ages: dict[Key, tuple[float, int]] = {}
        for folder in self._cache.glob("*/blocks"):
            cache = BlockCache(self._cache, folder.parent.name)
            cache.clean()
            ages |= {(folder.parent.name, block): found for block, found in cache.present().items()}
        self._present = {key: ages[key][1] for key in sorted(ages, key=ages.__getitem__)}

    def _forecast(self) -> None:
        until = time.monotonic() + _FORECAST_SECONDS
        while not self._upcoming.is_full and time.monotonic() < until:
            self._upcoming.extend()

    # ------------------------------------------------------------------ deciding

    def _start_transfers(self) -> None:
        self._forget_removed()
        self._plan()
        wanted, droppable = self._window.wanted, list(reversed(self._window.droppable))
        uses = self._upcoming.uses
        missing = [key for key in wanted if key not in self._present and key in uses]
        self._transfers.forget(missing)
        last = self._upcoming.last_step if self._window.until is None else self._window.until
        self._ready_until = min([last, *(uses[key][0] - 1 for key in missing)])
        limit = self._limit()
        while self._used > limit and droppable:
            self._drop(droppable.pop())
        for key in missing:
            size = int(self._sizes[key[0]][key[1]])
            if not self._transfers.may_start(key):
                continue
            while self._used + size > limit and droppable:
                self._drop(droppable.pop())
            # The next step must come, even if it does not fit.
            if self._used + size > limit and uses[key][0] > self._done.step + 1:
                return
            self._transfers.start(key, size)

    def _forget_removed(self) -> None:
        """A rank that finds a block damaged removes it, and waits for it: look whether the next step's are there."""
        for key in self._window.wanted[: self._window.urgent]:
            if key in self._present and not BlockCache(self._cache, key[0]).has(key[1]):
                del self._present[key]

    def _plan(self) -> None:
        begun = time.monotonic()
        if begun < self._window_until:
            return
        uses = self._upcoming.uses
        self._window = window_of(
            self._upcoming.in_order(),
            {key: steps[0] for key, steps in uses.items()},
            list(self._present),
            self._sizes,
            next_step=self._done.step + 1,
            limit=self._limit(),
        )
        ended = time.monotonic()
        self._window_until = ended + (ended - begun) / _PLAN_SHARE

    @property
    def _used(self) -> int:
        """Bytes of blocks that are there or on their way."""
        return sum(self._present.values()) + sum(self._transfers.in_flight.values())

    def _limit(self) -> int:
        """Bytes that the cache may hold: less than its size if its disk is full of other things."""
        try:
            free = shutil.disk_usage(self._cache).free - max(int(sizes.max()) for sizes in self._sizes.values())
        except OSError:
            return self._size
        return min(self._size, max(0, sum(self._present.values()) + free))

    def _drop(self, key: Key) -> None:
        if key in self._present:
            with contextlib.suppress(OSError):
                BlockCache(self._cache, key[0]).drop(key[1])
            del self._present[key]
            self._evictions += 1

    # ------------------------------------------------------------------ telling

    def _write_status(self) -> None:
        traffic, problem = self._transfers.traffic, self._transfers.problem()
        self._status = replace(
            self._status,
            time=time.time(),
            problem="" if problem is None else problem.text,
            since=0.0 if problem is None else problem.since,
            lasting=problem is not None and problem.lasting,
            ready=max(0, self._ready_until - self._done.step),
            step=self._done.step,
            cached=sum(self._present.values()),
            size=self._limit(),
            requests=traffic.requests,
            retries=traffic.retries,
            bytes=traffic.bytes_read,
            blocks=self._transfers.blocks,
            evictions=self._evictions,
            corrupted=self._transfers.corrupted,
        )
        with contextlib.suppress(OSError):
            self._status.write(self._places.status)

    def _write_record(self) -> None:
        with contextlib.suppress(OSError), self._places.record.open("a", encoding="utf-8") as file:
            file.write(self._status.to_json() + "\n")


def slowest(pages: Path, ranks: range) -> Position | None:
    """The position that all ranks of a node have reached; None if one has published none yet."""
    found = [progress.read(progress.page_of(pages, rank)) for rank in ranks]
    known = [position for position in found if position is not None]
    return min(known, key=lambda position: position.step) if len(known) == len(found) and known else None
