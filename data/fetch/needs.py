"""What a node needs from a cache and when: the forecast as the fetcher uses it, advanced with the ranks. No torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from data.packing.packer import Packer

from .forecast import NEVER, Forecast, NextUse, Use
from .users import Key

_MOST_USES = 300_000
"""Forecast at a time: about 50 MB."""


class Needs:
    """The uses that are ahead of the ranks, by block, and the next use of every other block.

    Args:
        packer: of the run.
        forecast: of the node's ranks.
        cached: fingerprint of each source that is cached; the blocks of others do not count.
    """

    def __init__(self, packer: Packer, forecast: Forecast, cached: dict[int, str]) -> None:
        self._forecast, self._cached = forecast, cached
        self._far = {source: NextUse(packer, source) for source in cached}
        self._order = deque[tuple[Use, Key]]()
        self._ahead: dict[Key, deque[Use]] = {}
        self._later: dict[Key, int] = {}
        self._keys: dict[tuple[int, int], Key] = {}
        self._ended = False

    @property
    def end(self) -> int:
        """The last step that is forecast."""
        return self._forecast.position.step

    def extend(self, step: int, seconds: float) -> set[Key]:
        """Forecast up to a step, for a while; returns blocks that were not ahead before."""
        until, new = time.monotonic() + seconds, set[Key]()
        while not self.is_full and self.end < step and time.monotonic() < until:
            uses = self._forecast.advance()
            self._ended = uses is None
            for use in uses or ():
                if use.source not in self._cached:
                    continue
                key = self._keys.setdefault(use[2:], (self._cached[use.source], use.block))
                if key not in self._ahead:
                    self._ahead[key] = deque()
                    new.add(key)
                self._ahead[key].append(use)
                self._order.append((use, key))
        return new

    @property
    def is_full(self) -> bool:
        """Whether no more is forecast at present."""
        return self._ended or len(self._order) >= _MOST_USES

    def drop(self, step: int) -> None:
        """All ranks have built their batches up to a step."""
        while self._order and self._order[0][0].step <= step:
            _, key = self._order.popleft()
            self._ahead[key].popleft()
            if not self._ahead[key]:
                del self._ahead[key]

    def missing(self, has: Callable[[Key], bool], until: int) -> list[tuple[Use, Key]]:
        """The first use of each needed block that the cache does not have, up to a step, in order of use."""
        firsts = [(uses[0], key) for key, uses in self._ahead.items() if uses[0].step <= until and not has(key)]
        return sorted(firsts, key=lambda first: first[0].cursor)

    def soon(self, until: int) -> dict[Key, tuple[int, int]]:
        """The blocks that are needed up to a step, with the steps that need each first and, as far as known, last."""
        return {key: (uses[0].step, uses[-1].step) for key, uses in self._ahead.items() if uses[0].step <= until}

    def order(self, most: int, until: int) -> Iterator[tuple[int, Key]]:
        """(samples read before the step, block) of at most so many uses, up to a step."""
        for use, key in islice(self._order, most):
            if use.step > until:
                return
            yield use.cursor, key

    def uses(self) -> dict[Key, Iterable[int]]:
        """All uses ahead by block: samples read before the step of each."""
        return {key: (use.cursor for use in uses) for key, uses in self._ahead.items()}

    def later(self, key: Key) -> int:
        """The next use of a block after all that are ahead."""
        return max(self._forecast.position.cursor, self._later.get(key, NEVER))

    def look_far(self) -> None:
        """Look up the next use of all blocks beyond the forecast; takes milliseconds per million tokens of tables."""
        later: dict[Key, int] = {}
        for source, far in self._far.items():
            fingerprint = self._cached[source]
            for block, at in enumerate(far.after(self._forecast.position.cursor).tolist()):
                key = fingerprint, block
                later[key] = min(later.get(key, NEVER), at)
        self._later = later
