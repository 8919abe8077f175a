"""Fifty steps of Muon on a mesh, with given gradients: every rank is a fork of this process.

    python tests/muon_ranks.py REPLICAS SHARDS CONFIG OUT

OUT gets the whole parameters after the steps. In some steps a gradient of one rank is NaN: they are skipped, and no bit
of parameters and states may change.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_pretrain.config.config import load
from fsdp_pretrain.parallel import fsdp, mesh
from fsdp_pretrain.parallel.mesh import local_part, local_rows
from fsdp_pretrain.train.build import build_model_and_optimizer

STEPS, SKIPPED, LR = 50, {10, 33}, 1e-2


def divisor(step: int) -> float:
    """What the gradients of a step are divided by. Not a constant, which Muon's updates would not show."""
    return 1.0 + step % 3


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """The gradient of a whole parameter: fp32, of low rank and full rank in turn."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1009 + step)
    return torch.randn(shape, generator=generator)


def main(path: Path, out: Path) -> None:
    config = load(path, ["optimizer.kind=muon", "parallel.shard=" + os.environ["SHARDS"]])
    with mesh.connect(config.parallel) as world:
        model, optimizer = build_model_and_optimizer(config, world)
        fsdp.initialise_all(model, config.run.seed)
        parameters, states = dict(model.named_parameters()), optimizer.state_by_name()
        for step in range(STEPS):
            for name, parameter in parameters.items():
                rows = local_rows(parameter)
                part = gradient(name, tuple(parameter.shape), step)[rows.start : rows.stop].contiguous()
                if step in SKIPPED and world.rank == world.size - 1 and part.numel():
                    part.view(-1)[0] = torch.nan
                assert isinstance(parameter, DTensor)
                whole = {"shape": parameter.shape, "stride": parameter.stride()}
                parameter.grad = DTensor.from_local(part, world.mesh, parameter.placements, run_check=False, **whole)
            values = [*parameters.values(), *(tensor for state in states.values() for tensor in state.values())]
            before = [local_part(tensor).detach().clone() for tensor in values]
            skip = torch.tensor(1.0 if step in SKIPPED else 0.0)
            optimizer.step(lr=LR, divisor=torch.tensor(divisor(step)), skip=skip)
            same = [torch.equal(a, local_part(b)) for a, b in zip(before, values, strict=True)]
            assert (
                all(same)
                if step in SKIPPED
                else not any(
                    same[: len(parameters)][at] for at, part in enumerate(before[: len(parameters)]) if part.numel()
                )
            ), step
        gathered = {
            name: parameter.full_tensor().detach()  # type: ignore[attr-defined]
            for name, parameter in parameters.items()
        }
        replicas = world.gather({name: local_part(tensor).detach() for name, tensor in parameters.items()})
        for rank, theirs in enumerate(replicas):
            twin = replicas[rank % world.shards]
            assert all(torch.equal(theirs[name], twin[name]) for name in theirs), rank
        if world.is_main:
            torch.save(gathered, out)


if __name__ == "__main__":
    replicas, shards = map(int, sys.argv[1:3])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]), SHARDS=str(shards))
    os.environ.update(WORLD_SIZE=str(replicas * shards), LOCAL_WORLD_SIZE=str(shards))
    torch.set_num_threads(1)
    children = []
    for rank in range(replicas * shards):
        if not (child := os.fork()):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % shards))
            main(Path(sys.argv[3]), Path(sys.argv[4]))
            sys.exit(0)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(codes))
