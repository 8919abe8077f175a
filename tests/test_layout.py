"""Which rank writes and which reads what of a checkpoint: closed forms, plain DCP as the reference, each byte once."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import ROOT, python
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex

from fsdp_pretrain import models
from fsdp_pretrain.checkpoint import dcp as writing
from fsdp_pretrain.checkpoint import layout
from fsdp_pretrain.checkpoint.layout import FILE_BYTES, TensorSpec, file_name, lay_out, places
from fsdp_pretrain.checkpoint.loading import Weights, other_rank
from fsdp_pretrain.checkpoint.manager import make_facts
from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.checkpoint.tensors import METADATA, read_tensors
from fsdp_pretrain.config.config import load
from fsdp_pretrain.parallel.mesh import SingleProcess

SHAPES = [(512, 32), (257, 8), (3, 5), (1,), (0, 7), (64, 2, 3)]
READS = """
import os, sys
def note(event, arguments):
    if event == "open" and not isinstance(arguments[0], int) and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
        path = os.fsdecode(arguments[0])
        if "/checkpoints/step-00000004/" in path:
            with open({log!r}, "a") as file:
                file.write(os.environ["RANK"] + " " + path + chr(10))
sys.addaudithook(note)
"""


def specs() -> tuple[TensorSpec, ...]:
    sharded = (TensorSpec(("model", f"w{n}"), shape, torch.float32, True) for n, shape in enumerate(SHAPES))
    steps = (TensorSpec(("optim", f"w{n}", "step"), (), torch.float32, False) for n in range(len(SHAPES)))
    return (*sharded, *steps)


@pytest.mark.quick
@pytest.mark.parametrize(("replicas", "shards"), [(1, 1), (1, 4), (2, 2), (3, 5), (128, 8)])
def test_every_element_is_written_once_and_evenly(replicas: int, shards: int) -> None:
    layout = lay_out(specs(), replicas, shards)
    written = {spec.name: np.zeros(spec.shape, dtype=int) for spec in layout.tensors}
    loads = []
    for rank, pieces in enumerate(layout.pieces):
        for piece in pieces:
            rows = math.ceil(piece.tensor.shape[0] / shards) if piece.tensor.sharded else 0
            assert not piece.tensor.sharded or piece.first == rows * (rank % shards)  # FSDP's own shard of the rank
            block = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.shape, strict=True))
            written[piece.tensor.name][block] += 1
        loads.append(sum(piece.size for piece in pieces if piece.tensor.sharded))
    assert all((count == 1).all() for count in written.values())
    largest = max((piece.size for pieces in layout.pieces for piece in pieces), default=0)
    for shard in range(shards):
        assert max(loads[shard::shards]) - min(loads[shard::shards]) <= largest
    assert sum(loads) <= layout.size


@pytest.mark.quick
def test_large_files_are_split_and_the_layout_is_kept() -> None:
    lengths = [FILE_BYTES // 2, FILE_BYTES // 2, 7, FILE_BYTES + 1, 5]
    assert list(places(lengths)) == [
        (0, 0, lengths[0]), (0, lengths[0], lengths[1]), (1, 0, 7), (1, 7, lengths[3]), (2, 0, 5)
    ]  # fmt: skip
    layout = lay_out(specs(), 2, 2)
    assert lay_out(specs(), 2, 2) is layout


@pytest.mark.quick
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 8), (2, 1), (2, 4), (3, 2), (16, 8)])
def test_a_file_is_read_back_on_another_node(nodes: int, per_node: int) -> None:
    ranks, names = nodes * per_node, [file_name(rank, number) for rank in range(nodes * per_node) for number in (0, 1)]
    readers = {name: other_rank(name, ranks, per_node) for name in [*names, METADATA]}
    for rank in range(ranks):
        mine = [readers[file_name(rank, number)] // per_node for number in (0, 1)]
        assert nodes == 1 or rank // per_node not in mine
        assert nodes < 3 or mine[0] != mine[1]
    assert nodes == 1 or readers[METADATA] >= per_node
    assert set(Counter(readers[name] for name in names).values()) == {2}  # evenly


@pytest.fixture(scope="module")
def trained(module_lab: Any) -> Path:
    """8 steps on 2 x 2 ranks, saved at 4 and 8; the configuration."""
    config: Path = module_lab.config(
        "trained",
        train={"duration": "8 steps", "micro_batch": 2},
        checkpoint={"every": "4 steps"},
        parallel={"shard": 2},
    )
    module_lab.train(config, ranks=4)
    return config


@pytest.mark.shows("C2")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.promise("plain-dcp")
def test_plain_dcp_reads_it(trained: Path, tmp_path: Path) -> None:
    config = load(trained)
    checkpoint = Store(config.run.dir / "checkpoints").find(8)
    ours, metadata = read_tensors(checkpoint.path), FileSystemReader(checkpoint.path).read_metadata()
    tensors: Any = metadata.state_dict_metadata
    assert ours.keys() == tensors.keys() == metadata.planner_data.keys()
    for name, tensor in ours.items():
        wanted = tensors[name]
        assert (tensor.shape, f"torch.{tensor.dtype}") == (wanted.size, str(wanted.properties.dtype))
        assert [tensor.shape_of(chunk) for chunk in tensor.chunks] == [chunk.sizes for chunk in wanted.chunks]
        for chunk, block in zip(tensor.chunks, wanted.chunks, strict=True):
            assert block.offsets == torch.Size((chunk.first, *(0 for _ in tensor.shape[1:])) if tensor.shape else ())
            place = metadata.storage_data[MetadataIndex(name, block.offsets)]
            assert (chunk.file, chunk.start, chunk.length) == (place.relative_path, place.offset, place.length)
    state = {name: torch.empty(stored.size, dtype=stored.properties.dtype) for name, stored in tensors.items()}
    dcp.load(state, checkpoint_id=checkpoint.path, no_dist=True)
    weights = Weights(checkpoint, models.build(config.model))
    assert all(torch.equal(state[f"model.{name}"], weights[name]) for name in weights.shapes)
    part = torch.empty(300, state["model.embedding.weight"].shape[1])
    weights.read_rows("embedding.weight", range(100, 400), part)
    assert torch.equal(state["model.embedding.weight"][100:400], part)
    dcp_to_torch_save(checkpoint.path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole["optim"]["norm.weight"]["step"] == 8 and whole["model"].keys() == weights.shapes.keys()


def test_files_that_are_full_with_their_last_piece(trained: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The last one too: here each piece fills one."""
    for module in (writing, layout):
        monkeypatch.setattr(module, "FILE_BYTES", 1)
    config, world = load(trained), SingleProcess()
    model, facts = models.build(config.model), make_facts(config, world, TrainState())
    weights = {"model": {name: torch.randn(value.shape) for name, value in model.state_dict().items()}}
    saved = writing.save(world, Store(tmp_path), facts, state=weights, train_state="{}", config="")
    files = [path for path in saved.checkpoint.path.iterdir() if path.suffix == ".distcp"]
    assert len(files) == len(weights["model"]) == len(read_tensors(saved.checkpoint.path))
    read = Weights(saved.checkpoint, model)
    assert all(torch.equal(read[name], tensor) for name, tensor in weights["model"].items())


