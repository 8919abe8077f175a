"""Which blocks to fetch and which to evict for them, when the order of use is known. Pure, no torch.

The best block to evict is the one that is used again last (Belady). Fetching ahead must not spoil that: a block evicted
now is a worse choice than one that is still used once before the fetched one is needed. So `plan` decides as if every
block were fetched at its use, and says from when on its victims can go. It fetches as little as any policy can.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Fetch(Generic[K]):
    """A block to fetch.

    Attributes:
        at: samples read before the step that needs it.
        victims: to be evicted for it.
        after: samples read before the last step, of this user or of others, that needs one of the victims first; -1 if
            none does.
    """

    key: K
    at: int
    victims: list[K]
    after: int


def plan(
    order: Iterable[tuple[int, K]],
    uses: Mapping[K, Iterable[int]],
    present: Mapping[K, int],
    room: int,
    *,
    size_of: Callable[[K], int],
    later: Callable[[K], int],
    others: Mapping[K, int] | None = None,
    others_last: Mapping[K, int] | None = None,
) -> Iterator[Fetch[K]]:
    """The blocks to fetch, in the order of their first use.

    Args:
        order: the uses ahead: (samples read before the step, block), ascending.
        uses: the same by block.
        present: bytes of the blocks in the cache.
        room: bytes free in it.
        size_of: bytes of a block.
        later: the next use of a block after all of `order`.
        others: when other users of the cache need blocks next, in the same unit.
        others_last: when they need them last, as far as is known; absent: they may always need them again.
    """
    others, others_last = others or {}, others_last or {}
    ending = deque(sorted(others_last, key=others_last.__getitem__))
    ahead = {key: iter(uses[key]) for key in uses}
    held, last_use = dict(present), dict[K, int]()
    next_use = {key: next(ahead[key]) if key in ahead else later(key) for key in held}
    soonest = {key: min(at, others.get(key, at)) for key, at in next_use.items()}  # of anyone
    latest = [(-at, number, key) for number, (key, at) in enumerate(soonest.items())]
    heapq.heapify(latest)
    number = len(latest)
    for at, key in order:
        while ending and others_last[ending[0]] < at:
            passed, number = ending.popleft(), number + 1
            if passed in held:
                soonest[passed] = next_use[passed]
                heapq.heappush(latest, (-soonest[passed], number, passed))
        if key not in held:
            size, chosen, of_step = size_of(key), list[K](), deque[tuple[int, int, K]]()
            while room < size and (latest or of_step):
                entry = heapq.heappop(latest) if latest else of_step.popleft()
                victim = entry[2]
                if victim not in held or soonest[victim] != -entry[0]:
                    continue
                if latest and at in (last_use.get(victim), next_use[victim]):
                    of_step.append(entry)  # the same step reads it: it goes only if nothing else is left
                    continue
                chosen.append(victim)
                room += held.pop(victim)
            for entry in of_step:
                heapq.heappush(latest, entry)
            last_uses = (at - 1 if at in (last_use.get(v), next_use[v]) else last_use.get(v, -1) for v in chosen)
            of_others = (found[v] for v in chosen for found in (others, others_last) if found.get(v, at) < at)
            after = max((*last_uses, *of_others), default=-1)
            yield Fetch(key, at, chosen, after)
            if key not in next_use and key in ahead:
                next(ahead[key], None)
            held[key], room = size, room - size
        last_use[key] = at
        next_use[key] = next(ahead[key], None) or later(key)
        other = others.get(key, -1)
        soonest[key] = min(next_use[key], other) if other > at else next_use[key]
        number += 1
        heapq.heappush(latest, (-soonest[key], number, key))


@dataclass(frozen=True)
class BlockTrace:
    """Uses of blocks in order; blocks of several sources are numbered one source after the other.

    Attributes:
        cursors: int64 [uses], samples read before the step of each use, ascending.
        blocks: int64 [uses].
        sizes: int64 [blocks], bytes.
    """

    cursors: Ints
    blocks: Ints
    sizes: Ints


def simulate(trace: BlockTrace, capacity: int, policy: Literal["belady", "lru"]) -> int:
    """Bytes that a cache of `capacity` bytes fetches over a trace, one block at a time, when it is needed.

    Raises:
        ValueError: the cache is smaller than a block.
    """
    if len(trace.blocks) and capacity < int(trace.sizes[trace.blocks].max()):
        raise ValueError(f"a cache of {capacity} bytes does not hold a block of the trace")
    return _belady(trace, capacity) if policy == "belady" else _lru(trace, capacity)


def _belady(trace: BlockTrace, capacity: int) -> int:
    blocks, sizes = trace.blocks.tolist(), trace.sizes.tolist()
    following, seen = [len(blocks)] * len(blocks), dict[int, int]()
    for at in range(len(blocks) - 1, -1, -1):
        following[at] = seen.get(blocks[at], len(blocks))
        seen[blocks[at]] = at
    present, used, fetched = dict[int, int](), 0, 0  # next use by block
    latest: list[tuple[int, int]] = []  # (-next use, block), old entries included
    for at, block in enumerate(blocks):
        if block not in present:
            while used + sizes[block] > capacity:
                next_use, victim = heapq.heappop(latest)
                if present.get(victim) == -next_use:
                    del present[victim]
                    used -= sizes[victim]
            used, fetched = used + sizes[block], fetched + sizes[block]
        present[block] = following[at]
        heapq.heappush(latest, (-following[at], block))
    return fetched


def _lru(trace: BlockTrace, capacity: int) -> int:
    sizes, used, fetched = trace.sizes.tolist(), 0, 0
    present = OrderedDict[int, None]()
    for block in trace.blocks.tolist():
        if block in present:
            present.move_to_end(block)
            continue
        while used + sizes[block] > capacity:
            used -= sizes[present.popitem(last=False)[0]]
        present[block] = None
        used, fetched = used + sizes[block], fetched + sizes[block]
    return fetched


def live_bytes(trace: BlockTrace, pause: Ints, epochs: Ints | None = None) -> int:
    """The largest number of bytes of blocks that are between their first and last use at once.

    Args:
        pause: int64 [blocks], samples between two uses of a block from which on it is not worth keeping for the second.
        epochs: int64 [uses], the epoch of each: uses in two epochs do not belong together. None: all are in one.
    """
    epochs = np.zeros(len(trace.blocks), np.int64) if epochs is None else epochs
    events = deque[tuple[int, int, int]]()  # (cursor, 0 for a begin or 1 for an end, bytes)
    order = np.lexsort((trace.cursors, epochs, trace.blocks))
    blocks, cursors = trace.blocks[order], trace.cursors[order]
    apart = (np.diff(blocks, prepend=-1) != 0) | (np.diff(epochs[order], prepend=-1) != 0)
    apart[1:] |= np.diff(cursors) > pause[blocks[1:]]
    begins = np.flatnonzero(apart)
    ends = np.append(begins[1:], len(blocks)) - 1
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        size = int(trace.sizes[blocks[begin]])
        events.append((int(cursors[begin]), 0, size))
        events.append((int(cursors[end]), 1, -size))
    live = most = 0
    for _, _, change in sorted(events):
        live += change
        most = max(most, live)
    return most
