"""A value along a run: what every schedule is made of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar, cast

T = TypeVar("T")


@dataclass(frozen=True)
class _Piece(Generic[T]):
    """From `start` at sample `at` linearly to `to`, `length` samples later, and `to` from then on."""

    to: T
    start: T
    at: int = 0
    length: int = 0


class Piecewise(Generic[T]):
    """A value along a run, by samples: constant, changed at places, with or without a linear ramp to the new value.

    A change at a place counts for steps that end behind it. Values that ramp are numbers.
    """

    def __init__(self, base: T) -> None:
        self._behind: list[float] = [-inf]
        self._pieces = [_Piece(base, base)]

    @classmethod
    def steps(cls, starts: Sequence[int], values: Sequence[T]) -> Piecewise[T]:
        """`values[i]` from place `starts[i]` on, itself included, and `values[0]` before."""
        found = cls(values[0])
        for start, value in zip(starts[1:], values[1:], strict=True):
            found.change(start - 1, value)
        return found

    def change(self, at: int, to: T, start: T | None = None, length: int = 0) -> None:
        """From `at` on, `to`; if `length` is not 0, a ramp from `start` (None: the value there) first.

        Replaces what was to come later.
        """
        keep = bisect_right(self._behind, at)
        begun = self.at(at, behind=True) if start is None else start
        self._behind[keep:] = [at]
        self._pieces[keep:] = [_Piece(to, begun, at, length)]

    def at(self, place: int, *, behind: bool = False) -> T:
        """The value of the step that ends at `place`; `behind`: the limit of the steps after it."""
        piece = self._pieces[(bisect_right if behind else bisect_left)(self._behind, place) - 1]
        passed = place - piece.at
        if passed >= piece.length:
            return piece.to
        start, to = cast("float", piece.start), cast("float", piece.to)
        return cast("T", start + (to - start) * passed / piece.length)

    @property
    def marks(self) -> list[int]:
        """Where it changes: the places of changes, and the ends of ramps that no other change cuts short."""
        found = set[int]()
        for piece, following in zip(self._pieces[1:], [*self._behind[2:], inf], strict=False):
            end = piece.at + piece.length
            found |= {piece.at, end} if end < following else {piece.at}
        return sorted(found)
