"""A hash of the training state that does not depend on how it is spread over ranks.

It is the sum over all elements of all tensors of (bits of the element) * (odd weight of its position), modulo 2^64.
Sums can be computed per shard; an odd weight is invertible, so changing any single element changes the hash.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_pretrain.parallel.mesh import World, local_part, local_rows

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = {"cpu": 2**16, "cuda": 2**22}
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio, as a signed integer


class StateDigest:
    """The hash of tensors and their names, for each of the first `replicas`.

    Tensors are plain or sharded over dim 0. A plain one is assumed to be equal on every rank of a replica.
    """

    def __init__(self, world: World, tensors: Mapping[str, Tensor], replicas: int = 1) -> None:
        self._world, self._replicas, self._sum = world, replicas, 0
        for name, tensor in tensors.items():
            self.add(name, tensor)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add this rank's part of a tensor."""
        replica, shard = divmod(self._world.rank, self._world.shards)
        if replica < self._replicas and (isinstance(tensor, DTensor) or shard == 0):
            self._sum += _digest(
                name, local_part(tensor).detach(), local_rows(tensor).start * math.prod(tensor.shape[1:])
            )

    def totals(self) -> list[str]:
        """The hash of all added tensors, for each replica. Collective."""
        sums, shards = self._world.gather(self._sum), self._world.shards
        parts = [sums[replica * shards : (replica + 1) * shards] for replica in range(self._replicas)]
        return [f"{sum(part) % 2**64:016x}" for part in parts]


def _digest(name: str, local: Tensor, offset: int) -> int:
    """The sum over this rank's part of a tensor. `offset`: position of its first element in the whole tensor."""
    salt = xxhash.xxh3_64_intdigest(name.encode()) % 2**63
    bits = local.reshape(-1).contiguous().view(_BITS[local.element_size()])
    products = _products(bits.device)
    weights, total = torch.empty_like(products), bits.new_zeros((), dtype=torch.int64)
    for start in range(0, bits.numel(), len(products)):
        part = bits[start : start + len(products)]
        first = _signed((offset + start + salt) * _MULTIPLIER)
        weight = torch.add(products[: len(part)], first, out=weights[: len(part)])
        total += weight.bitwise_or_(1).mul_(part).sum()
    return int(total)


@functools.cache
def _products(device: torch.device) -> Tensor:
    """Multiples of the multiplier, int64; chunk sizes are chosen to fit caches together with the products."""
    return torch.arange(_CHUNK[device.type], device=device) * _MULTIPLIER


def _signed(number: int) -> int:
    """The signed 64-bit integer congruent modulo 2^64."""
    return (number + 2**63) % 2**64 - 2**63
