"""Which blocks to fetch and which to drop, since the order of use is known. Pure.

The blocks that are used soonest, up to half of the cache, are the *window*: what is missing of it is fetched, in the
order of use. Room is made by dropping blocks outside the window, first those without a use as far as is forecast, then
the one that is used again last. The other half of the cache therefore keeps what is used again soon after the window,
such as a block at the border of two lanes; without it, such a block would come twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from data.packing.packer import Packer
from data.packing.source import STRETCH, Ints

from .forecast import Key

_SHARE = 0.5
"""Of the cache, for the window."""
RECOMMENDED = 2.0
"""Size of a cache in `bytes_in_use`; `_SHARE` of it then holds them, and the window moves on while they are read."""


@dataclass(frozen=True)
class Window:
    """What to do now.

    Attributes:
        wanted: blocks of the window in the order of use, present or not.
        droppable: present blocks outside the window, the first to be dropped first.
        urgent: how many of `wanted` the next step reads.
        until: the last step whose blocks all belong to it; None: the last that is forecast.
    """

    wanted: list[Key]
    droppable: list[Key]
    urgent: int
    until: int | None = None


def window_of(
    order: Sequence[Key],
    first_use: Mapping[Key, int],
    present: Sequence[Key],
    sizes: Mapping[str, Ints],
    *,
    next_step: int,
    limit: int,
) -> Window:
    """The window of a cache that may hold `limit` bytes.

    Args:
        order: the blocks that are used, the one that is used next first.
        first_use: the step of the next use of each of them.
        present: the blocks in the cache, the one that came first, first.
        sizes: bytes of the blocks of each corpus by fingerprint.
        next_step: its blocks belong to the window whatever their size.
    """
    wanted, total, urgent, until = list[Key](), 0, 0, None
    for key in order:
        total += int(sizes[key[0]][key[1]])
        if first_use[key] <= next_step:
            urgent += 1
        elif total > _SHARE * limit:
            until = first_use[key] - 1
            break
        wanted.append(key)
    held = set(wanted)
    outside = [key for key in present if key not in held]
    unused = [key for key in outside if key not in first_use]
    later = sorted((key for key in outside if key in first_use), key=first_use.__getitem__, reverse=True)
    return Window(wanted, unused + later, urgent, until)


def bytes_in_use(packer: Packer, sizes: Mapping[str, Ints], batch: int) -> int:
    """About how many bytes of blocks a node uses at a time: the least that a cache must hold.

    While a stretch of a lane is read, all blocks that it touches are in use: 1 + stretch / block on average, and more
    by chance if the lanes are few. All lanes of a source reach their next stretch together.

    Args:
        sizes: bytes of the blocks of each source by URL, int64 [blocks], by its name.
        batch: samples of a step.
    """
    found = 0.0
    for name, stream in zip(packer.mixture.names, packer.streams, strict=True):
        if name in sizes:
            own, lane = sizes[name], stream.epoch_length / stream.lanes
            stretch = min(lane, (STRETCH + batch / stream.lanes) * stream.length)
            touched = stream.lanes * (1 + stretch / float(stream.block_lengths.mean())) + 2 * math.sqrt(stream.lanes)
            found += min(float(own.sum()), max(touched * float(own.mean()), 2.0 * float(np.max(own))))
    return int(found)
