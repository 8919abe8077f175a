"""The fetcher of a node: brings blocks into the cache in the order in which its ranks will need them.

It has no state of its own: started anew, it looks at the ranks' positions and at the files.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from data.corpus.cache import BlockCache
from data.corpus.cached import CachedCopy
from data.packing import progress
from data.packing.position import Position
from fsdp_pretrain.fetcher_status import FetcherStatus

from .transfers import Transfers
from .window import Key, Window

_TURN, _FORECAST_SECONDS = 0.2, 0.05
_STATUS_SECONDS, _LIST_SECONDS = 1.0, 10.0


class Fetcher:
    """One node's fetcher.

    Args:
        window: of the node's ranks.
        copies: the corpora by URL, by fingerprint.
        cache: the cache directory.
        size: bytes that it may hold.
        pages: folder of the ranks' positions.
        ranks: of this node.
        status: file in which it says how it is.
    """

    def __init__(
        self,
        window: Window,
        copies: Mapping[str, CachedCopy],
        *,
        cache: Path,
        size: int,
        pages: Path,
        ranks: range,
        status: Path,
    ) -> None:
        self._window, self._transfers, self._cache, self._size = window, Transfers(copies), cache, size
        self._pages, self._ranks, self._status = pages, ranks, status
        self._largest = max((int(copy.corpus.sizes.max()) for copy in copies.values()), default=0)
        self._step, self._ready_until, self._listed, self._said = 0, 0, float("-inf"), float("-inf")

    def run(self) -> None:
        """Fetch until the process ends."""
        while True:
            self.turn()
            self._transfers.arrived.wait(_TURN)

    def turn(self) -> None:
        """Look at the ranks, the cache and the ended transfers, and start what can be started."""
        found = slowest(self._pages, self._ranks)
        if found is not None and found.step > self._step:
            self._step = found.step
            self._window.drop(found.step)
        for key in self._transfers.take_failed():
            self._window.held.pop(key, None)
        if (now := time.monotonic()) > self._listed + _LIST_SECONDS:
            self._list_cache()
            self._listed = now
        limit = self._limit()
        while self._window.extend(limit) and time.monotonic() < now + _FORECAST_SECONDS:
            pass
        self._start_transfers(limit)
        if now > self._said + _STATUS_SECONDS:
            self._write_status()
            self._said = now

    def _list_cache(self) -> None:
        """What others have put there or removed. Blocks that the run does not train on count, and are dropped first."""
        ages: dict[Key, tuple[float, int]] = {}
        for folder in self._cache.glob("*/blocks"):
            cache = BlockCache(self._cache, folder.parent.name)
            cache.clean()
            ages |= {(folder.parent.name, block): found for block, found in cache.present().items()}
        held, coming = self._window.held, self._transfers.in_flight
        self._window.held = {key: size for key, size in held.items() if key in ages or key in coming}
        for key in sorted(ages, key=ages.__getitem__):
            self._window.held.setdefault(key, ages[key][1])

    def _start_transfers(self, limit: int) -> None:
        window, transfers = self._window, self._transfers
        self._forget_removed()
        self._drop(window.excess(limit))
        missing = window.missing()
        late = [key for key in (*missing, *transfers.in_flight) if key in window.uses]
        transfers.forget(late)
        self._ready_until = min([window.last_step, *(window.uses[key][0] - 1 for key in late)])
        for key in missing:
            if not transfers.may_start(key):
                continue
            self._drop(window.excess(limit - window.size_of(key)))
            # The next step must come, even if it does not fit.
            if sum(window.held.values()) + window.size_of(key) > limit and not window.is_urgent(key):
                return
            window.held[key] = window.size_of(key)
            transfers.start(key)

    def _forget_removed(self) -> None:
        """A rank that finds a block damaged removes it, and waits for it: look whether the next step's are there."""
        for key in [key for key in self._window.uses if self._window.is_urgent(key)]:
            if key not in self._transfers.in_flight and not BlockCache(self._cache, key[0]).has(key[1]):
                self._window.held.pop(key, None)

    def _limit(self) -> int:
        """Bytes that the cache may hold: less than its size if its disk is full of other things."""
        try:
            free = shutil.disk_usage(self._cache).free - self._largest
        except OSError:
            return self._size
        coming = self._transfers.in_flight
        return min(self._size, max(0, sum(size for key, size in self._window.held.items() if key not in coming) + free))

    def _drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            with contextlib.suppress(OSError):
                BlockCache(self._cache, key[0]).drop(key[1])

    def _write_status(self) -> None:
        problem, transfers = self._transfers.problem(), self._transfers
        status = FetcherStatus(
            time=time.time(),
            problem="" if problem is None else problem.text,
            since=0.0 if problem is None else problem.since,
            lasting=problem is not None and problem.lasting,
            ready=max(0, self._ready_until - self._step),
            step=self._step,
            blocks=transfers.blocks,
            bytes=transfers.bytes,
        )
        with contextlib.suppress(OSError):
            status.write(self._status)


def slowest(pages: Path, ranks: range) -> Position | None:
    """The position that all ranks of a node have reached; None if one has published none yet."""
    found = [progress.read(progress.page_of(pages, rank)) for rank in ranks]
    known = [position for position in found if position is not None]
    return min(known, key=lambda position: position.step) if len(known) == len(found) and known else None
