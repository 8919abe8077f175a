"""What a step adds up over the ranks, by name: counts before its gradients, losses after them, one collective each.

Each type alone knows how its fields lie in its tensor: in the order in which they are declared.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from data.packing.loader import StepBatch
from fsdp_pretrain.models import forward as packed
from fsdp_pretrain.parallel.mesh import World


@dataclass(frozen=True)
class StepCounts:
    """Whole numbers that the host knows before a step: of one rank, or of all once they were summed.

    Attributes:
        targets: tokens to predict.
        samples: samples with at least one.
        documents, separators, adjacent_specials, digest: see `data.packing.loader.StepBatch`.
        quarantined: documents taken out of the loss.
        stop, save: ranks that were asked to.
        without_data: ranks that could not read their batch.
        saved, overdue: see `Saves.signals`.
        checksums: of every rank's parameters, see `replicas.checksums`; empty in most steps.
    """

    targets: int
    samples: int
    documents: int
    separators: int
    adjacent_specials: int
    digest: int
    quarantined: int
    stop: int = 0
    save: int = 0
    without_data: int = 0
    saved: int = 0
    overdue: int = 0
    checksums: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, batch: StepBatch) -> StepCounts:
        """What a rank's share of a batch says."""
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
        """The counts of all ranks, packed, on the device; without waiting for it. One collective.

        Args:
            world: all ranks.
            checksums: int64 [ranks], see `replicas.checksums`: they travel along.
        """
        counts = torch.tensor([getattr(self, name) for name in _COUNTS], dtype=torch.int64)
        if world.device.type == "cuda":
            counts = counts.pin_memory().to(world.device, non_blocking=True)
        return world.sum_(counts if checksums is None else torch.cat((counts, checksums)))

    @staticmethod
    def element(summed: Tensor, name: str) -> Tensor:
        """One of the packed counts, int64 0-dim, where they are."""
        return summed[_COUNTS.index(name)]

    @classmethod
    def read(cls, summed: Tensor) -> StepCounts:
        """The packed counts, in host memory, by name."""
        values = summed.tolist()
        return cls(**dict(zip(_COUNTS, values, strict=False)), checksums=values[len(_COUNTS) :])


_COUNTS = [count.name for count in fields(StepCounts) if count.name != "checksums"]


@dataclass(frozen=True)
class StepSums:
    """What a step measures, fp64: of one rank, or of all once they were summed. Views of one tensor.

    The first fields have a value for every source, the last are what the optimiser did and the same on every rank
    without being summed; all but the first are 0-dim.

    Attributes:
        losses, targets: [sources].
        sample_losses: sum of the mean losses of samples.
        penalties: sum of the squared log-normalisers.
        bad_losses: ranks with a sum that is not finite.
        bad_ranks: sum of their numbers.
        bad_norms: ranks with a gradient norm that is not finite.
        norm, loss_scale, skipped: see `add_update`.
        packed: all of them.
    """

    losses: Tensor
    targets: Tensor
    sample_losses: Tensor
    penalties: Tensor
    bad_losses: Tensor
    bad_ranks: Tensor
    bad_norms: Tensor
    norm: Tensor
    loss_scale: Tensor
    skipped: Tensor
    packed: Tensor

    @classmethod
    def zeros(cls, sources: int, device: torch.device) -> StepSums:
        """Before the first micro-batch."""
        return cls.of(torch.zeros(len(_BY_SOURCE) * sources + _SCALARS, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, packed: Tensor) -> StepSums:
        """The packed sums by name, where they are."""
        by_source, scalars = packed[:-_SCALARS], packed[-_SCALARS:]
        views = (*by_source.view(len(_BY_SOURCE), -1), *scalars)
        return cls(**dict(zip(_SUMS, views, strict=True)), packed=packed)

    def sum_over(self, world: World, norm: Tensor) -> None:
        """Sum over the ranks, in place, with word of what is not finite on which; without waiting. One collective.

        Args:
            world: all ranks.
            norm: of the gradients, fp32 0-dim. Replicas hold the same gradients, so it is the same everywhere; that
                ranks can never step apart does not rest on it.
        """
        self.bad_losses.copy_(~self.packed.isfinite().all())
        self.bad_ranks.copy_(self.bad_losses * world.rank)
        self.bad_norms.copy_(~norm.isfinite())
        world.sum_(self.packed[: -len(_OF_UPDATE)])

    def not_finite(self) -> Tensor:
        """fp32 0-dim, 1 if anything of any rank is not finite, else 0; the same on every rank once they were summed."""
        return (self.bad_losses + self.bad_norms > 0).float()

    def add_update(self, norm: Tensor, loss_scale: Tensor | None, skipped: Tensor | None) -> None:
        """Add what the optimiser did.

        Args:
            norm: of the gradients, before clipping and without scale, fp32 0-dim.
            loss_scale: fp32 0-dim; None is 1.
            skipped: fp32 0-dim, 1 if the step was skipped, else 0; None is 0.
        """
        self.norm.copy_(norm)
        self.loss_scale.fill_(1.0) if loss_scale is None else self.loss_scale.copy_(loss_scale)
        if skipped is not None:
            self.skipped.copy_(skipped)


_SUMS = [part.name for part in fields(StepSums) if part.name != "packed"]
_BY_SOURCE, _OF_UPDATE = ("losses", "targets"), ("norm", "loss_scale", "skipped")
_SCALARS = len(_SUMS) - len(_BY_SOURCE)
