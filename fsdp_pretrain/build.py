"""Builds the parts of a start from its configuration; used by training and by `fsdp_pretrain.bench`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from data.loader import Loader
from data.mapping import now_reading
from data.opening import open_infilling, open_skips
from data.packer import Packer
from data.position import Position
from data.unigrams import Unigrams

from . import mesh, models, optim, parallel
from .config import Config
from .mesh import World
from .models import Decoder
from .record.files import RunDir
from .record.recorder import Recorder, Silent
from .watchdog.heart import Heart, Watched


def build_model_and_optimizer(config: Config, world: World) -> tuple[Decoder, torch.optim.Optimizer]:
    """The sharded model with its first values, and its optimiser."""
    model = parallel.parallelize(models.build(config.model), config, world)
    return model, optim.build(model, config.optimizer)


def build_loss_scaler(config: Config, world: World, state: list[float] | None = None) -> optim.LossScaler | None:
    """For fp16, continuing from `state`; None for other dtypes."""
    if parallel.compute_dtype(config, world.device) is not torch.float16:
        return None
    return optim.LossScaler(config.train.loss_scale, world.device, state)


def build_data(
    config: Config, packer: Packer, world: World, start: Position, *, unigrams: Path | None = None
) -> Loader:
    """This rank's batches.

    Args:
        config: the run.
        packer: of its corpora.
        world: all ranks.
        start: the first batch is the one after it.
        unigrams: file of token frequencies that batches are compared with; None: they are not compared.
    """
    return Loader(
        packer,
        config.schedule.batch,
        rank=world.rank,
        world=world.size,
        micro_batch=config.train.micro_batch,
        start=start,
        skips=open_skips(config),
        prefetch=config.data.prefetch,
        with_lengths=config.data.uses_lengths,
        across_documents=config.data.loss_across_documents,
        infilling=open_infilling(config, packer),
        pin=world.device.type == "cuda",
        unigrams=None if unigrams is None else Unigrams(unigrams, config.watchdog.sentinels.learn),
    )


def build_recorder(config: Config, world: World, run: RunDir, segment: Path) -> Recorder:
    """Writes the record on rank 0, and nothing on the others."""
    if not world.is_main:
        return Silent(run, segment)
    recorder = Recorder(
        run,
        segment,
        name=config.run.name,
        console_every=config.record.console_every,
        total_steps=config.schedule.steps,
    )
    recorder.status(force=True, state="starting")
    return recorder


def build_heartbeat(config: Config) -> Heart:
    """This rank's part of the watchdog, which looks from before the ranks meet. Raises ConfigError."""
    ranks = mesh.Ranks.from_environment()
    if not config.watchdog.enabled:
        return Heart()
    try:
        return Watched(
            config,
            rank=ranks.rank,
            local_rank=ranks.local_rank,
            local_ranks=ranks.local_world,
            node=int(os.environ.get("GROUP_RANK", ranks.rank // ranks.local_world)),
            nodes=ranks.world // ranks.local_world,
            reading=now_reading,
        )
    except OSError as error:
        print(f"warning: training without a watchdog on this rank: {error}", file=sys.stderr, flush=True)
        return Heart()
