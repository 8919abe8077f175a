"""What saves and resumes of many ranks cost before a byte moves; prints it as JSON. Times are one process's.

    python tests/simulate_ranks.py CONFIG REPLICAS SHARDS

The process group has all ranks and sends nothing; tensors have no memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_pretrain import models
from fsdp_pretrain.checkpoint.delivery import Delivery
from fsdp_pretrain.checkpoint.layout import SaveLayout, TensorSpec, file_name, lay_out, places
from fsdp_pretrain.checkpoint.manifest import FileEntry
from fsdp_pretrain.checkpoint.tensors import TENSORS, read_tensors
from fsdp_pretrain.config.model import Model
from fsdp_pretrain.parallel.mesh import REPLICATE, SHARD, World, shard_rows
from fsdp_pretrain.ranks import RankInfo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("replicas", type=int)
    parser.add_argument("shards", type=int)
    args = parser.parse_args()
    specs = tuple(specs_of(args.config))
    seconds: dict[str, float] = {}
    layout: SaveLayout = timed(seconds, "layout", lambda: lay_out(specs, args.replicas, args.shards))
    lengths = [[piece.size + 1500 for piece in pieces] for pieces in layout.pieces]
    descriptions = timed(seconds, "descriptions", lambda: layout.descriptions(lengths))
    timed(seconds, "descriptions again", lambda: layout.descriptions(lengths))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / TENSORS).write_text(descriptions[TENSORS])
        stored = timed(seconds, "read tensors.json", lambda: read_tensors(Path(folder)))
    written = [sum(each) for each in lengths]
    world = world_of(args.replicas, args.shards)
    state = {spec.name: empty(spec, world) for spec in specs}
    entries = [
        FileEntry(name=file_name(rank, number), bytes=size, xxh3="")
        for rank, each in enumerate(lengths)
        for number, size in files(each)
    ]
    delivery = timed(seconds, "who reads what", lambda: Delivery(world, Path(), entries, stored, state))
    size = {entry.name: entry.bytes for entry in entries}
    read = [sum(size[name] for name in names) for names in delivery._readers]
    result = {
        "ranks": world.size,
        "checkpoint_bytes": sum(written),
        "bytes_of_descriptions": {name: len(content) for name, content in descriptions.items()},
        "written_by_a_rank": [min(written), max(written)],
        "read_by_a_rank": [min(read), max(read)],
        "read_in_all": sum(read),
        "seconds": seconds,
    }
    json.dump(result, sys.stdout)


def timed(seconds: dict[str, float], name: str, act: Callable[[], Any]) -> Any:
    begun = time.perf_counter()
    found = act()
    seconds[name] = time.perf_counter() - begun
    return found


def specs_of(config: Path) -> Iterator[TensorSpec]:
    """Of model and optimiser, as a run saves them; `config` needs only its section [model]."""
    model = TypeAdapter(Model).validate_python(tomllib.loads(config.read_text())["model"])
    for name, parameter in models.build(model).named_parameters():
        shape = tuple(parameter.shape)
        yield TensorSpec(("model", name), shape, torch.float32, True)
        for moment in ("exp_avg", "exp_avg_sq"):
            yield TensorSpec(("optim", name, moment), shape, torch.float32, True)
        yield TensorSpec(("optim", name, "step"), (), torch.float32, False)


def world_of(replicas: int, shards: int) -> World:
    size = replicas * shards
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=(REPLICATE, SHARD))
    return World(RankInfo(0, size, 0, shards), torch.device("cpu"), mesh, timedelta(seconds=60))


def empty(spec: TensorSpec, world: World) -> torch.Tensor:
    """This rank's part of a tensor, without memory."""
    if not spec.sharded:
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    rows = shard_rows(spec.shape[0], world.shards, 0)
    local = torch.empty((len(rows), *spec.shape[1:]), dtype=spec.dtype, device="meta")
    stride = torch.empty(spec.shape, device="meta").stride()
    where = (Replicate(), Shard(0))
    return DTensor.from_local(local, world.mesh, where, run_check=False, shape=torch.Size(spec.shape), stride=stride)


def files(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """(number, bytes) of a rank's files."""
    sizes: dict[int, int] = {}
    for number, _, length in places(lengths):
        sizes[number] = sizes.get(number, 0) + length
    yield from sizes.items()


if __name__ == "__main__":
    main()
