"""The loss of fixed held-out samples, measured between optimiser steps on the ranks that train.

Every rank holds an equal share of the samples, packed and in memory from the start. Incomplete micro-batches are filled
with samples that do not count, so that all ranks run the same number of forward passes. Sums are fp64 and stay on the
device. Training is unaffected: there are no gradients, no dropout and no random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing.batch import MicroBatch
from fsdp_pretrain.data.packing.heldout import HeldOutSamples
from fsdp_pretrain.data.packing.loader import micro_batch, pinned
from fsdp_pretrain.heartbeat import Heartbeat, Phase
from fsdp_pretrain.models import Decoder, forward
from fsdp_pretrain.models.loss import IGNORE
from fsdp_pretrain.parallel import fsdp
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.run.step_record import LossSum

from .ledger import loss_by_source
from .observer import Observer


class HeldOutLoss(Observer):
    """Measures the loss of this rank's share of the held-out samples.

    Args:
        model: sharded; in training mode before and after a measurement.
        heartbeat: receives a phase before each forward pass.
        micro: this rank's share, in host memory; equally many on every rank. `MicroBatch.sources` index `eval.loss_on`.
    """

    def __init__(
        self, config: Config, world: World, model: Decoder, heartbeat: Heartbeat, micro: Sequence[MicroBatch]
    ) -> None:
        self._config, self._world = config, world
        self._model, self._heartbeat, self._micro = model, heartbeat, micro
        self._sources = [source.name for source in config.eval.loss_on]

    def reconfigured(self, config: Config) -> None:
        self._config = config

    def _due(self, state: TrainState) -> bool:
        """Whether the step that led to `state` completes an interval or is the last."""
        schedule, before = self._config.schedule, state.consumed - state.batch
        last, every = state.consumed >= schedule.end, self._config.heldout_every
        return last or schedule.due(every, step=state.step, before=before, after=state.consumed)

    @torch.no_grad()
    def start(self) -> None:
        """Compile the forward pass before the first step, if blocks are compiled: later it would look like a hang."""
        if fsdp.compiles(self._config, self._world.device):
            self._run(self._micro[:1], Phase.LOAD)

    @torch.no_grad()
    def after_step(self, state: TrainState) -> Tensor | None:
        """Sums of losses and targets over all ranks, fp64 [2, sources] on the device; None if no measurement is due."""
        return self._world.sum_(self._run(self._micro, Phase.COMPUTE)) if self._due(state) else None

    def fields(self, measured: Tensor) -> dict[str, dict[str, LossSum]]:
        """The field `heldout` of a step's record."""
        return {"heldout": loss_by_source(self._sources, *measured.tolist())}

    def _run(self, batches: Sequence[MicroBatch], phase: Phase) -> Tensor:
        device, model = self._world.device, self._model
        sums = torch.zeros(2, len(self._sources), dtype=torch.float64, device=device)
        model.eval()
        for micro in batches:
            self._heartbeat.beat(phase)
            measured = forward.losses(model, micro, self._config.data, device)
            sources = micro.sources.to(device, non_blocking=True)
            sums[0].index_add_(0, sources, measured.losses.double().sum(1))
            sums[1].index_add_(0, sources, (measured.labels != IGNORE).sum(1).double())
        model.train()
        fsdp.reshard(model)
        return sums


def build_heldout_loss(
    config: Config, samples: HeldOutSamples, world: World, model: Decoder, heartbeat: Heartbeat
) -> HeldOutLoss:
    """Pack this rank's share of the samples. Raises DataError."""
    size, indices = config.train.micro_batch, samples.indices
    share = indices[world.rank :: world.size]
    rows = -(-len(indices) // (world.size * size)) * size
    filled = [*share, *indices[:1] * (rows - len(share))]
    micro = [
        _pack(config, samples, filled[start : start + size], counted=len(share) - start)
        for start in range(0, rows, size)
    ]
    if world.device.type == "cuda":
        micro = [pinned(batch) for batch in micro]
    return HeldOutLoss(config, world, model, heartbeat, micro)


def _pack(config: Config, samples: HeldOutSamples, indices: Sequence[int], *, counted: int) -> MicroBatch:
    """A micro-batch in which only the first `counted` samples have targets."""
    micro = micro_batch(
        samples.packer.pack_samples(indices),
        with_lengths=config.data.uses_lengths,
        across_documents=config.data.loss_across_documents,
        objective=samples.objective,
    )
    if counted < len(indices):
        micro.labels = micro.tokens[:, 1:].clone() if micro.labels is None else micro.labels
        micro.labels[max(0, counted) :] = IGNORE
    return micro
