"""Which blocks a cache should hold: a window of the steps ahead, since the order of use is known. Touches no files.

The window has as many steps as fill half of the cache with their blocks. Missing blocks of the window are fetched in
the order of use. To make space, blocks outside the window are removed, the one used longest ago first; if the next step
still lacks space, blocks of the window that are used last. So the other half of the cache keeps blocks that are used
again soon after the window, such as one at the border of two stretches of a lane; else it would be fetched twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from fsdp_pretrain.data.packing.source import Ints

from .forecast import Forecast

Key = tuple[str, int]
"""A block: (corpus fingerprint, row of the block table)."""
_SHARE = 0.5
"""Share of the cache for the window."""
_MOST_USES = 300_000
"""Most uses of blocks in a window: about 50 MB of memory, minutes to hours of training."""


class Window:
    """The steps ahead of a node's ranks, and the blocks of a cache.

    Args:
        forecast: tells which blocks the node's ranks will read.
        cached: fingerprint of the corpus of each source by URL; blocks of other sources do not count.
        sizes: bytes of the blocks of each of these corpora, by fingerprint.

    Attributes:
        uses: for each block of the window, the steps that read it, ascending.
        held: bytes of the blocks that are in the cache or being fetched, the one that was used longest ago first.
    """

    def __init__(self, forecast: Forecast, cached: Mapping[int, str], sizes: Mapping[str, Ints]) -> None:
        self._forecast, self._cached, self._sizes = forecast, cached, sizes
        self._order, self._bytes, self._ended = deque[tuple[int, Key]](), 0, False
        self._done = forecast.position.step
        self.uses: dict[Key, deque[int]] = {}
        self.held: dict[Key, int] = {}

    @property
    def last_step(self) -> int:
        return self._forecast.position.step

    def size_of(self, key: Key) -> int:
        """Bytes of a block."""
        return int(self._sizes[key[0]][key[1]])

    def extend(self, limit: int) -> bool:
        """Add a step, if the window is not full. Returns whether there may be space for another.

        `limit`: bytes that the cache may hold. The next step belongs to the window whatever its size.
        """
        full = self._bytes >= _SHARE * limit or len(self._order) >= _MOST_USES
        if self._ended or (full and self.last_step > self._done):
            return False
        uses = self._forecast.advance()
        self._ended = uses is None
        for source, block in uses or ():
            if source in self._cached:
                key = self._cached[source], block
                if key not in self.uses:
                    self.uses[key] = deque()
                    self._bytes += self.size_of(key)
                self.uses[key].append(self.last_step)
                self._order.append((self.last_step, key))
        return not self._ended

    def drop(self, step: int) -> None:
        """Remove steps from the window, since all ranks have built their batches up to `step`."""
        self._done = step
        while self._order and self._order[0][0] <= step:
            _, key = self._order.popleft()
            self.uses[key].popleft()
            if not self.uses[key]:
                del self.uses[key]
                self._bytes -= self.size_of(key)
                if key in self.held:  # now the one that was used last
                    self.held[key] = self.held.pop(key)

    def missing(self) -> list[Key]:
        """The blocks of the window that are not held, the one that is used next first."""
        return sorted((key for key in self.uses if key not in self.held), key=lambda key: self.uses[key][0])

    def is_urgent(self, key: Key) -> bool:
        """Whether the next step reads a block of the window."""
        return self.uses[key][0] <= self._done + 1

    def excess(self, limit: int, *, spare: Collection[Key] | None = None) -> list[Key]:
        """Forget blocks outside the window until the others fit into `limit` bytes; returns those forgotten.

        `spare`: if given, blocks of the window may be forgotten too, the one that is used last first, except these and
        those of the next step.
        """
        too_much, forgotten = sum(self.held.values()) - limit, list[Key]()
        candidates = [key for key in self.held if key not in self.uses]
        if spare is not None:
            later = [key for key in self.held if key in self.uses and key not in spare and not self.is_urgent(key)]
            candidates += sorted(later, key=lambda key: -self.uses[key][0])
        for key in candidates:
            if too_much <= 0:
                break
            too_much -= self.held.pop(key)
            forgotten.append(key)
        return forgotten
