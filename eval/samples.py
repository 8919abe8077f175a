"""The loss of each sample of one step, recomputed from a checkpoint: which text caused a step's loss."""

from __future__ import annotations

import math

import torch
from pydantic import BaseModel

from fsdp_pretrain.checkpoint.store import Checkpoint, Store
from fsdp_pretrain.data.packing.loader import micro_batch
from fsdp_pretrain.data.packing.opening import open_objective
from fsdp_pretrain.errors import CheckpointError, DataError
from fsdp_pretrain.lineage.provenance import ShownSample, TrainedStep, describe_sample, trained_step
from fsdp_pretrain.models import forward
from fsdp_pretrain.models.loss import IGNORE
from fsdp_pretrain.run import environment, lineage
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.step_record import LossSum, StepRecord, number

from .checkpoints import read_checkpoint


class SampleLoss(ShownSample):
    """The loss of a sample, and its origin.

    Attributes:
        sum, mean: over its `count` target tokens (natural log); None if not finite, or without targets.
    """

    sum: float | None
    count: int
    mean: float | None

    @property
    def height(self) -> float:
        """The mean, to sort by: what is not finite is highest, and a sample without targets lowest."""
        if self.mean is not None:
            return self.mean
        return math.inf if self.count else -math.inf


class StepLosses(BaseModel):
    """The losses of a step."""

    step: int
    segment: int
    checkpoint: int  # step of the checkpoint whose parameters were used
    loss: LossSum  # loss of the whole batch with these parameters
    recorded: LossSum  # loss of the whole batch as recorded in training
    samples: list[SampleLoss]  # the losses of the samples, highest first: one that is not finite before all others


def sample_losses(
    run: RunDir,
    step_number: int,
    *,
    checkpoint: int | None = None,
    segment: int | None = None,
    device: str | None = None,
) -> StepLosses:
    """Losses of a step's global batch with the parameters of a checkpoint, dropout off.

    Args:
        checkpoint: step of the checkpoint; None: the newest before the step, on its line.
        segment: the segment that trained the step; None: the one whose step is on the kept line.
        device: None: the run's `eval.device`.

    Raises:
        UserError: the step, its data, the checkpoint or the device cannot be used.
    """
    step = trained_step(run, step_number, segment)
    if environment.excluded(run, step.record.segment) not in (None, step.packer.excluded_digest):
        raise DataError(
            f"{step.config.data.exclude} names other documents than it did for step {step_number}",
            effect="the losses would not be those of what was learned",
            remedy="restore the list as it was",
        )
    chosen = _choose(run, step.record.segment, step_number, checkpoint)
    measured = _measure(step, chosen, device or step.config.eval.device)
    samples = []
    for position, (total, count) in enumerate(measured):
        shown = describe_sample(step, position).model_dump(exclude_unset=True)
        mean = number(total / count) if count else None
        samples.append(SampleLoss(sum=number(total), count=count, mean=mean, **shown))
    total, count = (sum(column) for column in zip(*measured, strict=True))
    return StepLosses(
        step=step_number,
        segment=step.record.segment,
        checkpoint=chosen.step,
        loss=LossSum(sum=number(total), count=count),
        recorded=step.record.loss if isinstance(step.record, StepRecord) else LossSum(sum=None, count=0),
        samples=sorted(samples, key=lambda sample: -sample.height),
    )


def _choose(run: RunDir, segment: int, number: int, checkpoint: int | None) -> Checkpoint:
    """The named checkpoint, or the last one before a step on the line of its segment, also one moved aside."""
    store, line = Store(run.checkpoints), lineage.line(lineage.nodes(run), segment)
    if checkpoint is not None:
        return store.find(checkpoint)
    whole = [item for item in (*store.abandoned(), *store.scan()) if item.step < number and item.problem is None]
    written = [(item, item.manifest().segment) for item in whole]
    before = [item for item, by in written if by is None or lineage.holds(line, by, item.step)]
    if not before:
        raise CheckpointError(
            f"{store.directory} has no checkpoint from before step {number}",
            remedy="name one with --checkpoint; its losses will be those of a model that has seen the step",
        )
    return max(before, key=lambda item: item.step)


@torch.inference_mode()
def _measure(step: TrainedStep, checkpoint: Checkpoint, device: str) -> list[tuple[float, int]]:
    """(loss sum, targets) of every sample of the batch."""
    model, _ = read_checkpoint(checkpoint, device)
    model.eval()
    data, place = step.config.data, next(model.parameters()).device
    rows: list[tuple[float, int]] = []
    objective = open_objective(step.config, step.packer)
    for packed in step.samples():
        micro = micro_batch(
            packed,
            with_lengths=data.uses_lengths,
            across_documents=data.loss_across_documents,
            objective=objective,
        )
        measured = forward.losses(model, micro, data, place)
        targets = int((measured.labels != IGNORE).sum())
        rows.append((float(measured.losses.sum().double()), targets))
    return rows


def render(losses: StepLosses, *, top: int) -> str:
    """The `top` samples of the highest loss as text for people."""
    lines = [
        f"step {losses.step} of segment {losses.segment} with the checkpoint of step {losses.checkpoint}: "
        f"mean loss {losses.loss.mean:.4f}; recorded in training: {losses.recorded.mean:.4f}"
    ]
    for sample in losses.samples[:top]:
        unknown = "not finite" if sample.count else "no targets"
        mean = unknown if sample.mean is None else f"{sample.mean:.4f}"
        lines.append(f"sample {sample.index}: {mean}, rank {sample.rank}, source {sample.source}")
        lines += [line for piece in sample.pieces[:3] for line in piece.lines()]
        lines += [f"  and {len(sample.pieces) - 3} more"] if len(sample.pieces) > 3 else []
    if len(losses.samples) > top:
        lines.append(f"{len(losses.samples) - top} more; show them with --top or --json")
    return "\n".join(lines)
