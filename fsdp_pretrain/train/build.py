"""Builds the parts of a start from its configuration; used by training and by `fsdp_pretrain.bench`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from fsdp_pretrain import models
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.corpus.files import reading
from fsdp_pretrain.data.fetch.process import NodeFetching
from fsdp_pretrain.data.packing.loader import Loader
from fsdp_pretrain.data.packing.opening import open_infilling, open_skips
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.data.packing.unigrams import Unigrams
from fsdp_pretrain.heartbeat import Heartbeat
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel import fsdp, mesh
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.parallel.optimizer import AdamW, LossScaler
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.recorder import NotesOnlyRecorder, Recorder
from fsdp_pretrain.watchdog.hang.rank_client import PageHeartbeat, folder


def build_model_and_optimizer(config: Config, world: World) -> tuple[Decoder, AdamW]:
    """The sharded model, whose parameters have no values yet, and its optimiser."""
    model = fsdp.parallelize(models.build(config.model), config, world)
    return model, AdamW(model, config.optimizer)


def build_loss_scaler(config: Config, world: World, state: list[float] | None = None) -> LossScaler | None:
    """For fp16, continuing from `state`; None for other dtypes."""
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
        config: the run's configuration.
        packer: of its corpora.
        world: all ranks.
        start: position before the first batch.
        unigrams: file of token frequencies to compare batches with; None: no comparison.
        built: called with the position after each batch, as soon as it is built.
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
        unigrams=None if unigrams is None else Unigrams(unigrams),
        built=built,
    )


def build_fetching(config: Config) -> NodeFetching | None:
    """This rank's part of the node's fetcher; None if the run has no cache."""
    if config.data.cache is None:
        return None
    ranks, pages = mesh.RankInfo.from_environment(), folder(config.run.dir)
    if not config.watchdog.enabled:  # agents of other runs remove folders without pages of live ranks
        pages = pages.parent.with_name(f"{pages.parent.name}-fetch") / pages.name
    return NodeFetching(
        config,
        pages,
        rank=ranks.rank,
        world=ranks.world,
        local_rank=ranks.local_rank,
        local_world=ranks.local_world,
        node=ranks.node,
    )


def build_recorder(config: Config, world: World, run: RunDir, segment: Path) -> Recorder:
    """Writes the record on rank 0, and nothing on the others."""
    if not world.is_main:
        return NotesOnlyRecorder(run, segment)
    recorder = Recorder(
        run,
        segment,
        name=config.run.name,
        console_every=config.record.console_every,
        total_steps=config.schedule.steps,
    )
    recorder.status(force=True, state="starting")
    return recorder


def build_heartbeat(config: Config) -> Heartbeat:
    """This rank's part of the watchdog, active even before the rendezvous. Raises ConfigError."""
    ranks = mesh.RankInfo.from_environment()
    if not config.watchdog.enabled:
        return Heartbeat()
    try:
        return PageHeartbeat(
            config,
            rank=ranks.rank,
            local_rank=ranks.local_rank,
            local_ranks=ranks.local_world,
            node=ranks.node,
            nodes=ranks.world // ranks.local_world,
            reading=reading,
        )
    except OSError as error:
        print(f"warning: training without a watchdog on this rank: {error}", file=sys.stderr, flush=True)
        return Heartbeat()
