"""What saves and resumes of many ranks cost before a byte moves; prints it as JSON. Times are one process's.

    python tests/simulate_ranks.py CONFIG REPLICAS SHARDS [--dcp]

With `--dcp` also what DCP does for the same state: rank 0 plans every save for all ranks, and every replica reads the
whole checkpoint. The process group has all ranks and sends nothing; tensors have no memory.
"""

from __future__ import annotations

import argparse
import json
import pickle
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
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_pretrain import models
from fsdp_pretrain.checkpoint.delivery import Delivery
from fsdp_pretrain.checkpoint.layout import SaveLayout, TensorRows, TensorSpec, file_name, lay_out, places
from fsdp_pretrain.checkpoint.manifest import FileEntry
from fsdp_pretrain.checkpoint.metadata import METADATA, read_metadata
from fsdp_pretrain.config.model import Model
from fsdp_pretrain.parallel.mesh import REPLICATE, SHARD, RankInfo, World, shard_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("replicas", type=int)
    parser.add_argument("shards", type=int)
    parser.add_argument("--dcp", action="store_true")
    args = parser.parse_args()
    specs = tuple(specs_of(args.config))
    seconds: dict[str, float] = {}
    layout: SaveLayout = timed(seconds, "layout", lambda: lay_out(specs, args.replicas, args.shards))
    lengths = [[piece.size + 1500 for piece in pieces] for pieces in layout.pieces]
    metadata = timed(seconds, "metadata", lambda: layout.metadata(lengths))
    timed(seconds, "metadata again", lambda: layout.metadata(lengths))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / METADATA).write_bytes(metadata)
        stored = timed(seconds, "read metadata", lambda: read_metadata(Path(folder)))
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
        "metadata_bytes": len(metadata),
        "written_by_a_rank": [min(written), max(written)],
        "read_by_a_rank": [min(read), max(read)],
        "read_in_all": sum(read),
        "seconds": seconds,
    }
    if args.dcp:
        timed(seconds, "DCP plans a save", lambda: dcp_plans(layout, args.replicas, args.shards))
        result["dcp_reads_in_all"] = sum(written) * args.replicas
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


def dcp_plans(layout: SaveLayout, replicas: int, shards: int) -> None:
    """What rank 0 does in a save with DCP's default planner: take every rank's plan, remove duplicates, number all."""
    plans = []
    for shard in range(shards):
        items = [item for spec in layout.tensors for item in write_items(spec, shard, shards)]
        plans += [pickle.dumps(SavePlan(items))] * replicas
    everywhere = [pickle.loads(plan) for plan in plans]
    create_default_global_save_plan(dedup_save_plans(everywhere))


def write_items(spec: TensorSpec, shard: int, shards: int) -> Iterator[WriteItem]:
    rows = shard_rows(spec.shape[0], shards, shard) if spec.sharded else range(spec.shape[0] if spec.shape else 1)
    if not rows:
        return
    piece = TensorRows(spec, rows.start, (len(rows), *spec.shape[1:]) if spec.shape else ())
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)),
        TensorProperties(dtype=spec.dtype),
        torch.Size(spec.shape),
    )
    kind = WriteItemType.SHARD if spec.sharded else WriteItemType.TENSOR
    offset = torch.Size(piece.offsets) if spec.sharded else None
    yield WriteItem(MetadataIndex(spec.name, offset), kind, tensor_data=data)


if __name__ == "__main__":
    main()
