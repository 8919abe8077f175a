"""How many bytes of blocks a node uses at a time: exactly from a trace, or in a second from the block tables alone.

While a stretch of a lane is read, all its blocks are in use; all lanes of a source reach their next stretch together.
So the working set is about two blocks per lane, which `predict` computes from the real tables and the real order. A
cache that holds it fetches every block once per epoch, and once more if the block lies at the border of two lanes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from data.packing.packer import Packer
from data.packing.source import STRETCH, Ints, SourceStream

from .forecast import NEVER, Forecast, lane_runs
from .replacement import Trace, live_bytes

_PHASES = np.linspace(0.05, 0.95, 10)
"""Places in a stretch at which bytes in use are counted."""
_EPOCHS = 3
"""Epochs of a source that are looked at; others are like them."""
_DEVIATIONS = 2.0
"""The most bytes in use at any time are about so many standard deviations above the expectation."""
Floats = npt.NDArray[np.float64]
_PAUSE = 1.5
"""Stretches without a use after which a block is not worth keeping."""


def record(packer: Packer, forecast: Forecast, sizes: Mapping[str, Ints], steps: int) -> Trace:
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
    return Trace(np.array(cursors, np.int64), np.array(blocks, np.int64), whole)


def measure(packer: Packer, trace: Trace) -> int:
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


def predict(packer: Packer, sizes: Mapping[str, Ints], *, share: float, samples: int) -> int:
    """The working set of a node in bytes, from the block tables alone.

    Args:
        packer: of the run; nothing is read through it.
        sizes: bytes of the blocks of each source that is cached; sources that are absent do not count.
        share: of every batch that the node reads.
        samples: of the run.
    """
    profiles = [
        _profile(packer, number, sizes[name], share, samples)
        for number, name in enumerate(packer.mixture.names)
        if name in sizes
    ]
    places = np.unique(np.concatenate([np.zeros(1, np.int64), *(at for at, _ in profiles)]))
    total = np.zeros((2, len(places)))
    for at, live in profiles:
        total += np.pad(live, ((0, 0), (1, 0)))[:, np.searchsorted(at, places, "right")]
    return int((total[0] + _DEVIATIONS * np.sqrt(total[1])).max())


def _profile(packer: Packer, number: int, sizes: Ints, share: float, samples: int) -> tuple[Ints, Floats]:
    """(samples of the run, ascending; bytes of a source in use from each of them on, and their variance)."""
    stream, windows = packer.streams[number], packer.pieces.group(max(0, samples - 1)).window + 1
    last, stretch = packer.mixture.counts(windows)[number], stream.lanes * STRETCH
    places, live = [np.zeros(0, np.int64)], [np.zeros((2, 0))]
    for epoch in range(_EPOCHS + 1):
        first, count = stream.epoch_windows(epoch)
        if first >= last:
            break
        if epoch == _EPOCHS:
            at, used = np.array([first]), np.concatenate(live, axis=1).max(axis=1, keepdims=True)
        elif count <= _PAUSE * stretch:  # all is in use all the time
            at, used = np.array([first]), np.array([[float(sizes.sum())], [0.0]])
        else:
            phases = np.arange(-(-count // stretch))[:, None] + _PHASES
            at = (first + phases * stretch).astype(np.int64).reshape(-1)
            used = _live_in_epoch(stream, sizes, epoch, share)[:, at < last]
        windows_at = packer.mixture.places_of(number, at[at < last])
        places.append(np.array([packer.pieces.first_sample(window) for window in windows_at.tolist()], np.int64))
        live.append(used)
    return np.concatenate(places), np.concatenate(live, axis=1)


def _live_in_epoch(stream: SourceStream, sizes: Ints, epoch: int, share: float) -> Floats:
    """Expected bytes in use and their variance: float64 [2, stretches * phases].

    A block is in use if the node has read one of its windows in the lane and will read another. It reads each with
    probability `share`, and the windows of a stretch come in random order.
    """
    runs = lane_runs(stream, epoch)
    stretches = -(-stream.epoch_windows(epoch)[1] // (stream.lanes * STRETCH))
    begin, end, size = runs.first, runs.last + 1, sizes[runs.blocks].astype(np.float64)
    spans = (end - 1) // STRETCH - begin // STRETCH + 1
    of_run = np.repeat(np.arange(len(begin)), spans)
    number = begin[of_run] // STRETCH + np.arange(len(of_run)) - np.repeat(np.cumsum(spans) - spans, spans)
    low = np.maximum(begin[of_run], number * STRETCH)
    high = np.minimum(end[of_run], (number + 1) * STRETCH)
    unread, size = 1.0 - share, size[of_run]
    none_before, none_after = unread ** (low - begin[of_run]), unread ** (end[of_run] - high)
    found = np.empty((2, stretches, len(_PHASES)))
    for at, phase in enumerate(_PHASES.tolist()):
        used = (1 - none_before * (1 - share * phase) ** (high - low)) * (
            1 - none_after * (1 - share * (1 - phase)) ** (high - low)
        )
        found[0, :, at] = np.bincount(number, size * used, stretches)
        found[1, :, at] = np.bincount(number, size**2 * used * (1 - used), stretches)
    return found.reshape(2, -1)
