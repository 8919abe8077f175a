"""What a node fetches of a source in remote storage, from the block table alone. Reads nothing, no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.packing.source import Ints, SourceStream

from .forecast import lane_runs

REQUESTS = 2
"""For a block: the lengths of its documents, and its tokens."""


@dataclass(frozen=True)
class EpochReads:
    """Expected blocks and bytes that one node fetches in an epoch with a cache that holds its working set.

    A block at the border of two lanes comes twice; one that none of the node's samples lies in does not come.
    """

    blocks: float
    bytes: float


def epoch_reads(stream: SourceStream, sizes: Ints, share: float) -> EpochReads:
    """What a node fetches in an epoch.

    Args:
        sizes: bytes of the source's blocks, int64 [blocks].
        share: of every batch that the node reads.
    """
    runs = lane_runs(stream, 0)
    needed = 1.0 - (1.0 - share) ** (runs.last - runs.first + 1)
    return EpochReads(float(needed.sum()), float(np.dot(needed, sizes[runs.blocks])))
