"""The loss of each sample of one step, computed again from a checkpoint: which text made a step's loss what it was."""

from __future__ import annotations

from typing import Any

import torch
from tqdm import tqdm

from data.loader import micro_batch
from data.opening import open_infilling
from fsdp_pretrain.checkpoint.store import Checkpoint
from fsdp_pretrain.checkpoint.stores import Stores, stores
from fsdp_pretrain.errors import CheckpointError
from fsdp_pretrain.models import packed as forward
from fsdp_pretrain.models.loss import IGNORE
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.step_record import LossSum, StepRecord, number
from fsdp_pretrain.where import TrainedStep, describe_sample, render_piece, trained_step

from .checkpoints import read_checkpoint


def sample_losses(
    run: RunDir, number: int, *, checkpoint: int | None = None, segment: int | None = None, device: str | None = None
) -> dict[str, Any]:
    """Losses of a step's global batch with the parameters of a checkpoint, dropout off.

    Args:
        run: the run directory.
        number: the step.
        checkpoint: step of the checkpoint; None is the newest before the step.
        segment: the start that trained the step; None is the one whose step was kept.
        device: `cpu`, `cuda`, ...; None is the run's `eval.device`.

    Returns:
        Loss as sum, count and mean, in total, as recorded, by source and by sample (highest mean first), natural log
        per target token; each sample as `where.describe_sample` has it.

    Raises:
        UserError: the step, its data, the checkpoint or the device cannot be used.
    """
    step = trained_step(run, number, segment)
    chosen = _choose(stores(run), number, checkpoint)
    measured = _measure(step, chosen, device or step.config.eval.device)
    samples = [
        {**_loss(total, count), **describe_sample(step, position, world=step.world)}
        for position, (_, total, count) in enumerate(measured)
    ]
    by_source = {
        source.name: _total([row for row in measured if row[0] == index])
        for index, source in enumerate(step.config.data.sources)
    }
    recorded = step.record.loss if isinstance(step.record, StepRecord) else LossSum(sum=None, count=0)
    return {
        "step": number,
        "segment": step.record.segment,
        "checkpoint": chosen.step,
        "loss": _total(measured),
        "recorded": _loss(recorded.sum, recorded.count),
        "sources": by_source,
        "samples": sorted(samples, key=lambda row: -row["mean"] if row["mean"] is not None else float("inf")),
    }


def _choose(store: Stores, number: int, checkpoint: int | None) -> Checkpoint:
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
    bar = tqdm(step.samples(), total=len(step.indices), unit="samples", desc="losses", delay=2, disable=None)
    for _, packed in bar:
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


def _total(rows: list[tuple[int, float, int]]) -> dict[str, Any]:
    return _loss(sum(total for _, total, _ in rows), sum(count for _, _, count in rows))


def _loss(total: float | None, count: int) -> dict[str, Any]:
    return {
        "sum": None if total is None else number(total),
        "count": count,
        "mean": number(total / count) if total is not None and count else None,
    }


def render(result: dict[str, Any], *, top: int) -> str:
    """What `sample_losses` returns, for people: the `top` samples of the highest loss."""
    lines = [
        f"step {result['step']} of segment {result['segment']} with the checkpoint of step {result['checkpoint']}: "
        f"mean loss {_show(result['loss'])}; recorded in training: {_show(result['recorded'])}"
    ]
    lines += [f"  source {name}: {_show(loss)} over {loss['count']} tokens" for name, loss in result["sources"].items()]
    for sample in result["samples"][:top]:
        lines.append(f"sample {sample['index']}: {_show(sample)}, rank {sample['rank']}, source {sample['source']}")
        lines += [line for piece in sample["pieces"][:3] for line in render_piece(piece)]
        lines += [f"  and {len(sample['pieces']) - 3} more"] if len(sample["pieces"]) > 3 else []
    if len(result["samples"]) > top:
        lines.append(f"{len(result['samples']) - top} more; show them with --top or --json")
    return "\n".join(lines)


def _show(loss: dict[str, Any]) -> str:
    return "unknown" if loss["mean"] is None else f"{loss['mean']:.4f}"
