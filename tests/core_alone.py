"""Trains with the core alone, as rank 0 of 1: no job, no service. Prints its loss sums and which services it imported.

python tests/core_alone.py CONFIG.toml
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fsdp_pretrain.checkpoint.manager import CheckpointManager, TrainingObjects
from fsdp_pretrain.checkpoint.state import TrainState, identity
from fsdp_pretrain.checkpoint.witness import code_identity
from fsdp_pretrain.config.config import load
from fsdp_pretrain.data.packing.opening import open_packer
from fsdp_pretrain.errors import Exit
from fsdp_pretrain.heartbeat import Heartbeat
from fsdp_pretrain.parallel import fsdp, mesh
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.recorder import SilentRecorder
from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.train.build import build_data, build_loss_scaler, build_model_and_optimizer
from fsdp_pretrain.train.checkpointing import Checkpointing
from fsdp_pretrain.train.loop import Loop
from fsdp_pretrain.train.observer import Observer, Verdict
from fsdp_pretrain.train.trainer import Trainer

SERVICES = ("job", "health", "launch", "watchdog", "mirror", "lineage", "eval", "views", "data.fetch", "plan", "hf")


class Losses(Observer):
    """What a user's observer may be: it keeps the loss of every step."""

    def __init__(self) -> None:
        self.sums = list[tuple[float, float | None]]()

    def recorded(self, record: StepRecord, verdict: Verdict) -> None:
        self.sums.append((record.loss.sum, record.grad_norm))


def main(path: Path) -> None:
    """Train to the end of the schedule, with checkpoints."""
    config, losses = load(path), Losses()
    with mesh.connect(config.parallel) as world:
        packer = open_packer(config)
        model, optimizer = build_model_and_optimizer(config, world)
        fsdp.initialise_all(model, config.run.seed)
        run, state, recorder = RunDir(config.run.dir), TrainState(), SilentRecorder()
        subject = TrainingObjects(world, run, model, optimizer, config, identity(config, packer, code_identity(config)))
        manager = CheckpointManager(subject, segment=1)
        saves = Checkpointing(config, world, manager, recorder, Heartbeat(), state.step)
        trainer = Trainer(
            config,
            world,
            model=model,
            optimizer=optimizer,
            scaler=build_loss_scaler(config, world),
            data=build_data(config, packer, world, state),
            state=state,
            recorder=recorder,
            heartbeat=Heartbeat(),
            observers=[saves, losses],
        )
        loop = Loop(trainer, saves, lambda before: build_data(config, open_packer(config), world, before).build(before))
        assert loop.run() is Exit.COMPLETE
    packages = tuple(f"fsdp_pretrain.{name}" for name in SERVICES)
    print(json.dumps({"losses": losses.sums, "services": [name for name in sys.modules if name.startswith(packages)]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
