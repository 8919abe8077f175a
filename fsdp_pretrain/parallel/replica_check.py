"""Whether the copies of the parameters are the same on every replica: a sum of bits per rank, compared now and then.

Nothing else would notice a copy that went its own way: gradients are averaged over the replicas, so each of them goes
on learning, and the losses look right (BLOOM's layer norms drifted apart unseen).
"""

from __future__ import annotations

from collections import Counter

import torch
import xxhash
from torch import Tensor, nn

from fsdp_pretrain.record.step_record import Replicas

from .mesh import World, local_part

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(model: nn.Module, world: World) -> Tensor:
    """int64 [ranks], on the device: this rank's checksum of its share of the parameters, at its place; others are 0."""
    total = torch.zeros((), dtype=torch.int64, device=world.device)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            local = local_part(parameter)
            bits = local.detach().reshape(-1).view(_BITS[local.element_size()])
            total += bits.sum(dtype=torch.int64) * (2 * number + 1)  # so that a sum does not hide in another tensor's
    sums = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    sums[world.rank] = total
    return sums


def compare(sums: list[int], shards: int) -> Replicas:
    """Which ranks hold other parameters than their replicas.

    Args:
        sums: checksum of every rank, in rank order; rank = replica * shards + shard.

    Returns:
        `digest` of the parameters (of the first replica), and `differing`: the ranks that are not like most with the
        same share; all with it, if there is no majority.
    """
    differing: list[int] = []
    for shard in range(shards):
        own = sums[shard::shards]
        (most, count), *_ = Counter(own).most_common()
        clear = 2 * count > len(own)
        differing += [
            replica * shards + shard
            for replica, value in enumerate(own)
            if count < len(own) and (value != most or not clear)
        ]
    digest = xxhash.xxh3_64_hexdigest(b"".join(value.to_bytes(8, "big", signed=True) for value in sums[:shards]))
    return Replicas(digest=digest, differing=sorted(differing))
