"""Checks periodically that all replicas have the same parameters, by a checksum per rank.

Nothing else would detect a diverging replica: gradients are averaged over the replicas, so each keeps learning, and the
losses look right (BLOOM's layer norms drifted apart unnoticed).
"""

from __future__ import annotations

from collections import Counter

import torch
import xxhash
from torch import Tensor, nn

from fsdp_pretrain.run.step_record import Replicas

from .mesh import World, local_part

COMPARE_EVERY = 1000
"""Steps between two comparisons of the replicas' parameters; another one follows each start."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(model: nn.Module, world: World) -> Tensor:
    """int64 [ranks], on the device: the checksum of this rank's shard at its index, 0 elsewhere."""
    total = torch.zeros((), dtype=torch.int64, device=world.device)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            total += bit_sum(local_part(parameter)) * (2 * number + 1)  # so that errors in two tensors do not cancel
    sums = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    sums[world.rank] = total
    return sums


def bit_sum(values: Tensor) -> Tensor:
    """Sum of the bits of all elements, read as integers: int64 0-dim, on their device."""
    bits = values.detach().reshape(-1).view(_BITS[values.element_size()])
    return bits.sum(dtype=torch.int64)


def compare(sums: list[int], shards: int) -> Replicas:
    """Find the ranks whose parameters differ from those of the other replicas.

    Args:
        sums: checksum of every rank, in rank order; rank = replica * shards + shard.

    Returns:
        `digest` of the first replica's parameters, and `differing`: the ranks that differ from the majority with the
        same shard; without a majority, all ranks with that shard.
    """
    differing: list[int] = []
    for shard in range(shards):
        replicas = sums[shard::shards]
        (most, count), *_ = Counter(replicas).most_common()
        clear = 2 * count > len(replicas)
        differing += [
            replica * shards + shard
            for replica, value in enumerate(replicas)
            if count < len(replicas) and (value != most or not clear)
        ]
    digest = xxhash.xxh3_64_hexdigest(b"".join(value.to_bytes(8, "big", signed=True) for value in sums[:shards]))
    return Replicas(digest=digest, differing=sorted(differing))
