"""The fetcher of a node: brings blocks into the cache in the order in which its ranks will need them. No torch.

It knows that order (`forecast`), fetches what is missing from the next `ahead` seconds of training, and evicts what is
needed last (`replacement`). It has no state of its own: started anew, it looks at the ranks' positions and the files.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from data.corpus.cache import BlockCache
from data.packing import progress
from data.packing.position import Position
from fsdp_pretrain.fetcher_status import FetcherStatus

from .needs import Needs
from .replacement import Fetch, plan
from .transfers import AT_ONCE, Copy, Outcome, Transfers
from .users import CacheUser, Key

_TURN, _FORECAST_SECONDS = 0.2, 0.05
_LEAST_STEPS = 64
"""Fetched ahead at least, and while the pace is not known."""
_PACE_SECONDS = 120.0
_SAY_SECONDS, _STATUS_SECONDS, _FAR_SECONDS, _RECORD_SECONDS = 2.0, 1.0, 30.0, 300.0
_SAY_SHARE = 0.05
"""Of the time, spent on telling other users what is needed here and on reading what they say, while steps are made."""
_ROOM_SECONDS = 10.0
_PLAN_SECONDS, _URGENT_STEPS = 1.0, 8
_STAMP_NS = 50_000_000
"""Two changes of a directory within this time may leave the same stamp."""
_SEEN_SECONDS = 1.0
"""A block that a step waits for stays so long, so that ranks open it, even if the next one does not fit beside it."""
_PLANNED = 50_000
"""Uses that a plan looks at."""


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


class Pace:
    """Steps per second, from the positions that ranks publish."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, int]]()
        self.steps_per_second: float | None = None

    def observe(self, step: int) -> None:
        """All ranks have built their batches up to a step. While none is built, the last known pace is kept."""
        now = time.monotonic()
        if self._seen and self._seen[-1][1] == step:
            return
        self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[0][0] > _PACE_SECONDS:
            self._seen.popleft()
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        if last - first >= 1.0:
            self.steps_per_second = (after - before) / (last - first)


