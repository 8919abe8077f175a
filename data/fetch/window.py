"""Which blocks a cache should hold, since the order of use is known: a window of the steps ahead. Pure.

The window is as many steps as have blocks for half of the cache. What is missing of them is fetched, in the order of
use. Room is made by dropping the blocks outside the window, the one used longest ago first; where the next step still
lacks room, those of the window that are used last. The other half of the cache therefore keeps what is used again soon
after the window, such as a block at the border of two stretches of a lane; without it, such a block would come twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from fsdp_pretrain.data.packing.source import Ints

from .forecast import Forecast

Key = tuple[str, int]
"""A block: (corpus fingerprint, row of the block table)."""
_SHARE = 0.5
"""Of the cache, for the window."""
_MOST_USES = 300_000
"""Of blocks in a window: about 50 MB, minutes to hours of training."""


class Window:
    """The steps ahead of a node's ranks, and the blocks of a cache.

    Args:
        forecast: of the node's ranks.
        cached: fingerprint of the corpus of each source by URL; the blocks of others do not count.
        sizes: bytes of the blocks of each of these corpora, by fingerprint.

    Attributes:
        uses: of each block of the window, the steps that read it, ascending.
        held: bytes of the blocks that are there or on their way, the one that was used longest ago first.
    """

    def __init__(self, forecast: Forecast, cached: Mapping[int, str], sizes: Mapping[str, Ints]) -> None:
        self._forecast, self._cached, self._sizes = forecast, cached, sizes
        self._order, self._bytes, self._ended = deque[tuple[int, Key]](), 0, False
        self._done = forecast.position.step
        self.uses: dict[Key, deque[int]] = {}
        self.held: dict[Key, int] = {}

    @property
    def last_step(self) -> int:
        """The last step of the window."""
        return self._forecast.position.step

    def size_of(self, key: Key) -> int:
        """Bytes of a block."""
        return int(self._sizes[key[0]][key[1]])

    def extend(self, limit: int) -> bool:
        """Add a step, if the window is not full; whether there may be room for another.

        Args:
            limit: bytes that the cache may hold. The next step belongs to the window whatever its size.
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
        """All ranks have built their batches up to a step."""
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
        """The blocks of the window that are not there, the one that is used next first."""
        return sorted((key for key in self.uses if key not in self.held), key=lambda key: self.uses[key][0])

    def is_urgent(self, key: Key) -> bool:
        """Whether the next step reads a block of the window."""
        return self.uses[key][0] <= self._done + 1

    def excess(self, limit: int, *, spare: Collection[Key] | None = None) -> list[Key]:
        """Forget blocks outside the window until the others fit into `limit` bytes; returns those forgotten.

        Args:
            spare: if given, blocks of the window are forgotten too, the one that is used last first, but not these and
                not those of the next step.
        """
        left, forgotten = sum(self.held.values()) - limit, list[Key]()
        given_up = [key for key in self.held if key not in self.uses]
        if spare is not None:
            later = [key for key in self.held if key in self.uses and key not in spare and not self.is_urgent(key)]
            given_up += sorted(later, key=lambda key: -self.uses[key][0])
        for key in given_up:
            if left <= 0:
                break
            left -= self.held.pop(key)
            forgotten.append(key)
        return forgotten
