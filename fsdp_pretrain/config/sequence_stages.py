"""The length of every sample: constant, or in stages that train shorter samples first (`data.stages`).

All conversions between samples and tokens are here. Samples are counted in two ways, and the same class serves both:
samples read (`cursor`, places in the data), and samples trained (`consumed`, every schedule), see `trained`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fsdp_pretrain.units import Progress

from .skips import Skips


@dataclass(frozen=True)
class SequenceStages:
    """Samples from `starts[i]` on have `lengths[i]` tokens. `starts` ascend from 0; the last stage has no end."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def constant(cls, length: int) -> SequenceStages:
        """Every sample has `length` tokens."""
        return cls((0,), (length,))

    @classmethod
    def of(cls, stages: Sequence[tuple[int, Progress]], length: int) -> SequenceStages:
        """Build from (length, end) of all stages but the last, whose samples have `length` tokens.

        Ends are samples or tokens read since the start of the run. They are rounded up, so that the samples of a stage
        make whole samples of `length` tokens. Raises ValueError if a stage's length does not divide `length`, or a
        stage is empty.
        """
        built = cls.constant(length)
        for number, (short, until) in enumerate(stages):
            if length % short:
                raise ValueError(
                    f"data.stages: a length of {short} is not a whole part of data.sequence_length = {length}"
                )
            start, pieces = built.starts[-1], length // short
            built = cls(built.starts, (*built.lengths[:-1], short))  # as if it had no end
            samples = built.samples(until.value) if until.unit == "token" else until.value
            end = start + -(-(samples - start) // pieces) * pieces
            if end <= start:
                raise ValueError(f"data.stages: stage {number + 1} ends at {until}, which is not after its start")
            built = cls((*built.starts, end), (*built.lengths, length))
        return built

    def trained(self, skips: Skips) -> SequenceStages:
        """The same stages, counted in samples trained instead of samples read."""
        skipped = [sum(max(0, min(stop, start) - first) for first, stop in skips.ranges) for start in self.starts]
        return SequenceStages(
            tuple(start - less for start, less in zip(self.starts, skipped, strict=True)), self.lengths
        )

    def length_at(self, sample: int) -> int:
        """Tokens of the sample with this index."""
        return self.lengths[bisect_right(self.starts, sample) - 1]

    def between(self, first: int, stop: int) -> dict[int, int]:
        """Number of samples of each length among samples [first, stop)."""
        counts = Counter[int]()
        for start, end, length in zip(self.starts, (*self.starts[1:], stop), self.lengths, strict=True):
            if (samples := min(end, stop) - max(start, first)) > 0:
                counts[length] += samples
        return dict(counts)

    def interval(self, every: Progress) -> int:
        """An interval of samples or tokens in samples of the last length, rounded up."""
        return -(-every.value // self.lengths[-1]) if every.unit == "token" else every.value

    def tokens(self, samples: int) -> int:
        """Tokens of the first `samples` samples."""
        return sum(length * count for length, count in self.between(0, samples).items())

    def samples(self, tokens: int) -> int:
        """The smallest number of first samples that have at least `tokens` tokens."""
        sizes = [
            (end - start) * length for (start, end), length in zip(pairwise(self.starts), self.lengths, strict=False)
        ]
        before = [0, *accumulate(sizes)]
        stage = bisect_right(before, tokens) - 1
        return self.starts[stage] + -(-(tokens - before[stage]) // self.lengths[stage])
