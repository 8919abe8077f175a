"""One rank of a larger job on one device: its shards, kernels, copies and host work are real, the other ranks and the
wire are not (torch's `fake` process group, whose collectives copy this rank's own values within the device).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_pretrain.config.sections import ParallelSection
from fsdp_pretrain.parallel.mesh import REPLICATE, SHARD, World, device_of
from fsdp_pretrain.ranks import RankInfo

T = TypeVar("T")
NODE = 8
"""Ranks of a node, where there are as many."""


class FakeWorld(World):
    """A world of which only rank 0 exists: joint decisions are its own."""

    def decide(self, choose: Callable[[], T]) -> T:
        return choose()

    def gather(self, value: T) -> list[T]:
        return [value]


@contextmanager
def connect(parallel: ParallelSection, ranks: int) -> Iterator[FakeWorld]:
    """Rank 0 of `ranks` on nodes of `NODE`, with the configuration's mesh. Raises ConfigError, as `mesh.connect`."""
    info = RankInfo(0, ranks, 0, min(ranks, NODE))
    shards, device = parallel.shard_size(info.world, info.local_world), device_of(info)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh(device.type, (ranks // shards, shards), mesh_dim_names=(REPLICATE, SHARD))
        yield FakeWorld(info, device, mesh, timedelta(seconds=parallel.timeout.value))
    finally:
        dist.destroy_process_group()
