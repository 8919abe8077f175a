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

from .forecast import Forecast, lane_runs
from .replacement import Trace, live_bytes

_PHASES = np.linspace(0.05, 0.95, 10)
"""Places in a stretch at which bytes in use are counted."""
_EPOCHS = 3
"""Epochs of a source that are looked at; others are like them."""
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
    """The working set of a trace, in bytes: see `replacement.live_bytes`."""
    shares = packer.mixture.shares(0)
    pauses = [
        np.full(len(stream.block_lengths), int(min(_PAUSE * STRETCH * stream.lanes / max(shares[name], 1e-9), 2**62)))
        for name, stream in zip(packer.mixture.names, packer.streams, strict=True)
    ]
    return live_bytes(trace, np.concatenate(pauses))


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
    total = np.zeros(len(places))
    for at, live in profiles:
        total += np.append(0.0, live)[np.searchsorted(at, places, "right")]
    return int(total.max())


def _profile(
    packer: Packer, number: int, sizes: Ints, share: float, samples: int
) -> tuple[Ints, npt.NDArray[np.float64]]:
    """(samples of the run, ascending; bytes of a source's blocks that are in use from each of them on)."""
    stream, windows = packer.streams[number], packer.pieces.group(max(0, samples - 1)).window + 1
    last, stretch = packer.mixture.counts(windows)[number], stream.lanes * STRETCH
    places, live = [np.zeros(0, np.int64)], [np.zeros(0)]
    for epoch in range(_EPOCHS + 1):
        first, count = stream.epoch_windows(epoch)
        if first >= last:
            break
        if epoch == _EPOCHS:
            at, used = np.array([first]), np.concatenate(live).max(keepdims=True)
        elif count <= _PAUSE * stretch:  # the next epoch needs them again before they are worth evicting
            at, used = np.array([first]), np.array([float(sizes.sum())])
        else:
            phases = np.arange(-(-count // stretch))[:, None] + _PHASES
            at = (first + phases * stretch).astype(np.int64).reshape(-1)
            used = _live_in_epoch(stream, sizes, epoch, share)[at < last]
        windows_at = packer.mixture.places_of(number, at[at < last])
        places.append(np.array([packer.pieces.first_sample(window) for window in windows_at.tolist()], np.int64))
        live.append(used)
    return np.concatenate(places), np.concatenate(live)


def _live_in_epoch(stream: SourceStream, sizes: Ints, epoch: int, share: float) -> npt.NDArray[np.float64]:
    """Expected bytes in use at each phase of each stretch of an epoch: float64 [stretches * phases].

    A block is in use if the node has read one of its windows in the lane and will read another. It reads each with
    probability `share`, and the windows of a stretch come in random order.
    """
    runs = lane_runs(stream, epoch)
    stretches = -(-stream.epoch_windows(epoch)[1] // (stream.lanes * STRETCH))
    begin, end, size = runs.first, runs.last + 1, sizes[runs.blocks]
    spans = (end - 1) // STRETCH - begin // STRETCH + 1
    of_run = np.repeat(np.arange(len(begin)), spans)
    number = begin[of_run] // STRETCH + np.arange(len(of_run)) - np.repeat(np.cumsum(spans) - spans, spans)
    low = np.maximum(begin[of_run], number * STRETCH)
    high = np.minimum(end[of_run], (number + 1) * STRETCH)
    unread = 1.0 - share
    none_before, none_after = unread ** (low - begin[of_run]), unread ** (end[of_run] - high)
    live = [
        np.bincount(
            number,
            size[of_run]
            * (1 - none_before * (1 - share * phase) ** (high - low))
            * (1 - none_after * (1 - share * (1 - phase)) ** (high - low)),
            stretches,
        )
        for phase in _PHASES
    ]
    return np.stack(live, axis=1).reshape(-1)
