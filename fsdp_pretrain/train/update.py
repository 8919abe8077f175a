"""The mathematics of a step: passes over micro-batches, sums over the ranks, clipping, the update of the parameters.

No clock, record or request is used here, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.schedule import StepValues
from fsdp_pretrain.data.packing.loader import StepBatch
from fsdp_pretrain.models import Decoder, forward
from fsdp_pretrain.models.loss import IGNORE
from fsdp_pretrain.parallel import fsdp
from fsdp_pretrain.parallel import optimizer as optim
from fsdp_pretrain.parallel.loss_scaler import LossScaler
from fsdp_pretrain.parallel.mesh import World

from .step_metrics import StepCounts, StepSums


@dataclass(frozen=True)
class Gradients:
    """Facts about the gradients of a step: fp32 scalars on the device, the same on every rank."""

    scale: Tensor | None  # factor by which the gradients are too large (for fp16); None is 1
    divisor: Tensor | None  # divisor that clips and unscales them; None is 1
    skip: Tensor  # 1 if a loss or gradient of any rank is not finite, else 0


class Update:
    """Updates the parameters of a model from batches.

    Args:
        model: sharded, with its values.
        scaler: loss scaler, for fp16.
        before_micro_batch: called before each micro-batch with the length of its samples in tokens.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        model: Decoder,
        optimizer: optim.Optimizer,
        scaler: LossScaler | None,
        before_micro_batch: Callable[[int], None] = lambda width: None,
    ) -> None:
        self._config, self._world, self._before_micro_batch = config, world, before_micro_batch
        self._model, self._optimizer, self._scaler = model, optimizer, scaler

    def backward(self, batch: StepBatch, counts: Tensor, values: StepValues) -> StepSums:
        """Forward and backward of a batch's micro-batches, accumulating gradients; returns this rank's sums.

        Args:
            batch: this rank's share.
            counts: packed `StepCounts` of all ranks, on the device.
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
        for index, micro in enumerate(batch.micro):
            self._before_micro_batch(micro.tokens.shape[1])
            fsdp.set_last_micro_batch(self._model, index == len(batch.micro) - 1, self._config.parallel)
            self._micro_step(micro, factor, values.z_loss, sums)
        return sums

    def _micro_step(self, micro: forward.PackedBatch, factor: Tensor, z_loss: float, sums: StepSums) -> None:
        """Forward and backward of one micro-batch; adds its losses to `sums`.

        Args:
            factor: multiplies the loss of a target (or a sample's mean loss, if samples are weighted equally).
            z_loss: weight of the z-loss.
        """
        device = self._world.device
        measured = forward.losses(self._model, micro, self._config.data, device, with_penalties=z_loss > 0)
        losses, targets = measured.losses.sum(1), (measured.labels != IGNORE).sum(1)
        objective = losses if measured.penalties is None else losses + z_loss * measured.penalties.sum(1)
        means = 1 / targets.clamp(min=1)
        (objective * (factor * means if self._config.data.by_sequence else factor)).sum().backward()
        with torch.no_grad():
            sources = micro.sources.to(device, non_blocking=True)
            sums.losses.index_add_(0, sources, losses.double())
            sums.targets.index_add_(0, sources, targets.double())
            sums.sample_losses.add_((losses * means).double().sum())
            if measured.penalties is not None:
                sums.penalties.add_(measured.penalties.double().sum())

    def reduce(self, sums: StepSums, values: StepValues, micro_batches: int) -> Gradients:
        """Sum the ranks' sums, in place, and decide on clipping and skipping. One collective.

        Args:
            sums: from `backward`.
            micro_batches: number of micro-batches of a rank.
        """
        sums.sum_over(self._world, optim.local_norm(self._model))
        loss_scale = None if self._scaler is None else self._scaler.scale
        scale = None if loss_scale is None else loss_scale * micro_batches
        norm, divisor = optim.clip(sums.total_norm(self._world), values.grad_clip, scale)
        skip = sums.not_finite()
        sums.add_update(norm, loss_scale, skip)
        return Gradients(scale, divisor, skip)

    def apply(self, gradients: Gradients, values: StepValues) -> None:
        """Take the optimiser's step, or skip it if something is not finite. Clears the gradients."""
        self._optimizer.step(
            lr=values.lr,
            weight_decay=values.weight_decay,
            betas=values.betas,
            divisor=gradients.divisor,
            skip=gradients.skip,
        )
        if self._scaler is not None:
            self._scaler.advance(gradients.skip)
