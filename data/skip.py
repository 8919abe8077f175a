"""Ranges of samples that are read past and never trained: `data.skip`.

A skipped sample keeps its index, so skipping moves nobody else: the trained samples are the others, in the same order.
`cursor` counts all samples, `consumed` only those trained.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class Skips:
    """A set of skipped samples.

    Args:
        ranges: (first, stop), half-open, in any order; overlaps are merged.

    Attributes:
        ranges: merged and sorted.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.ranges: list[tuple[int, int]] = []
        for first, stop in sorted(ranges):
            if self.ranges and first <= self.ranges[-1][1]:
                self.ranges[-1] = (self.ranges[-1][0], max(stop, self.ranges[-1][1]))
            else:
                self.ranges.append((first, stop))

    def take(self, cursor: int, count: int) -> list[int]:
        """The next `count` samples from `cursor` on that are not skipped."""
        taken: list[int] = []
        at = bisect_right(self.ranges, cursor, key=lambda span: span[1])
        while len(taken) < count:
            first, stop = self.ranges[at] if at < len(self.ranges) else (cursor + count, cursor + count)
            taken.extend(range(cursor, min(max(first, cursor), cursor + count - len(taken))))
            cursor, at = stop, at + 1
        return taken

    def take_back(self, cursor: int, count: int) -> list[int]:
        """The last `count` samples before `cursor` that are not skipped, ascending."""
        taken: list[int] = []
        for first, stop in [*reversed(self.ranges), (0, 0)]:
            if stop < cursor:
                taken.extend(range(cursor - 1, max(stop, cursor - 1 - count + len(taken)) - 1, -1))
            cursor = min(cursor, first)
            if len(taken) >= count:
                break
        return taken[count - 1 :: -1] if taken else []

    def after(self, cursor: int, count: int) -> int:
        """Where the cursor stands once `count` more samples have been trained."""
        for first, stop in self.ranges:
            if stop > cursor and first < cursor + count:
                count -= max(0, first - cursor)
                cursor = stop
        return cursor + count
