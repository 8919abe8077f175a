"""Steps of the real trainer on given micro-batches, on ranks forked from this process; the results as files.

    python exact_steps.py CONFIG.toml OUT CASE...

One rank that accumulates, and 2 x 2 ranks. Writes `OUT/CASE-WORLD.pt` for every case and world size: the step records,
and the full parameters after every step.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from data.packing.loader import IGNORE, MicroBatch, StepBatch
from data.packing.position import Position
from fsdp_pretrain import models
from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.config.data_section import GLMObjective
from fsdp_pretrain.config.schedule import share_of
from fsdp_pretrain.health.monitor import Health
from fsdp_pretrain.parallel import fsdp, mesh
from fsdp_pretrain.parallel import optimizer as optim
from fsdp_pretrain.record.recorder import MemoryRecorder
from fsdp_pretrain.record.requests import Inbox
from fsdp_pretrain.train.checkpointing import Checkpointing
from fsdp_pretrain.train.run_context import RunContext
from fsdp_pretrain.train.trainer import Trainer

BATCH, LENGTH, STEPS = 8, 16, 4
MESHES = {1: ["parallel.shard=1", "train.micro_batch=4"], 4: ["parallel.shard=2", "train.micro_batch=1"]}
CASES: dict[str, list[str]] = {
    "sequence": [],
    "z": ["train.z_loss=0.01"],
    "shrink-both": ["optimizer.embedding_shrink=0.25", "model.tied_head=true"],
    "shrink-input": [
        "optimizer.embedding_shrink=0.25",
        "timeline=[{at='0 steps',optimizer={embedding_shrink={to=1.0,over='4 steps'}}}]",
        "optimizer.shrink_paths='input'",
        "model.tied_head=true",
    ],
}


def configure(path: str, case: str, world: int) -> Config:
    """The configuration of a case."""
    config = load(path, [*CASES[case], *MESHES[world]])
    if case == "sequence":
        data = config.data.model_copy(update={"objective": GLMObjective(kind="glm", row=LENGTH)})
        config = config.model_copy(update={"data": data})
    return config


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 tokens [8, 17] and labels [8, 16], 0 to 16 targets per sample."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(511, (BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(BATCH):
        labels[row, (row + step) % BATCH * 2 :] = IGNORE
    return tokens, labels


class Given:
    """The data stream of a rank."""

    def __init__(self, rank: int, world: int, micro: int) -> None:
        self.rank, self.world, self.micro, self.step = rank, world, micro, 0

    def __next__(self) -> StepBatch:
        self.step += 1
        tokens, labels = global_batch(self.step)
        own = share_of(0, BATCH, self.rank, self.world)
        batch = StepBatch([], Position(self.step, self.step * BATCH, self.step * BATCH, BATCH))
        for start in range(own.start, own.stop, self.micro):
            part = slice(start, start + self.micro)
            sources = torch.zeros(self.micro, dtype=torch.int64)
            batch.micro.append(MicroBatch(tokens[part], labels[part], None, sources))
        batch.targets = int((labels[own.start : own.stop] != IGNORE).sum())
        return batch

    def blank(self, before: Position) -> Any:
        raise AssertionError(before)


def run(config: Config, world: mesh.World, out: Path, case: str) -> None:
    """Train the case's steps."""
    model = fsdp.parallelize(models.build(config.model), config, world)
    fsdp.initialise_all(model, config.run.seed)
    model.train()
    optimizer, records = optim.AdamW(model, config.optimizer), MemoryRecorder()
    trainer = Trainer(
        RunContext(config, world, records, Inbox(None)),
        model=model,
        optimizer=optimizer,
        scaler=None,
        data=Given(world.rank, world.size, config.train.micro_batch),
        saves=Checkpointing(config, world, None, lambda saved: None, records, 0),
        state=TrainState(),
        health=Health(config),
    )
    history = []
    for _ in range(STEPS):
        trainer.step()
        trainer.collect(keep=0)
        history.append({name: p.full_tensor().detach().clone() for name, p in model.named_parameters()})
    lines = [json.loads(record.to_line()) for record in records.records]
    if world.is_main:
        torch.save({"records": lines, "history": history}, out / f"{case}-{world.size}.pt")


def start(path: str, size: int, out: Path, cases: tuple[str, ...]) -> int:
    """Fork the ranks of a world; the worst exit code."""
    children = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
            try:
                with mesh.connect(load(path, MESHES[size]).parallel) as world:
                    for case in cases:
                        run(configure(path, case, size), world, out, case)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        children.append(pid)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in children)


def main(path: str, out: str, *cases: str) -> int:
    """Run every case on every mesh; the worst exit code."""
    return max(start(path, size, Path(out), cases) for size in MESHES)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
