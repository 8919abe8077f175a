"""The fetcher of a node: fetches blocks into the cache in the order in which the node's ranks will need them.

It stores no state: when it is restarted, it reads the ranks' positions and the files of the cache.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fsdp_pretrain.config.config import parse
from fsdp_pretrain.data.corpus.cached import CachedCopy, block_file, blocks_in
from fsdp_pretrain.data.packing import progress
from fsdp_pretrain.data.packing.opening import open_packer, open_skips
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import Exit, UserError
from fsdp_pretrain.fetcher_status import FetcherStatus, status_file

from .forecast import Forecast
from .process import FetcherSettings
from .window import Key, Window

AT_ONCE = 8
"""Most blocks in flight."""
PATIENCE = 5.0
"""Seconds for which a request is repeated before its failure is reported."""
_PAUSE, _LASTING_PAUSE = 5.0, 30.0
"""Seconds before a failed block is tried again; the second if the failure needs a person."""
_START_TURN, _TURN, _FORECAST_SECONDS = 0.02, 0.2, 0.05
_STATUS_SECONDS, _LIST_SECONDS = 1.0, 10.0


class _Failure(NamedTuple):
    """The failure of a block's transfer."""

    text: str
    lasting: bool
    """Whether it needs a person."""
    since: float
    """`time.time()` of the block's first failure."""
    not_before: float
    """`time.monotonic()` of the next try."""


