"""The source of each sample: a pure function of the sample index, with weights that may change along it.

Think of the samples as points on a line, one per unit. Source i has a share r_i(t) of the line at position t (its
weight over the sum of the weights) and so a cumulative share E_i(t), the integral of r_i. Its k-th sample (k = 0, 1,
...) is due at the last t with E_i(t) = k. Sorting all due positions gives the order of the samples. It follows:

- Source i has ceil(E_i(t)) samples due before t: shares are always within one sample of the plan.
- Changes at or after t do not affect samples before t: a source can be added, dropped or re-weighted from there on, and
  each source's own samples keep their order, since they are numbered per source.
- A sample is found from a table with one row per change of the shares.

Shares are integers in units of 1 / `SCALE`, so nothing depends on the order of floating-point sums. A ramping weight
stays constant for `GRID` samples at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.errors import DataError

Ints = npt.NDArray[np.int64]
SCALE = 1 << 28
"""Resolution of a share. int64 sums of shares reach `LONGEST` samples."""
LONGEST = 1 << 34
GRID = 4096
"""Samples for which a ramping weight stays constant."""
CHUNK = 1024
"""Samples that are put in order at a time."""
_MOST_CELLS = 4_000_000


@dataclass(frozen=True)
class MixtureWeight:
    """Weight of one source by sample index: 0 before `start` and from `stop` on."""

    points: tuple[tuple[int, float], ...] = ((0, 1.0),)
    """(sample index, value), ascending. Linear between points, constant before the first and after the last; two points
    at the same index are a jump."""
    start: int = 0
    stop: int | None = None
    limit: int | None = None
    """Samples that the source can give in total; None: unlimited."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "points": [list(point) for point in self.points]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MixtureWeight:
        return cls(**{**content, "points": tuple((int(p), float(v)) for p, v in content["points"])})

    def at(self, positions: Ints) -> npt.NDArray[np.float64]:
        """Values at sample indices, float64 of the same shape; on a ramp, the value in the middle of the grid cell."""
        x, y = np.array([p for p, _ in self.points]), np.array([v for _, v in self.points], dtype=np.float64)
        left = np.searchsorted(x, positions, "right") - 1
        right = np.minimum(left + 1, len(x) - 1)
        left = np.maximum(left, 0)
        width = np.maximum(x[right] - x[left], 1)
        middle = np.clip(positions // GRID * GRID + GRID // 2, x[left], x[right])
        values = y[left] + (y[right] - y[left]) * ((middle - x[left]) / width)
        stop = self.stop if self.stop is not None else np.iinfo(np.int64).max
        result: npt.NDArray[np.float64] = np.where((positions >= self.start) & (positions < stop), values, 0.0)
        return result

    def knots(self) -> Ints:
        """Sample indices at which the value changes, also those of the grid inside ramps. Raises DataError."""
        ramps = [(x0, x1) for (x0, y0), (x1, y1) in pairwise(self.points) if y0 != y1]
        if sum(x1 - x0 for x0, x1 in ramps) // GRID > _MOST_CELLS:
            raise DataError(
                f"a weight ramps from sample {ramps[0][0]:_} to {ramps[-1][1]:_}, which is too long",
                remedy="check the units of the points of data.sources.weight",
            )
        parts = [np.array([0, self.start, *(p for p, _ in self.points)], dtype=np.int64)]
        if self.stop is not None:
            parts.append(np.array([self.stop], dtype=np.int64))
        parts += [np.arange(-(-x0 // GRID) * GRID, x1, GRID, dtype=np.int64) for x0, x1 in ramps]
        return np.concatenate(parts)


class Mixture:
    """Maps a sample index to its source and source index. The order of the names does not affect the samples.

    Attributes:
        weights, names: weights and names of the sources, as given.
        capacity: samples before a part of the data in which no source is left; None if there is always one.

    Raises:
        DataError: no source has any weight at the start, or a ramp is too long.
    """

    def __init__(self, weights: Mapping[str, MixtureWeight]) -> None:
        self.weights, self.names = dict(weights), list(weights)
        self._order = sorted(range(len(weights)), key=lambda i: self.names[i])
        sources = [weights[self.names[i]] for i in self._order]
        while (used_up := self._build(sources)) is not None:
            position, column = used_up
            sources[column] = MixtureWeight(sources[column].points, sources[column].start, position, None)
        empty = np.flatnonzero(self._rates.sum(axis=1) == 0)
        self.capacity = int(self._counts_at(int(self._starts[empty[0]])).sum()) if len(empty) else None
        if self.capacity == 0:
            raise DataError("all sources of the mixture have weight 0 at its start", remedy="see data.sources")
        self._chunk, self._base = -1, np.zeros(len(weights), np.int64)
        self._sources = self._source_indices = np.empty(0, np.int64)

    def _build(self, sources: list[MixtureWeight]) -> tuple[int, int] | None:
        """Fill the tables. Returns (sample index, column) at which the first source is used up, or None."""
        starts = np.unique(np.concatenate([source.knots() for source in sources]))
        values = np.stack([source.at(starts) for source in sources], axis=1)
        total = np.zeros(len(starts))
        for column in values.T:  # one by one, so that a source of weight 0 does not change the sum of the others
            total += column
        shares = values / np.where(total == 0, 1, total)[:, None]
        rates = np.floor(shares * SCALE).astype(np.int64)
        rates[np.arange(len(rates)), shares.argmax(axis=1)] += np.where(total == 0, 0, SCALE - rates.sum(axis=1))
        self._starts, self._rates = starts, rates
        self._sums = np.zeros_like(rates)
        np.cumsum(rates[:-1] * np.diff(starts)[:, None], axis=0, out=self._sums[1:])
        ends = []
        for column, source in enumerate(sources):
            if source.limit is None:
                continue
            if rates[-1, column] > 0 or self._sums[-1, column] > (source.limit - 1) * SCALE:  # the limit is reached
                whole, _ = self._due(column, np.array([source.limit - 1]))
                ends.append((int(whole[0]) + 1, column))
        return min(ends, default=None)

    def _due(self, column: int, source_indices: Ints) -> tuple[Ints, npt.NDArray[np.float64]]:
        """Due positions of a source's samples, as whole numbers and fractions. All must be due somewhere."""
        reached = source_indices * SCALE
        cell = np.searchsorted(self._sums[:, column], reached, "right") - 1
        whole, rest = np.divmod(reached - self._sums[cell, column], self._rates[cell, column])
        return self._starts[cell] + whole, rest / self._rates[cell, column]

    def _counts_at(self, position: int) -> Ints:
        """Samples of each column that are due before `position`."""
        cell = int(np.searchsorted(self._starts, position, "right")) - 1
        reached = self._sums[cell] + self._rates[cell] * (position - int(self._starts[cell]))
        counts: Ints = -(-reached // SCALE)
        return counts

    def source_of(self, sample_index: int) -> tuple[int, int]:
        """(source, source index) of a sample; sources are numbered as in `names`. Raises DataError."""
        if sample_index >= LONGEST:
            raise DataError(f"sample {sample_index:_} is beyond the longest mixture ({LONGEST:_} samples)")
        if self.capacity is not None and sample_index >= self.capacity:
            raise DataError(
                f"the mixture ends after {self.capacity:_} samples; sample {sample_index:_} does not exist",
                remedy="raise max_epochs of a source, add data, or shorten the run",
            )
        if len(self.names) == 1:
            return 0, sample_index
        inside = self._open(sample_index)
        return int(self._sources[inside]), int(self._source_indices[inside])

    def counts(self, sample_index: int) -> list[int]:
        """Number of samples of each source among [0, sample_index)."""
        if len(self.names) == 1:
            return [sample_index]
        inside = self._open(sample_index)
        taken = np.bincount(self._sources[:inside], minlength=len(self.names))
        return [int(base + count) for base, count in zip(self._base, taken, strict=True)]

    def shares(self, sample_index: int) -> dict[str, float]:
        """The planned share of each source around a sample."""
        rates = self._rates[int(np.searchsorted(self._starts, sample_index, "right")) - 1]
        return {self.names[i]: float(rate) / SCALE for i, rate in zip(self._order, rates, strict=True)}

    def past(self, sample_index: int) -> list[tuple[int, dict[str, int]]]:
        """The plan before a sample: (start, {name: share in units of 1 / SCALE}) for each change, without zeros.

        Two mixtures with equal pasts give the same samples before it, source indices included.
        """
        changes: list[tuple[int, dict[str, int]]] = []
        for start, rates in zip(self._starts.tolist(), self._rates.tolist(), strict=True):
            if start >= sample_index:
                break
            plan = {self.names[i]: rate for i, rate in zip(self._order, rates, strict=True) if rate}
            if not changes or changes[-1][1] != plan:
                changes.append((start, plan))
        return changes

    def _open(self, sample_index: int) -> int:
        """Order the chunk that holds a sample; returns the sample's place in it."""
        chunk, inside = divmod(sample_index, CHUNK)
        if chunk != self._chunk:
            self._lay_out(chunk * CHUNK)
            self._chunk = chunk
        return inside

    def _lay_out(self, first: int) -> None:
        """Sort the samples due around [first, first + CHUNK) and keep those of the chunk."""
        # Between t and t + sources samples are due before t, so [first - sources, first + CHUNK) holds the chunk.
        begin = max(0, first - len(self.names))
        base, stop = self._counts_at(begin), self._counts_at(first + CHUNK)
        indices = [np.arange(low, high, dtype=np.int64) for low, high in zip(base, stop, strict=True)]
        due = [self._due(column, of_source) for column, of_source in enumerate(indices)]
        columns = np.repeat(np.arange(len(base)), stop - base)
        # Whole positions are exact, so that adjacent chunks agree on the border between them.
        whole, fractions = (np.concatenate(parts) for parts in zip(*due, strict=True))
        order = np.lexsort((columns, fractions, whole))
        before = first - int(base.sum())
        early, order = order[:before], order[before : before + CHUNK]
        names = np.array(self._order)
        self._base = np.zeros(len(base), np.int64)
        self._base[names] = base + np.bincount(columns[early], minlength=len(base))
        self._sources, self._source_indices = names[columns[order]], np.concatenate(indices)[order]
