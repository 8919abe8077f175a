"""How many bytes of blocks a node uses at a time: exactly from a trace, or in a second from the block tables alone.

While a stretch of a lane is read, all its blocks are in use; all lanes of a source reach their next stretch together.
So the working set is about two blocks per lane, more if a step is long, which `predict` computes from the real tables
and the real order of blocks, with the order inside stretches left to chance. A cache that holds it fetches every block
once per epoch, and once more if the block lies at the border of two lanes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data.packing.packer import Packer
from data.packing.source import STRETCH, Ints

from .forecast import NEVER, Forecast, LaneRuns, lane_runs
from .replacement import BlockTrace, live_bytes

Floats = npt.NDArray[np.float64]
_PHASES = np.array([0.25, 0.5, 0.75])
"""Places in a stretch, besides its ends, at which bytes in use are counted."""
_MOST_BLOCKS, _MOST_EPOCHS = 1_000_000, 50
"""Epochs of a source are looked at up to so many blocks and epochs; later ones are like them."""
_ALIKE = 2.0
"""Of so many places at which bytes in use are counted one varies by itself."""
_PAIRS = 2_000_000
"""Blocks in use that are looked at at once; bounds the memory."""
_PAUSE = 1.5
"""Stretches without a use after which a block is not worth keeping."""


def record(packer: Packer, forecast: Forecast, sizes: Mapping[str, Ints], steps: int) -> BlockTrace:
    """The uses of blocks in the next `steps` steps of a forecast. `sizes`: bytes of the blocks of each source."""
    offsets = np.cumsum([0, *(len(sizes[name]) for name in packer.mixture.names)])
    cursors, blocks = list[int](), list[int]()
    for _ in range(steps):
        uses = forecast.advance()
        if uses is None:
            break
        cursors += [use.cursor for use in uses]
        blocks += [int(offsets[use.source]) + use.block for use in uses]
    whole = np.concatenate([sizes[name] for name in packer.mixture.names])
    return BlockTrace(np.array(cursors, np.int64), np.array(blocks, np.int64), whole)


def measure(packer: Packer, trace: BlockTrace) -> int:
    """The working set of a trace that was recorded from the start of a run, in bytes.

    A block counts from its first to its last use in an epoch, but for long pauses: see `replacement.live_bytes`.
    """
    shares, pauses, epochs = packer.mixture.shares(0), list[Ints](), np.zeros(len(trace.blocks), np.int64)
    first_block = 0
    for number, (name, stream) in enumerate(zip(packer.mixture.names, packer.streams, strict=True)):
        pause, blocks = _PAUSE * STRETCH * stream.lanes / max(shares[name], 1e-9), len(stream.block_lengths)
        pauses.append(np.full(blocks, int(min(pause, 2**62))))
        own = (trace.blocks >= first_block) & (trace.blocks < first_block + blocks)
        first_block += blocks
        if own.any():
            ends = _epoch_ends(packer, number, int(trace.cursors[-1]))
            epochs[own] = np.searchsorted(ends, trace.cursors[own], "right")
    return live_bytes(trace, np.concatenate(pauses), epochs)


def _epoch_ends(packer: Packer, number: int, samples: int) -> Ints:
    """The samples at which the epochs of a source end, among the first `samples` of the run."""
    stream, ends = packer.streams[number], list[int]()
    while not ends or ends[-1] < samples:
        window = packer.mixture.places_of(number, np.array([stream.epoch_windows(len(ends) + 1)[0]]))
        ends.append(samples if window[0] >= NEVER else packer.pieces.first_sample(int(window[0])))
    return np.array(ends, np.int64)


def predict(packer: Packer, sizes: Mapping[str, Ints], *, world: int, ranks: range, batch: int, samples: int) -> int:
    """The working set of a node in bytes, from the block tables alone.

    A reshuffle is left out: in the rest of its epoch no cache that is smaller than that fetches blocks once.

    Args:
        packer: of the run; nothing is read through it.
        sizes: bytes of the blocks of each source that is cached; sources that are absent do not count.
        world: number of ranks that split a batch.
        ranks: those of the node.
        batch: samples of a step.
        samples: of the run.
    """
    reading = _Reading(ranks.start * batch / world, len(ranks) * batch / world, batch, -(-samples // batch) * batch)
    profiles = [
        _profile(packer, number, sizes[name], reading)
        for number, name in enumerate(packer.mixture.names)
        if name in sizes
    ]
    places = np.unique(np.concatenate([np.zeros(1, np.int64), *(at for at, _ in profiles)]))
    total = np.zeros((2, len(places)))
    for at, live in profiles:
        total += np.pad(live, ((0, 0), (1, 0)))[:, np.searchsorted(at, places, "right")]
    return _largest(total[0], np.sqrt(total[1]))


def _largest(means: Floats, deviations: Floats) -> int:
    """The median of the largest of normally distributed numbers."""
    low, high, deviations = float(means.max()), float((means + 8 * deviations).max()), np.maximum(deviations, 1e-3)
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        z = (middle - means) / deviations
        above = 1 / (1 + np.exp(np.minimum(1.5976 * z + 0.07056 * z**3, 700)))  # the tail of the normal distribution
        enough = np.log1p(-np.minimum(above, 1 - 1e-12)).sum() > _ALIKE * math.log(0.5)
        low, high = (low, middle) if enough else (middle, high)
    return int(high)


class _Reading(NamedTuple):
    """How a node reads a run."""

    begin: float
    """Place in a batch from which on the node reads it."""
    own: float
    """Samples of a batch that it reads."""
    batch: int
    samples: int
    """Of the run: whole batches."""

    def before(self, cursors: Ints) -> Floats:
        """Samples among the first `cursors` of the run that the node reads."""
        steps, inside = np.divmod(np.minimum(cursors, self.samples), self.batch)
        found: Floats = steps * self.own + np.clip(inside - self.begin, 0, self.own)
        return found


class _Stretches(NamedTuple):
    """The stretches of the lanes of a source, one epoch after the other.

    Attributes:
        bounds: int64 [stretches + 1], samples of the run at which each begins, and at which the last ends.
        windows: float64 [stretches], windows of a lane in each.
        runs: of all epochs; places in a lane are numbered on, `STRETCH` for each stretch.
    """

    bounds: Ints
    windows: Floats
    runs: LaneRuns


def _profile(packer: Packer, number: int, sizes: Ints, reading: _Reading) -> tuple[Ints, Floats]:
    """(samples of the run, ascending; bytes of a source in use from each of them on, and their variance)."""
    stretches, goes_on = _stretches(packer, number, reading.samples, epochs=_MOST_BLOCKS // len(sizes))
    ends, batch = np.minimum(stretches.bounds, reading.samples), reading.batch
    inside = ends[:-1, None] + np.diff(ends)[:, None] * _PHASES
    steps = np.unique(np.concatenate([ends, ends + batch, inside.astype(np.int64).reshape(-1)]) // batch)
    cursors = steps[steps * batch < reading.samples] * batch
    live = _live(stretches, sizes, packer.streams[number].lanes, cursors, reading)
    if goes_on:
        cursors, live = np.append(cursors, ends[-1]), np.append(live, live.max(axis=1, keepdims=True), axis=1)
    return cursors, live


def _stretches(packer: Packer, number: int, samples: int, epochs: int) -> tuple[_Stretches, bool]:
    """(the stretches of the first epochs of a source, whether the run reads further ones)."""
    stream, windows = packer.streams[number], packer.pieces.group(max(0, samples - 1)).window + 1
    last, size = packer.mixture.counts(windows)[number], packer.streams[number].lanes * STRETCH
    indices, counts, runs = list[Ints](), list[Floats](), list[LaneRuns]()
    for epoch in range(max(1, min(epochs, _MOST_EPOCHS))):
        first, count = stream.epoch_windows(epoch)
        if first >= last and epoch:
            break
        place = STRETCH * sum(map(len, counts))
        found = lane_runs(stream, epoch)
        runs.append(LaneRuns(found.blocks, found.first + place, found.last + place))
        indices.append(np.arange(first, first + count, size, dtype=np.int64))
        counts.append(np.minimum(size, first + count - indices[-1]) / stream.lanes)
    places = packer.mixture.places_of(number, np.append(np.concatenate(indices), first + count))
    bounds = [samples if place >= NEVER else packer.pieces.first_sample(place) for place in places.tolist()]
    joined = LaneRuns(*map(np.concatenate, zip(*runs, strict=True)))
    return _Stretches(np.array(bounds, np.int64), np.concatenate(counts), joined), first + count < last


def _live(stretches: _Stretches, sizes: Ints, lanes: int, cursors: Ints, reading: _Reading) -> Floats:
    """Expected bytes in use in the steps that begin at `cursors`, and their variance: float64 [2, steps].

    A block is in use in a step if the node reads one of its windows in the lane before the end of the step, and one
    after its begin. The windows of a stretch come in random order.
    """
    bounds, windows, (blocks, first, last) = stretches
    begin, end = first // STRETCH, np.minimum(last // STRETCH, len(windows) - 1)
    spans = end - begin + 1
    rows = np.cumsum(spans) - spans  # first of each run, which has a row for every stretch
    run = np.repeat(np.arange(len(spans)), spans)
    stretch = begin[run] + np.arange(len(run)) - rows[run]
    own = np.minimum(last[run] + 1, (stretch + 1) * STRETCH) - np.maximum(first[run], stretch * STRETCH)
    own, read = own.astype(np.float64), reading.before(bounds)
    density = windows / np.maximum(np.diff(bounds), 1)  # windows of a lane for each sample of the run

    def done(stretches: Ints, read_before: Floats) -> Floats:
        """Windows of a lane's stretches that the node has read once it has read so many samples of the run."""
        begin = read[stretches]
        found: Floats = (np.clip(read_before, begin, read[stretches + 1]) - begin) * density[stretches]
        return found

    each = reading.own * windows.sum() / max(1, bounds[-1] - bounds[0])  # windows of a lane in a step, on average
    missed = np.append(0.0, np.cumsum(_log_missed(own, done(stretch, read[stretch + 1]), windows[stretch], each)))
    found, parts = np.zeros((2, len(cursors))), -(-len(cursors) * lanes * 3 // _PAIRS)
    for part in range(parts):
        starts = cursors[part::parts]
        stops = starts + reading.batch
        low = np.searchsorted(stops, bounds[begin], "right")
        steps = np.maximum(np.searchsorted(starts, bounds[end + 1], "left") - low, 0)
        run = np.repeat(np.arange(len(steps)), steps)
        step = low[run] + np.arange(len(run)) - np.repeat(np.cumsum(steps) - steps, steps)
        before, after = missed[rows[run]], missed[rows[run] + spans[run]]
        none = after - before
        stretch = np.clip((np.searchsorted(bounds, stops, "left") - 1)[step], begin[run], end[run])
        row, now = rows[run] + stretch - begin[run], done(stretch, reading.before(stops)[step])
        before = missed[row] - before + _log_missed(own[row], now, windows[stretch], each)
        stretch = np.clip((np.searchsorted(bounds, starts, "right") - 1)[step], begin[run], end[run])
        row, now = rows[run] + stretch - begin[run], done(stretch, reading.before(starts)[step])
        left = done(stretch, read[stretch + 1]) - now
        after = after - missed[row + 1] + _log_missed(own[row], left, windows[stretch], each)
        used = np.clip(1 - np.exp(before) - np.exp(after) + np.exp(none), 0, 1 - 1e-12)
        # A block in several lanes, or in two epochs, is in use if one of them uses it.
        pairs, where = np.unique(blocks[run] * len(starts) + step, return_inverse=True)
        block, step = np.divmod(pairs, len(starts))
        used, size = -np.expm1(np.bincount(where, np.log1p(-used))), sizes[block].astype(np.float64)
        found[0, part::parts] = np.bincount(step, size * used, len(starts))
        found[1, part::parts] = np.bincount(step, size**2 * used * (1 - used), len(starts))
    return found


def _log_missed(own: Floats, read: Floats, windows: Floats, each: float) -> Floats:
    """Logarithm of the probability that none of a block's `own` windows is among `read` ones, of `windows` in all.

    Args:
        each: windows of a lane in a step. If it is below 1, how many are read is up to chance, too.
    """
    fewer, more, chance = np.minimum(own, read), np.maximum(own, read), np.where(read < own, min(each, 1.0), 1.0)
    left = np.maximum(1 - chance * more / np.maximum(windows - np.maximum(fewer - 1, 0) / 2, 1), 1e-30)
    times = fewer / chance
    whole = np.floor(times)
    found: Floats = whole * np.log(left) + np.log(np.maximum(1 - (times - whole) * (1 - left), 1e-30))
    return found
