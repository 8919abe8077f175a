"""A value as a function of samples, in pieces: every schedule is made of these."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar, cast

T = TypeVar("T")


@dataclass(frozen=True)
class _Piece(Generic[T]):
    """Linear from `start` at sample `at` to `to` at `at + length`, and constant from then on."""

    to: T
    start: T
    at: int = 0
    length: int = 0


class Piecewise(Generic[T]):
    """A value as a function of samples: constant between changes, each of which may be a linear ramp to the new value.

    A change at a place counts for steps that end behind it. Only numbers can ramp.
    """

    def __init__(self, base: T) -> None:
        self._behind: list[float] = [-inf]
        self._pieces = [_Piece(base, base)]

    @classmethod
    def steps(cls, starts: Sequence[int], values: Sequence[T]) -> Piecewise[T]:
        """`values[i]` from place `starts[i]` on, itself included, and `values[0]` before."""
        steps = cls(values[0])
        for start, value in zip(starts[1:], values[1:], strict=True):
            steps.change(start - 1, value)
        return steps

    def change(self, at: int, to: T, start: T | None = None, length: int = 0) -> None:
        """Change the value to `to` from `at` on, by a ramp of `length` samples from `start` (None: the value there).

        Changes that were planned for later places are removed.
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
        """The places of changes, and the ends of ramps that no other change cuts short."""
        marks = set[int]()
        for piece, following in zip(self._pieces[1:], [*self._behind[2:], inf], strict=False):
            end = piece.at + piece.length
            marks |= {piece.at, end} if end < following else {piece.at}
        return sorted(marks)
