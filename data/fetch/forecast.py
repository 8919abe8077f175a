"""Which blocks a node will read, and when: arithmetic on the configuration and a position. Reads nothing, no torch.

`Forecast` names the blocks of every step exactly, step after step. `NextUse` answers for any block and any distance, in
closed form: to the stretch of a lane, see `data.packing.packer`, in which windows are permuted.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from data.packing.mixture import LONGEST
from data.packing.packer import Packer
from data.packing.position import Position
from data.packing.source import STRETCH, Ints, SourceStream
from fsdp_pretrain.config.schedule import BatchSchedule, share_of
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.errors import DataError

NEVER = LONGEST
"""A sample index that no run reaches: a block that is not used again."""
_GRID = 32
"""Places of a lane at which a reshuffled order is looked up: two for every chunk that a reshuffle keeps together."""


class Use(NamedTuple):
    """A block that a step reads."""

    step: int
    """Number of the step."""
    cursor: int
    """Samples read before it."""
    source: int
    """Numbered as in the packer."""
    block: int
    """Row of the corpus's block table."""


class Forecast:
    """The blocks that some ranks read, from a position on; see `Loader.build`.

    Args:
        packer: of the run; nothing is read through it.
        batches: global batch by consumed samples.
        skips: samples not trained.
        start: position before the first step.
        world: number of ranks that split a batch.
        ranks: those of the node.
        until: consumed samples at which the run ends; None: never.

    Attributes:
        position: after the last step forecast so far.
    """

    def __init__(
        self,
        packer: Packer,
        batches: BatchSchedule,
        skips: Skips,
        start: Position,
        *,
        world: int,
        ranks: range,
        until: int | None = None,
    ) -> None:
        self._packer, self._batches, self._skips = packer, batches, skips
        self._world, self._ranks, self._until = world, ranks, until
        self.position = start

    def advance(self) -> list[Use] | None:
        """The blocks of the next step in the order in which they are first needed, each once.

        None at the end of the run or of the data.
        """
        before = self.position
        if self._until is not None and before.consumed >= self._until:
            return None
        after = before.advance(self._batches, self._skips)
        share = len(share_of(0, after.batch, 0, self._world))
        first = self._skips.after(before.cursor, self._ranks.start * share)
        found: dict[tuple[int, int], int] = {}
        try:
            for number, sample in enumerate(self._skips.take(first, share * len(self._ranks))):
                source, blocks = self._packer.blocks_of(sample)
                for block in blocks:  # all ranks begin at once, each with its first sample
                    at = found.setdefault((source, block), number % share)
                    found[source, block] = min(at, number % share)
        except DataError:
            return None
        self.position = after
        order = sorted(found, key=lambda use: found[use])
        return [Use(after.step, before.cursor, source, block) for source, block in order]


class LaneRuns(NamedTuple):
    """Where the blocks of a source lie in the lanes of an epoch: a row for each lane that a block is in.

    int64 [rows] each; `first` and `last` are places in the lane.
    """

    blocks: Ints
    first: Ints
    last: Ints


def lane_runs(stream: SourceStream, epoch: int) -> LaneRuns:
    """The lanes of an epoch's blocks, all at once. Reads nothing."""
    order, ends = stream.block_order(epoch)
    first, count = stream.epoch_windows(epoch)
    stops = epoch * stream.epoch_length + ends
    # A window reads the first token of the next one too.
    low = np.clip(-(-(stops - stream.block_lengths[order]) // stream.length) - 1 - first, 0, count - 1)
    high = np.clip((stops - 1) // stream.length - first, 0, count - 1)
    run, longer = divmod(count, stream.lanes)

    def lane_of(windows: Ints) -> Ints:
        beyond = windows - longer * (run + 1)
        return np.where(beyond < 0, windows // (run + 1), longer + beyond // max(run, 1))

    lane = lane_of(low)
    lanes = lane_of(high) - lane + 1
    row = np.repeat(np.arange(len(order)), lanes)
    lane = lane[row] + np.arange(len(row)) - np.repeat(np.cumsum(lanes) - lanes, lanes)
    begin = lane * run + np.minimum(lane, longer)
    size = run + (lane < longer)
    first_place, last_place = np.maximum(low[row] - begin, 0), np.minimum(high[row] - begin, size - 1)
    following = stream.block_order(epoch + 1)[0][:1]  # the last window reads into the next epoch
    end = last_place[-1:]
    return LaneRuns(*map(np.concatenate, ((order[row], following), (first_place, end), (last_place, end))))


class NextUse:
    """When the blocks of one source are used next by the whole job, to the stretch of a lane."""

    def __init__(self, packer: Packer, source: int) -> None:
        self._packer, self._source = packer, source
        self._stream = packer.streams[source]
        self._runs = lru_cache(maxsize=2)(lane_runs)

    def after(self, cursor: int) -> Ints:
        """For every block the index of a sample, from `cursor` on, that uses it next: int64 [blocks]; `NEVER` if none.

        Early rather than late: while a stretch is being read, every block of it counts as used at once, and a mixture's
        place is known to a few samples.
        """
        group, stream = self._packer.pieces.group(cursor), self._stream
        begin = self._packer.mixture.counts(group.window)[self._source]
        epoch = begin * stream.length // stream.epoch_length
        found = self._in_epoch(epoch, begin)
        if (found == NEVER).any():
            following = self._in_epoch(epoch + 1, stream.epoch_windows(epoch + 1)[0])
            found = np.where(found == NEVER, following, found)
        indices, where = np.unique(found, return_inverse=True)
        windows = self._packer.mixture.places_of(self._source, indices)
        samples = [
            NEVER if window >= NEVER else self._packer.pieces.first_sample(window) for window in windows.tolist()
        ]
        return np.maximum(np.array(samples, np.int64)[where], cursor)

    def _in_epoch(self, epoch: int, begin: int) -> Ints:
        """The first source index from `begin` on at which each block is used in an epoch; `NEVER` if none."""
        stretches, runs = self._next_of_stretches(epoch, begin), self._runs(self._stream, epoch)
        bounds = np.stack((runs.first // STRETCH, runs.last // STRETCH + 1), axis=1).reshape(-1)
        least = np.minimum.reduceat(np.append(stretches, NEVER), bounds)[::2]
        found = np.full(len(self._stream.block_lengths), NEVER)
        np.minimum.at(found, runs.blocks, least)
        return found

    def _next_of_stretches(self, epoch: int, begin: int) -> Ints:
        """For each stretch of the lanes of an epoch the first source index from `begin` on that belongs to it."""
        stream = self._stream
        first, count = stream.epoch_windows(epoch)
        size = stream.lanes * STRETCH
        starts = np.arange(first, first + count, size, dtype=np.int64)
        if all(at >= first + count for at in stream.reshuffles):
            return np.where(np.minimum(starts + size, first + count) > begin, np.maximum(starts, begin), NEVER)
        grid = np.arange(max(begin, first), first + count, stream.lanes * _GRID, dtype=np.int64)
        found = np.full(len(starts), NEVER)
        np.minimum.at(found, (stream.neighbourhoods(grid, first, count) - first) // size, grid)
        return found
