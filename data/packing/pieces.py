"""Maps shorter samples (`data.stages`) to pieces of full windows.

The order of the data is that of full windows, with or without stages. In a stage of samples of S / k tokens, a window
is cut into k pieces of S / k + 1 tokens, which overlap by one token as windows do. Windows are taken in groups. The
samples of a group are piece 0 of each of its windows, in their order, then piece 1 of each, and so on: so the pieces of
a window are as far apart as a group is long, and a group is small enough to stay in the page cache meanwhile. A stage
consists of whole windows. So every token is predicted once whatever the stages, and after a stage the windows are those
that a run without stages would train. All of it is arithmetic on the sample index.

A window of which a piece was read cannot change its place in a source any more. So changes along the data (weights of
sources, a reshuffle) happen between groups, see `Pieces.begun`.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from fsdp_pretrain.config.sequence_stages import SequenceStages
from fsdp_pretrain.units import Progress

GROUP = 1 << 16
"""Windows of a group; the last group of a stage has up to twice as many, and a short stage is one group."""


class Group(NamedTuple):
    """Windows [window, window + size), each cut into `pieces`; `sample` is the first of their samples."""

    sample: int
    window: int
    size: int
    pieces: int


class Pieces:
    """Maps samples to pieces of windows.

    Attributes:
        stages: the lengths of the samples, counted in samples read.
    """

    def __init__(self, stages: SequenceStages) -> None:
        self.stages = stages
        self._pieces = [stages.lengths[-1] // length for length in stages.lengths]
        self._windows = [0]
        for number, pieces in enumerate(self._pieces[:-1]):
            samples = stages.starts[number + 1] - stages.starts[number]
            self._windows.append(self._windows[-1] + samples // pieces)

    def group(self, sample: int) -> Group:
        """The group of a sample. A full window is a group of its own."""
        stage = bisect_right(self.stages.starts, sample) - 1
        start, window, pieces = self.stages.starts[stage], self._windows[stage], self._pieces[stage]
        if pieces == 1:
            return Group(sample, window + sample - start, 1, 1)
        windows = self._windows[stage + 1] - window
        number = min((sample - start) // (GROUP * pieces), max(1, windows // GROUP) - 1)
        first = number * GROUP
        size = GROUP if first + 2 * GROUP <= windows else windows - first
        return Group(start + first * pieces, window + first, size, pieces)

    def place(self, sample: int) -> tuple[int, int, int]:
        """(window, piece, pieces of that window) of a sample."""
        group = self.group(sample)
        piece, inside = divmod(sample - group.sample, group.size)
        return group.window + inside, piece, group.pieces

    def begun(self, samples: int) -> int:
        """Number of windows in the groups that samples [0, samples) belong to."""
        if samples == 0:
            return 0
        group = self.group(samples - 1)
        return group.window + group.size

    def begun_at(self, place: Progress) -> int:
        """`begun` for a place in the data: the first window that a change at this place can affect."""
        return self.begun(self.stages.samples(place.value) if place.unit == "token" else place.value)

    def first_sample(self, window: int) -> int:
        stage = bisect_right(self._windows, window) - 1
        group = self.group(self.stages.starts[stage] + (window - self._windows[stage]) * self._pieces[stage])
        return group.sample + window - group.window

    def past(self, samples: int) -> list[tuple[int, int]]:
        """The part of the stages that matters for samples [0, samples): if two agree on it, so do these samples.

        (first sample, length) of every stage that has begun, and (windows begun, 0).
        """
        begun = [(s, n) for s, n in zip(self.stages.starts, self.stages.lengths, strict=True) if s < samples]
        return [*begun, (self.begun(samples), 0)]
