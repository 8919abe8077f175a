"""Builds model, optimiser, loss scaler and data loader from a configuration: for the job, replays and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from fsdp_pretrain import models
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing.loader import Loader
from fsdp_pretrain.data.packing.opening import open_objective, open_skips
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.data.packing.unigrams import Unigrams
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel import fsdp
from fsdp_pretrain.parallel.loss_scaler import LossScaler
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.parallel.optimizer import Optimizer


def build_model_and_optimizer(config: Config, world: World) -> tuple[Decoder, Optimizer]:
    """The sharded model, whose parameters have no values yet, and its optimiser."""
    model = fsdp.parallelize(models.build(config.model), config, world)
    return model, Optimizer(model, config.optimizer, world)


def build_loss_scaler(config: Config, world: World, state: list[float] | None = None) -> LossScaler | None:
    """The loss scaler of fp16, which continues from `state` (of `LossScaler.state`); None for other dtypes."""
    if fsdp.compute_dtype(config, world.device) is not torch.float16:
        return None
    return LossScaler(config.train.loss_scale, world.device, state)


def build_data(
    config: Config,
    packer: Packer,
    world: World,
    start: Position,
    *,
    unigrams: Path | None = None,
    built: Callable[[Position], None] = lambda _: None,
) -> Loader:
    """This rank's data loader.

    Args:
        start: position before the first batch.
        unigrams: file of token frequencies to compare batches with; None: no comparison.
        built: called with the position after each batch, as soon as the batch is built.
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
        objective=open_objective(config, packer),
        pin=world.device.type == "cuda",
        unigrams=None if unigrams is None else Unigrams(unigrams),
        built=built,
    )
