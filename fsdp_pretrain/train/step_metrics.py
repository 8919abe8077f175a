"""Metrics of a step that are summed over the ranks: counts before the gradients, losses after them.

One collective each: a class packs its fields into one tensor, in the order of their declaration.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from fsdp_pretrain.data.packing.loader import StepBatch
from fsdp_pretrain.models import forward as packed
from fsdp_pretrain.parallel.mesh import World


@dataclass(frozen=True)
class StepCounts:
    """Counts and requests that the host knows before a step, of one rank or summed over all."""

    targets: int  # tokens to predict
    samples: int  # samples with at least one target
    documents: int  # this and the next three: see `fsdp_pretrain.data.packing.loader.StepBatch`
    separators: int
    adjacent_specials: int
    digest: int
    quarantined: int  # documents excluded from the loss
    stop: int = 0  # this and the next four: ranks with such a request, see `Observer.requests`
    save: int = 0
    profile: int = 0
    steer: int = 0
    repeat: int = 0
    without_data: int = 0  # ranks that could not read their batch
    saved: int = 0  # this and the next: see `Checkpointing.signals`
    overdue: int = 0
    millijoules: int = 0  # this and the next: energy of the devices since the step before, and of how many it is known
    metered: int = 0
    # checksum of every rank's parameters, see `replica_check.checksums`; empty in most steps
    checksums: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, batch: StepBatch) -> StepCounts:
        """The counts of a rank's share of a batch."""
        return cls(
            targets=batch.targets,
            samples=sum(packed.learning_samples(micro) for micro in batch.micro),
            documents=batch.documents,
            separators=batch.separators,
            adjacent_specials=batch.adjacent_specials,
            digest=batch.digest,
            quarantined=len(batch.quarantined),
        )

    def sum_over(self, world: World, checksums: Tensor | None = None) -> Tensor:
        """The counts of all ranks, packed: int64 on the device, without waiting for it. One collective.

        `checksums`: int64 [ranks] from `replica_check.checksums`, summed in the same collective.
        """
        counts = torch.tensor([getattr(self, name) for name in _COUNTS], dtype=torch.int64)
        if world.device.type == "cuda":
            counts = counts.pin_memory().to(world.device, non_blocking=True)
        return world.sum_(counts if checksums is None else torch.cat((counts, checksums)))

    @staticmethod
    def element(summed: Tensor, name: str) -> Tensor:
        """One of the packed counts, int64 0-dim, on their device."""
        return summed[_COUNTS.index(name)]

    @classmethod
    def read(cls, summed: Tensor) -> StepCounts:
        """Unpack counts that are in host memory."""
        values = summed.tolist()
        return cls(**dict(zip(_COUNTS, values, strict=False)), checksums=values[len(_COUNTS) :])


_COUNTS = [count.name for count in fields(StepCounts) if count.name != "checksums"]


@dataclass(frozen=True)
class StepSums:
    """Losses and norms of a step, of one rank or summed over all: views of one fp64 tensor.

    The first two fields have one value per source; all others are 0-dim. Those of the update (norm, loss_scale,
    skipped) are the same on every rank and are not summed.
    """

    losses: Tensor  # this and the next: [sources]
    targets: Tensor
    sample_losses: Tensor  # sum of the mean losses of samples
    penalties: Tensor  # sum of the squared log-normalisers
    bad_losses: Tensor  # number of ranks with a non-finite sum
    bad_ranks: Tensor  # sum of the indices of these ranks
    bad_norms: Tensor  # number of ranks with a non-finite gradient norm
    squared_norms: Tensor  # squared norms of the ranks' parts of the gradients
    norm: Tensor  # this and the next two: see `add_update`
    loss_scale: Tensor
    skipped: Tensor
    packed: Tensor  # the one tensor that holds all fields

    @classmethod
    def zeros(cls, sources: int, device: torch.device) -> StepSums:
        return cls.of(torch.zeros(len(_BY_SOURCE) * sources + _SCALARS, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, packed: Tensor) -> StepSums:
        """The packed sums by name, as views."""
        by_source, scalars = packed[:-_SCALARS], packed[-_SCALARS:]
        views = (*by_source.view(len(_BY_SOURCE), -1), *scalars)
        return cls(**dict(zip(_SUMS, views, strict=True)), packed=packed)

    def sum_over(self, world: World, norm: Tensor) -> None:
        """Sum over the ranks, in place, and count non-finite ranks; without waiting. One collective.

        `norm`: norm of this rank's parts of the gradients, fp32 0-dim.
        """
        self.bad_losses.copy_(~self.packed.isfinite().all())
        self.bad_ranks.copy_(self.bad_losses * world.rank)
        self.bad_norms.copy_(~norm.isfinite())
        self.squared_norms.copy_(norm.double().square())
        world.sum_(self.packed[: -len(_OF_UPDATE)])

    def total_norm(self, world: World) -> Tensor:
        """Norm of all gradients, fp64 0-dim, the same on every rank. Call after `sum_over`."""
        return (self.squared_norms / world.replicas).sqrt()  # every replica holds all gradients

    def not_finite(self) -> Tensor:
        """fp32 0-dim, 1 if any value of any rank is non-finite, else 0; equal on all ranks. Call after `sum_over`."""
        return (self.bad_losses + self.bad_norms > 0).float()

    def add_update(self, norm: Tensor, loss_scale: Tensor | None, skipped: Tensor) -> None:
        """Add what the optimiser did.

        Args:
            norm: norm of all gradients, unclipped and unscaled, fp32 0-dim.
            loss_scale: fp32 0-dim; None is 1.
            skipped: fp32 0-dim, 1 if the step was skipped, else 0.
        """
        self.norm.copy_(norm)
        self.loss_scale.fill_(1.0) if loss_scale is None else self.loss_scale.copy_(loss_scale)
        self.skipped.copy_(skipped)


_SUMS = [part.name for part in fields(StepSums) if part.name != "packed"]
_BY_SOURCE, _OF_UPDATE = ("losses", "targets"), ("norm", "loss_scale", "skipped")
_SCALARS = len(_SUMS) - len(_BY_SOURCE)
