"""Ranges of samples that are skipped, and so never trained: `data.skip`.

A skipped sample keeps its index, so the order of all other samples stays the same. `cursor` counts all samples,
`consumed` only trained ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice


class Skips:
    """A set of skipped samples.

    Attributes:
        ranges: sorted and disjoint ranges [first, stop); those given may be in any order, and overlap.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.ranges: list[tuple[int, int]] = []
        for first, stop in sorted(ranges):
            if self.ranges and first <= self.ranges[-1][1]:
                self.ranges[-1] = (self.ranges[-1][0], max(stop, self.ranges[-1][1]))
            else:
                self.ranges.append((first, stop))

    def _kept(self, cursor: int) -> Iterator[range]:
        """The samples from `cursor` on that are not skipped."""
        for first, stop in self.ranges:
            yield range(cursor, first)
            cursor = max(cursor, stop)
        yield range(cursor, sys.maxsize)

    def take(self, cursor: int, count: int) -> list[int]:
        """The next `count` samples from `cursor` on that are not skipped."""
        return list(islice(chain.from_iterable(self._kept(cursor)), count))

    def take_back(self, cursor: int, count: int) -> list[int]:
        """The last `count` samples before `cursor` that are not skipped, ascending."""
        before = [kept[: max(0, cursor - kept.start)] for kept in self._kept(0)]
        return list(islice(chain.from_iterable(map(reversed, reversed(before))), count))[::-1]

    def after(self, cursor: int, count: int) -> int:
        """The cursor after `count` more samples have been trained."""
        for first, stop in self.ranges:
            if stop > cursor and first < cursor + count:
                count -= max(0, first - cursor)
                cursor = stop
        return cursor + count