@pytest.mark.parametrize(("ranks", "shard"), [(4, 1), (2, 2), (1, 1)])
def test_a_resume_reads_each_file_once_in_all(
    module_lab: Any, trained: Path, tmp_path: Path, helpers: Any, monkeypatch: Any, ranks: int, shard: int
) -> None:
    """On any mesh. That the digest of the state is the saved one is a condition of the start."""
    run = tmp_path / "run"
    shutil.copytree(load(trained).run.dir, run)
    shutil.rmtree(run / "checkpoints/step-00000008")
    (tmp_path / "first.py").write_text(READS.format(log=str(tmp_path / "reads")))
    monkeypatch.setenv("EXECUTE_FIRST", str(tmp_path / "first.py"))
    module_lab.train(trained, f"run.dir={run}", f"parallel.shard={shard}", ranks=ranks)
    (resumed,) = helpers.journal(run, "resume")
    assert resumed["step"] == 4
    opened = [Path(line.split(" ", 1)[1]) for line in (tmp_path / "reads").read_text().splitlines()]
    reads = Counter(path.name for path in opened if path.suffix == ".distcp")
    assert reads == {f"__{rank}_0.distcp": 1 for rank in range(4)}
    readers = {line.split()[0] for line in (tmp_path / "reads").read_text().splitlines() if ".distcp" in line}
    assert len(readers) == ranks  # evenly spread


def test_hundreds_of_ranks_write_and_read_a_7b_checkpoint_once_and_evenly() -> None:
    replicas, shards = 16, 8
    script, config = ROOT / "tests/simulate_ranks.py", ROOT / "configs/models/llama-7b.toml"
    found = json.loads(python(script, config, replicas, shards).stdout)
    ranks, size = replicas * shards, found["checkpoint_bytes"]
    assert found["ranks"] == ranks and 12 * 6.7e9 < size < 12 * 6.8e9  # fp32 parameters and two moments
    assert found["read_in_all"] == size
    for least, most in (found["written_by_a_rank"], found["read_by_a_rank"]):
        assert most < 1.5 * size / ranks + 45e6 * 4  # the largest piece is a shard of a matrix of 4096 x 11008
        assert least > 0
