"""Forward and backward passes of a step on one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from data.packing.loader import StepBatch
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.schedule import StepValues
from fsdp_pretrain.models import Decoder, forward
from fsdp_pretrain.models.loss import IGNORE
from fsdp_pretrain.parallel import fsdp
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.parallel.optimizer import LossScaler
from fsdp_pretrain.watchdog.heartbeat.page import Phase
from fsdp_pretrain.watchdog.heartbeat.rank_client import Heartbeat

from .step_sums import StepCounts, StepSums


class Passes:
    """Accumulates the gradients of a step's micro-batches.

    Args:
        config: the run's configuration.
        world: all ranks.
        model: sharded.
        scaler: loss scaler, for fp16.
        heartbeat: receives the phases.
        compiled: whether the blocks are.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        model: Decoder,
        scaler: LossScaler | None,
        heartbeat: Heartbeat,
        *,
        compiled: bool,
    ) -> None:
        self._config, self._world, self._model, self._scaler = config, world, model, scaler
        self._heartbeat = heartbeat
        self._widths = set[int]()
        self._compiles_anew = compiled and bool(config.data.stages)

    def run(self, batch: StepBatch, counts: Tensor, values: StepValues) -> StepSums:
        """Forward and backward of a batch's micro-batches, accumulating gradients; returns what this rank measured.

        Args:
            batch: this rank's share.
            counts: packed `StepCounts` of all ranks, on the device.
            values: steered values of the step.
        """
        if self._config.model.uses_dropout:  # random numbers depend on (seed, step, rank) alone: a resume stores none
            seed = (self._config.run.seed * 1_000_003 + batch.position.step) * 65_537 + self._world.rank
            torch.manual_seed(seed % 2**64)
        embedding = self._model.embedding
        embedding.shrink, embedding.shrink_head = values.embedding_shrink, values.shrink_head
        # Mean over the global batch: FSDP averages gradients over ranks, so each rank's sum is scaled by the world
        # size and divided by the number of targets, or of samples with targets, of all ranks.
        divisor = StepCounts.element(counts, "samples" if self._config.data.by_sequence else "targets")
        factor = self._world.size / divisor.float()
        if self._scaler is not None:  # as if each micro-batch were averaged separately, or fp16 would underflow
            factor *= self._scaler.scale * len(batch.micro)
        sums = StepSums.zeros(len(self._config.data.sources), self._world.device)
        reshard = self._config.parallel.reshard_after_forward
        for index, micro in enumerate(batch.micro):
            self._heartbeat.beat(Phase.LOAD if self._compiles_for(micro.tokens.shape[1]) else Phase.COMPUTE)
            fsdp.set_last_micro_batch(self._model, index == len(batch.micro) - 1, reshard=reshard)
            self._micro_step(micro, factor, values.z_loss, sums)
        return sums

    def _compiles_for(self, width: int) -> bool:
        """Whether the first pass over samples of this width is to come and compiles: for minutes, which is no hang."""
        known = width in self._widths
        self._widths.add(width)
        return self._compiles_anew and not known

    def _micro_step(self, micro: forward.PackedBatch, factor: Tensor, weight: float, sums: StepSums) -> None:
        """Forward and backward of one micro-batch; adds what it measures to `sums`.

        Args:
            factor: multiplies the loss of a target (or a sample's mean loss, if samples are weighted equally).
            weight: of the z-loss.
        """
        device = self._world.device
        measured = forward.losses(self._model, micro, self._config.data, device, with_penalties=weight > 0)
        losses, targets = measured.losses.sum(1), (measured.labels != IGNORE).sum(1)
        objective = losses if measured.penalties is None else losses + weight * measured.penalties.sum(1)
        means = 1 / targets.clamp(min=1)
        (objective * (factor * means if self._config.data.by_sequence else factor)).sum().backward()
        with torch.no_grad():
            of = micro.sources.to(device, non_blocking=True)
            sums.losses.index_add_(0, of, losses.double())
            sums.targets.index_add_(0, of, targets.double())
            sums.sample_losses.add_((losses * means).double().sum())
            if measured.penalties is not None:
                sums.penalties.add_(measured.penalties.double().sum())