class Fetcher:
    """One node's fetcher.

    Args:
        needs: of the node's ranks.
        copies: the places of each cached corpus by fingerprint, the preferred one first.
        cache: the cache directory.
        size: bytes that it may hold.
        ahead: seconds of training.
        ranks: of this node.
        name: among the users of the cache.
        node: its number.
        stop: set when it is to end.
    """

    def __init__(
        self,
        needs: Needs,
        copies: Mapping[str, list[Copy]],
        places: FetcherPlaces,
        *,
        cache: Path,
        size: int,
        ahead: float,
        ranks: range,
        name: str,
        node: int,
        stop: threading.Event,
    ) -> None:
        self._needs, self._copies, self._places, self._cache = needs, copies, places, cache
        self._size = self._limit = size
        self._ahead, self._ranks = ahead, ranks
        self._transfers, self._user, self._pace = Transfers(copies), CacheUser(cache, name), Pace()
        self._caches = {fingerprint: found[0].blocks for fingerprint, found in copies.items()}
        self._stamps: dict[str, int] = {}
        self._present: dict[str, dict[int, int]] = {}
        self._done = Position()
        self._new = set[Key]()
        self._hits = self._evictions = 0
        self._due: dict[str, float] = {}
        self._others: dict[Key, tuple[int, int]] = {}
        self._said = -1
        self._brought = set[Key]()
        """For the next step. If it does not fit into the cache, the ranks keep these open, and others are missing."""
        self._missing_at: int | None = None
        self._status = FetcherStatus(host=socket.gethostname(), node=node, pid=os.getpid())
        self._stop = stop

    def run(self) -> None:
        """Fetch until it is to end."""
        while not self._stop.is_set():
            self.turn()
            self._transfers.arrived.wait(_TURN)
        self._look_at_ranks()
        self._write_status(force=True)
        self._write_record()
        self._user.leave()

    def turn(self) -> None:
        """Look at the ranks, the cache and the ended transfers, and start what can be started."""
        self._look_at_ranks()
        ended = self._transfers.take()
        for key, outcome in ended.items():
            self._finish(key, outcome)
        if ended:
            self._say_fetching()
        self._look_at_cache()
        self._regain_room()
        self._look_at_users()
        self._forecast()
        self._start_transfers(at_once=bool(ended))
        self._write_status()
        if self._is_due("record", _RECORD_SECONDS, at_once=False):
            threading.Thread(target=self._write_record, daemon=True).start()  # the run directory may hang

    def _is_due(self, what: str, seconds: float, *, at_once: bool = True) -> bool:
        now = time.monotonic()
        if now < self._due.setdefault(what, now if at_once else now + seconds):
            return False
        self._due[what] = now + seconds
        return True

    # ------------------------------------------------------------------ looking

    def _look_at_ranks(self) -> None:
        found = slowest(self._places.pages, self._ranks)
        if found is not None and found.step >= self._done.step:
            if found.step > self._done.step:
                self._brought.clear()
            self._done = found
        self._pace.observe(self._done.step)
        self._needs.drop(self._done.step)

    def _look_at_cache(self, *, again: bool = False) -> None:
        """List the directories that have changed. Blocks of corpora that others use count, and can be evicted too."""
        if self._is_due("corpora", _SAY_SECONDS) or again:
            for found in self._cache.glob("*/blocks"):
                self._caches.setdefault(found.parent.name, BlockCache(self._cache, found.parent.name))
        clean = self._is_due("clean", _FAR_SECONDS)
        for fingerprint, cache in self._caches.items():
            if clean:
                cache.clean()
            if (stamp := cache.stamp()) != self._stamps.get(fingerprint):
                settled = time.time_ns() - stamp > _STAMP_NS
                self._stamps[fingerprint], self._present[fingerprint] = stamp if settled else 0, cache.present()
        self._hits += sum(1 for key in self._new if self._has(key))
        self._new = set()

    def _look_at_users(self) -> None:
        """Tell the other users of the cache in how many seconds blocks are needed here, and convert what they say."""
        if not self._is_due("users", _SAY_SECONDS) and (self._done.step == self._said or not self._is_due("say", 0.0)):
            return
        begun, self._said = time.monotonic(), self._done.step
        pace, done = self._pace.steps_per_second or 1.0, self._done
        soon = self._needs.soon(self._last_step)
        with contextlib.suppress(OSError):  # a full disk: others see what was said before
            self._user.say({key: ((a - done.step) / pace, (b - done.step) / pace) for key, (a, b) in soon.items()})
        with contextlib.suppress(OSError):
            samples = pace * max(done.batch, 1)
            needs = self._user.needs_of_others()
            self._others = {
                key: (done.cursor + int(first * samples), done.cursor + int(last * samples))
                for key, (first, last) in needs.items()
            }
        self._say_fetching()
        self._due["say"] = time.monotonic() + (time.monotonic() - begun) / _SAY_SHARE

    def _say_fetching(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: others see what was said before
            self._user.say_fetching(self._transfers.in_flight)

    def _has(self, key: Key) -> bool:
        return key[1] in self._present.get(key[0], ())

    @property
    def _last_step(self) -> int:
        """The last step for which blocks are fetched."""
        pace = self._pace.steps_per_second or 0.0
        return self._done.step + max(_LEAST_STEPS, math.ceil(pace * self._ahead))

    def _forecast(self) -> None:
        """Beyond what is fetched, too: evictions are exact as far as the forecast reaches."""
        self._new |= self._needs.extend(self._last_step, _FORECAST_SECONDS)
        if not self._needs.is_full:
            ahead = self._last_step - self._done.step
            self._new |= self._needs.extend(self._last_step + ahead, _FORECAST_SECONDS)
        if self._is_due("far", _FAR_SECONDS):
            self._needs.look_far()

    # ------------------------------------------------------------------ deciding

    def _size_of(self, key: Key) -> int:
        return int(self._copies[key[0]][0].corpus.sizes[key[1]])

    def _start_transfers(self, *, at_once: bool) -> None:
        """Start what is missing, in the order of first use, where there is room or something to evict for it."""
        missing = self._needs.missing(self._has, self._last_step)
        self._missing_at = missing[0][0].step if missing else None
        in_flight = self._transfers.in_flight
        self._transfers.forget({key for _, key in missing} | in_flight.keys())
        if len(in_flight) >= AT_ONCE or all(key in in_flight for _, key in missing):
            return
        if not (
            at_once or missing[0][0].step <= self._done.step + _URGENT_STEPS or self._is_due("plan", _PLAN_SECONDS)
        ):
            return
        with self._user.deciding() as alone:
            if alone:
                self._decide({key for _, key in missing})
                self._say_fetching()

    def _decide(self, missing: set[Key]) -> None:
        """Evict and start transfers, while no other user of the cache does."""
        in_flight, elsewhere = self._transfers.in_flight, self._user.fetching_of_others()
        self._look_at_cache(again=True)  # after what others fetch: what has come meanwhile is in both
        if missing <= in_flight.keys() | elsewhere.keys():
            return
        awaited = set(self._needs.soon(self._done.step + 1))
        if self._brought >= awaited & missing:
            self._brought.clear()
        open_by_ranks = self._brought & missing
        awaited |= {key for key, (first, _) in self._others.items() if first <= self._done.cursor}
        held = elsewhere | in_flight
        for fingerprint, blocks in self._present.items():
            held.update({(fingerprint, block): size for block, size in blocks.items()})
        room = self._limit - sum(held.values())
        fetches = plan(
            (use for use in self._needs.order(_PLANNED, self._last_step) if use[1] not in open_by_ranks),
            self._needs.uses(),
            held,
            room,
            size_of=self._size_of,
            later=self._needs.later,
            others={key: first for key, (first, _) in self._others.items()},
            others_last={key: last for key, (_, last) in self._others.items()},
        )
        waiting = 0
        for fetch in fetches:
            if len(in_flight) >= AT_ONCE or waiting >= AT_ONCE:
                break
            if fetch.after >= self._done.cursor:
                waiting += 1
            elif self._transfers.may_start(fetch.key):
                young = {key for key in awaited & set(fetch.victims) if self._is_young(key)}
                room = self._start(fetch, held, room, young | elsewhere.keys() | in_flight.keys())

    def _is_young(self, key: Key) -> bool:
        with contextlib.suppress(OSError):
            return time.time() - self._caches[key[0]].path(key[1]).stat().st_mtime < _SEEN_SECONDS
        return False

    def _start(self, fetch: Fetch[Key], held: dict[Key, int], room: int, stay: set[Key]) -> int:
        """Evict, except for what must stay, and start a transfer, if that gives room; returns what is left of it."""
        size, victims = self._size_of(fetch.key), [key for key in fetch.victims if key not in stay]
        if room + sum(held.get(victim, 0) for victim in victims) < size:
            return room
        for victim in victims:
            if victim not in held:
                continue
            with contextlib.suppress(OSError):
                self._caches[victim[0]].drop(victim[1])
            room += held.pop(victim)
            self._present[victim[0]].pop(victim[1], None)
            self._evictions += 1
        self._transfers.start(fetch.key, size)
        return room - size

    def _finish(self, key: Key, outcome: Outcome) -> None:
        if outcome is Outcome.DONE and key in self._needs.soon(self._done.step + 1):
            self._brought.add(key)
        if outcome is Outcome.FULL:  # go on with less, but not with less than the next step reads
            size, next_step = self._size_of(key), self._needs.soon(self._done.step + 1)
            least = size + sum(map(self._size_of, next_step))
            self._limit = min(self._limit, max(self._used - size, least))

    def _regain_room(self) -> None:
        """After the disk was full: use again what has become free on it."""
        if self._limit < self._size and self._is_due("room", _ROOM_SECONDS, at_once=False):
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(self._cache).free
                self._limit = min(self._size, max(self._limit, self._used + free // 2))

    @property
    def _used(self) -> int:
        return sum(sum(blocks.values()) for blocks in self._present.values())

    # ------------------------------------------------------------------ telling

    def _write_status(self, *, force: bool = False) -> None:
        if not (self._is_due("status", _STATUS_SECONDS) or force):
            return
        counts, problem = self._transfers.counts, self._transfers.problem()
        pace, missing = self._pace.steps_per_second, self._missing_at
        until = (self._needs.end if missing is None else missing - 1) - self._done.step
        self._status = replace(
            self._status,
            time=time.time(),
            problem="" if problem is None else problem.text,
            since=0.0 if problem is None else problem.since,
            lasting=problem is not None and problem.lasting,
            lasts=None if not pace else max(0, until) / pace,
            step=self._done.step,
            cached=self._used,
            size=self._limit,
            requests=counts.traffic.requests,
            retries=counts.traffic.retries,
            bytes=counts.traffic.bytes_read,
            blocks=counts.blocks,
            hits=self._hits,
            evictions=self._evictions,
            corrupted=counts.corrupted,
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
