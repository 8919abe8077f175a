"""Compares replayed steps with their records: equal to the bit, or what differs first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Literal

from fsdp_pretrain.config.schedule import StepValues
from fsdp_pretrain.run.step_record import StepRecord

Difference = Literal["data", "settings", "numerics"]
_RESULTS = ("loss", "loss_sequence", "sources", "z_loss", "grad_norm", "loss_scale", "skipped", "not_finite")


StepComparison = tuple[StepRecord, StepRecord, Difference | None]
"""A replayed step, its record, and what differs; None if they are equal to the bit."""


def difference(
    replayed: StepRecord,
    recorded: StepRecord,
    unsteered: StepValues,
    *,
    same_settings: bool = True,
    same_documents: bool = True,
) -> Difference | None:
    """What differs first: the tokens; the learning rate, batch or ramps; or the results of the same step, because other
    documents are excluded or not.

    Args:
        unsteered: the values that records leave out while nothing has changed them.
        same_settings: whether their configurations have the same settings.
        same_documents: whether `data.exclude` named the same documents.
    """
    if replayed.data_digest != recorded.data_digest:
        return "data"
    if not same_settings or _settings(replayed, unsteered) != _settings(recorded, unsteered):
        return "settings"
    if any(getattr(replayed, name) != getattr(recorded, name) for name in _RESULTS):
        return "numerics" if same_documents else "data"
    return None


def _settings(record: StepRecord, unsteered: StepValues) -> dict[str, Any]:
    """All values of the schedules in a recorded step."""
    return {**asdict(unsteered), "lr": record.lr, "batch": record.batch, **record.ramps.model_dump()}


def table(steps: list[StepComparison], circumstances: list[str], requested: int) -> Iterator[str]:
    """The lines of the report.

    Args:
        circumstances: differences from the recorded steps because of which equal bits cannot be expected.
        requested: number of requested steps; the record may end before.
    """
    yield f"  {'step':>8} {'loss':>12} {'recorded':>12} {'norm':>10} {'recorded':>10} {'lr':>10}"
    for replayed, recorded, differs in steps:
        losses = " ".join(f"{_text(record.loss.mean):>12}" for record in (replayed, recorded))
        norms = " ".join(f"{_text(record.grad_norm):>10}" for record in (replayed, recorded))
        yield f"  {replayed.step:>8} {losses} {norms} {replayed.lr:>10.4g}  {differs or 'equal'}"
    yield from (f"  not as recorded: {text}" for text in circumstances)
    if len(steps) < requested:
        yield f"  the record ends after {len(steps)} of the {requested} steps that were asked for"
    first = next(
        (f"{differs} differs first, in step {replayed.step}" for replayed, _, differs in steps if differs), None
    )
    yield first or "equal"


def _text(value: float | None) -> str:
    return f"{value:.6g}" if value is not None and math.isfinite(value) else "not finite"
