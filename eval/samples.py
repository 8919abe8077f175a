"""The loss of each sample of one step, recomputed from a checkpoint: which text caused a step's loss."""

from __future__ import annotations

import math

import torch
from pydantic import BaseModel

from data.packing.loader import micro_batch
from data.packing.opening import open_infilling
from fsdp_pretrain.checkpoint.store import Checkpoint, Store
from fsdp_pretrain.errors import CheckpointError
from fsdp_pretrain.lineage.provenance import ShownSample, TrainedStep, describe_sample, trained_step
from fsdp_pretrain.models import forward
from fsdp_pretrain.models.loss import IGNORE
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.step_record import LossSum, StepRecord, number

from .checkpoints import read_checkpoint


class Loss(BaseModel):
    """Natural log: a sum over `count` target tokens, and the mean; None where unknown or not finite."""

    sum: float | None
    count: int
    mean: float | None

    @classmethod
    def of(cls, total: float | None, count: int) -> Loss:
        mean = number(total / count) if total is not None and count else None
        return cls(sum=None if total is None else number(total), count=count, mean=mean)

    def __str__(self) -> str:
        return "unknown" if self.mean is None else f"{self.mean:.4f}"


class SampleLoss(Loss, ShownSample):
    """The loss of a sample, and its origin."""


class StepLosses(BaseModel):
    """The losses of a step: of the batch, as recorded in training, by source, and by sample, highest first.

    Attributes:
        checkpoint: step of the checkpoint whose parameters were used.
    """

    step: int
    segment: int
    checkpoint: int
    loss: Loss
    recorded: Loss
    sources: dict[str, Loss]
    samples: list[SampleLoss]


def sample_losses(
    run: RunDir, number: int, *, checkpoint: int | None = None, segment: int | None = None, device: str | None = None
) -> StepLosses:
    """Losses of a step's global batch with the parameters of a checkpoint, dropout off.

    Args:
        checkpoint: step of the checkpoint; None is the newest before the step.
        segment: the segment that trained the step; None is the one whose step was kept.
        device: None is the run's `eval.device`.

    Raises:
        UserError: the step, its data, the checkpoint or the device cannot be used.
    """
    step = trained_step(run, number, segment)
    chosen = _choose(Store(run.checkpoints), number, checkpoint)
    measured = _measure(step, chosen, device or step.config.eval.device)
    samples = []
    for position, (_, total, count) in enumerate(measured):
        shown = describe_sample(step, position)
        samples.append(SampleLoss(**dict(Loss.of(total, count)), **shown.model_dump(exclude_unset=True)))
    recorded = step.record.loss if isinstance(step.record, StepRecord) else LossSum(sum=None, count=0)
    return StepLosses(
        step=number,
        segment=step.record.segment,
        checkpoint=chosen.step,
        loss=_total(measured),
        recorded=Loss.of(recorded.sum, recorded.count),
        sources={
            source.name: _total([row for row in measured if row[0] == index])
            for index, source in enumerate(step.config.data.sources)
        },
        samples=sorted(samples, key=lambda row: math.inf if row.mean is None else -row.mean),
    )


def _choose(store: Store, number: int, checkpoint: int | None) -> Checkpoint:
    if checkpoint is not None:
        return store.find(checkpoint)
    before = [found for found in store.scan() if found.step < number and found.problem is None]
    if not before:
        raise CheckpointError(
            f"{store.directory} has no checkpoint from before step {number}",
            remedy="name one with --checkpoint; its losses will be those of a model that has seen the step",
        )
    return before[-1]


@torch.inference_mode()
def _measure(step: TrainedStep, checkpoint: Checkpoint, device: str) -> list[tuple[int, float, int]]:
    """(source, loss sum, targets) of every sample of the batch."""
    model, _ = read_checkpoint(checkpoint, device)
    model.eval()
    data, place = step.config.data, next(model.parameters()).device
    rows: list[tuple[int, float, int]] = []
    infilling = open_infilling(step.config, step.packer)
    for packed in step.samples():
        micro = micro_batch(
            packed,
            with_lengths=data.uses_lengths,
            across_documents=data.loss_across_documents,
            infilling=infilling,
        )
        measured = forward.losses(model, micro, data, place)
        targets = int((measured.labels != IGNORE).sum())
        rows.append((int(packed.sources[0]), float(measured.losses.sum().double()), targets))
    return rows


def _total(rows: list[tuple[int, float, int]]) -> Loss:
    return Loss.of(sum(total for _, total, _ in rows), sum(count for _, _, count in rows))


def render(found: StepLosses, *, top: int) -> str:
    """For people: the `top` samples of the highest loss."""
    lines = [
        f"step {found.step} of segment {found.segment} with the checkpoint of step {found.checkpoint}: "
        f"mean loss {found.loss}; recorded in training: {found.recorded}"
    ]
    lines += [f"  source {name}: {loss} over {loss.count} tokens" for name, loss in found.sources.items()]
    for sample in found.samples[:top]:
        lines.append(f"sample {sample.index}: {sample}, rank {sample.rank}, source {sample.source}")
        lines += [line for piece in sample.pieces[:3] for line in piece.lines()]
        lines += [f"  and {len(sample.pieces) - 3} more"] if len(sample.pieces) > 3 else []
    if len(found.samples) > top:
        lines.append(f"{len(found.samples) - top} more; show them with --top or --json")
    return "\n".join(lines)
