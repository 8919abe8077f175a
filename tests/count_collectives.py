"""Counts the collectives of a training step."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from random_heldout import random_samples
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_pretrain.bench.steps import RandomSteps, build
from fsdp_pretrain.config.config import load
from fsdp_pretrain.parallel.mesh import REPLICATE, SHARD, World
from fsdp_pretrain.ranks import RankInfo


class _Collectives(TorchDispatchMode):
    """Keeps kind, ranks and bytes of every collective; bytes are of the larger side, e.g. of what a gather returns."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if function.namespace == "c10d":
            leaves = pytree.tree_leaves(args)
            groups = [
                dist.ProcessGroup.unbox(leaf)
                for leaf in leaves
                if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
            ]
            sizes = [leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.found.append((function.overloadpacket.__name__, groups[0].size(), max(sizes)))
        return function(*args, **(kwargs or {}))


def collectives(replicas: int, shards: int, path: Path, overrides: list[str]) -> list[tuple[str, int, int]]:
    """(kind, ranks, bytes) of what one training step sends, in a process group of any size that sends nothing. With
    `eval.loss_on`, that step and the one before measure the held-out loss."""
    size = replicas * shards
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=(REPLICATE, SHARD))
        world = World(RankInfo(0, size, 0, shards), torch.device("cpu"), mesh, timedelta(seconds=60))
        config = load(path, overrides)
        heldout = random_samples(config, world, RandomSteps(config, world)) if config.eval.loss_on else []
        trainer = build(config, world, heldout=heldout)
        trainer.step()
        with _Collectives() as counted:
            trainer.step()
        return counted.found
    finally:
        dist.destroy_process_group()