class Fetcher:
    """One node's fetcher. Waits until the ranks have published their positions. Raises UserError if a corpus cannot be
    opened."""

    def __init__(self, settings: FetcherSettings) -> None:
        config = parse(settings.config)
        assert config.data.cache is not None
        self._cache, self._size = config.data.cache.dir, config.data.cache.size.value
        self._pages, self._ranks = Path(settings.pages), range(settings.first, settings.stop)
        self._status = status_file(self._pages, settings.first)
        packer, batches = open_packer(config), config.schedule.batch
        while (start := slowest(self._pages, self._ranks)) is None:
            time.sleep(_START_TURN)
        self._copies, sources = dict[str, CachedCopy](), dict[int, str]()
        for number, corpus in enumerate(packer.corpora.values()):
            if corpus.cached is not None:
                sources[number] = fingerprint = corpus.manifest.fingerprint
                self._copies[fingerprint] = corpus.cached
                corpus.cached.remote.patience = PATIENCE
        sizes = {fingerprint: copy.sizes for fingerprint, copy in self._copies.items()}
        self._largest = max((int(of_corpus.max()) for of_corpus in sizes.values()), default=0)
        until = config.schedule.total + (config.data.prefetch + 2) * batches.full  # loaders prefetch past the end
        skips, world = open_skips(config), settings.world
        forecast = Forecast(packer, batches, skips, start, world=world, ranks=self._ranks, until=until)
        self._window = Window(forecast, sources, sizes)
        self._pool, self._arrived = ThreadPoolExecutor(AT_ONCE, "fetch"), threading.Event()
        self._coming: dict[Key, Future[int]] = {}
        self._failures: dict[Key, _Failure] = {}
        self._step = 0  # that all ranks have built
        self._listed = float("-inf")  # `time.monotonic()` of the last look at the cache
        self._reported = float("-inf")  # and of the last status

    def run(self) -> None:
        """Fetch until the process ends."""
        while True:
            self.turn()
            self._arrived.wait(_TURN)

    def turn(self) -> None:
        """Check the ranks, the cache and the ended transfers, and start transfers as far as there is space."""
        if (position := slowest(self._pages, self._ranks)) is not None:
            self._step = position.step
            self._window.drop(position.step)
        self._take_ended()
        if (now := time.monotonic()) > self._listed + _LIST_SECONDS:
            self._list_cache()
            self._listed = now
        limit = self._limit()
        while self._window.extend(limit) and time.monotonic() < now + _FORECAST_SECONDS:
            pass
        self._forget_removed()
        self._drop_for(limit)
        missing = self._window.missing()
        late = {key for key in (*missing, *self._coming) if key in self._window.uses}
        self._failures = {key: failure for key, failure in self._failures.items() if key in late}
        self._start(missing, limit)
        if now > self._reported + _STATUS_SECONDS:
            last = min([self._window.last_step, *(self._window.uses[key][0] - 1 for key in late)])
            self._write_status(max(0, last - self._step))
            self._reported = now

    def _take_ended(self) -> None:
        self._arrived.clear()
        for key, future in [item for item in self._coming.items() if item[1].done()]:
            del self._coming[key]
            try:
                future.result()
                self._failures.pop(key, None)
            except UserError as error:
                self._window.held.pop(key, None)
                lasting, since = error.exit is Exit.REFUSED, time.time()
                if key in self._failures:
                    since = self._failures[key].since
                pause = (_LASTING_PAUSE if lasting else _PAUSE) * random.uniform(0.5, 1.0)
                self._failures[key] = _Failure(error.cause, lasting, since, time.monotonic() + pause)

    def _list_cache(self) -> None:
        """Notice blocks that others added or removed. Blocks that the run does not use count, and are removed first."""
        stored, held = blocks_in(self._cache), self._window.held
        self._window.held = {key: size for key, size in held.items() if key in stored or key in self._coming}
        for key in sorted(stored, key=stored.__getitem__):
            self._window.held.setdefault(key, stored[key][1])

    def _start(self, missing: list[Key], limit: int) -> None:
        """Start transfers of the first blocks that are missing."""
        window = self._window
        for key in missing:
            failure = self._failures.get(key)
            if len(self._coming) >= AT_ONCE or (failure is not None and time.monotonic() < failure.not_before):
                continue
            # The blocks of the next step are fetched even if they do not fit.
            urgent = window.is_urgent(key)
            self._drop_for(limit - window.size_of(key), spare=self._coming if urgent else None)
            if sum(window.held.values()) + window.size_of(key) > limit and not urgent:
                return
            window.held[key] = window.size_of(key)
            self._coming[key] = self._pool.submit(self._copies[key[0]].fetch, key[1])
            self._coming[key].add_done_callback(lambda _: self._arrived.set())

    def _forget_removed(self) -> None:
        """Forget blocks of the next step that a rank removed because they were damaged, so that they are fetched."""
        for key in [key for key in self._window.uses if self._window.is_urgent(key)]:
            if key not in self._coming and not block_file(self._cache, *key).exists():
                self._window.held.pop(key, None)

    def _limit(self) -> int:
        """Bytes that the cache may hold: less than its size if other files fill its disk."""
        try:
            free = shutil.disk_usage(self._cache).free - self._largest
        except OSError:
            return self._size
        held = sum(size for key, size in self._window.held.items() if key not in self._coming)
        return min(self._size, max(0, held + free))

    def _drop_for(self, limit: int, spare: Collection[Key] | None = None) -> None:
        """Remove blocks until the others fit into `limit` bytes, see `Window.excess`."""
        for key in self._window.excess(limit, spare=spare):
            with contextlib.suppress(OSError):
                block_file(self._cache, *key).unlink()

    def _write_status(self, ready: int) -> None:
        failed = min(self._failures.values(), key=lambda item: (not item.lasting, item.since), default=None)
        status = FetcherStatus(time=time.time(), ready=ready)
        if failed is not None:
            status = FetcherStatus(time.time(), failed.text, failed.since, failed.lasting, ready)
        with contextlib.suppress(OSError):
            status.write(self._status)


def slowest(pages: Path, ranks: range) -> Position | None:
    """The position that all ranks of a node have reached; None if a rank has not published one yet."""
    positions = [progress.read(progress.page_of(pages, rank)) for rank in ranks]
    known = [position for position in positions if position is not None]
    return min(known, key=lambda position: position.step) if len(known) == len(positions) and known else None
