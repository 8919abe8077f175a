"""Replayed steps beside their records: equal to the bit, or what differs first."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel

from fsdp_pretrain.config.steering import StepValues
from fsdp_pretrain.record.step_record import StepRecord

Difference = Literal["data", "settings", "numerics"]
_RESULTS = ("loss", "loss_sequence", "sources", "z_loss", "grad_norm", "loss_scale", "skipped", "not_finite")
_SHOWN_STEPS = 40


class StepComparison(BaseModel):
    """A replayed step beside its record. Losses and norms: None if not finite.

    `differs` is the first of: other tokens; another learning rate, batch or ramp; another result of the same. None: the
    step is equal to the bit.
    """

    step: int
    loss: float | None
    recorded_loss: float | None
    grad_norm: float | None
    recorded_grad_norm: float | None
    lr: float
    recorded_lr: float
    differs: Difference | None


class ReplayReport(BaseModel):
    """A replay.

    Attributes:
        run, segment: whose steps were replayed.
        start: step of the checkpoint.
        asked: number of steps that were asked for; the start may have ended before.
        precision: what was asked for; None: as trained.
        circumstances: what was not as in the recorded steps, so that equal bits cannot be expected.
        steps: the replayed steps.
    """

    run: str
    segment: int
    start: int
    asked: int
    precision: str | None
    circumstances: list[str]
    steps: list[StepComparison]

    @property
    def first(self) -> StepComparison | None:
        """The first step that differs."""
        return next((step for step in self.steps if step.differs), None)


def compare(replayed: StepRecord, recorded: StepRecord, unsteered: StepValues) -> StepComparison:
    """Compare a replayed step with a record; `unsteered` is what records leave out, since nothing had changed it."""
    differs: Difference | None = None
    if replayed.data_digest != recorded.data_digest:
        differs = "data"
    elif _settings(replayed, unsteered) != _settings(recorded, unsteered):
        differs = "settings"
    elif any(getattr(replayed, name) != getattr(recorded, name) for name in _RESULTS):
        differs = "numerics"
    return StepComparison(
        step=replayed.step,
        loss=_finite(replayed.loss.mean),
        recorded_loss=_finite(recorded.loss.mean),
        grad_norm=replayed.grad_norm,
        recorded_grad_norm=recorded.grad_norm,
        lr=replayed.lr,
        recorded_lr=recorded.lr,
        differs=differs,
    )


def _settings(record: StepRecord, unsteered: StepValues) -> dict[str, Any]:
    """Everything that the schedules said for a recorded step."""
    return {**asdict(unsteered), "lr": record.lr, "batch": record.batch, **record.ramps.model_dump()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def render(report: ReplayReport) -> str:
    """The report as a table."""
    lines = [f"{report.run}, segment {report.segment}, from step {report.start}"]
    lines[0] += f", in {report.precision}" if report.precision is not None else ""
    lines.append(f"  {'step':>8} {'loss':>12} {'recorded':>12} {'norm':>10} {'recorded':>10} {'lr':>10}")
    for step in report.steps[:_SHOWN_STEPS]:
        losses, norms = (step.loss, step.recorded_loss), (step.grad_norm, step.recorded_grad_norm)
        shown = [*(f"{_text(value):>12}" for value in losses), *(f"{_text(value):>10}" for value in norms)]
        lines.append(f"  {step.step:>8} {' '.join(shown)} {step.lr:>10.4g}  {step.differs or 'equal'}")
    if len(report.steps) > _SHOWN_STEPS:
        lines.append(f"  {len(report.steps) - _SHOWN_STEPS} more with --json")
    lines += [f"  not as recorded: {text}" for text in report.circumstances]
    if len(report.steps) < report.asked:
        lines.append(
            f"  the record of this start ends after {len(report.steps)} of the {report.asked} steps that were asked for"
        )
    first = report.first
    lines.append("equal" if first is None else f"{first.differs} differs first, in step {first.step}")
    return "\n".join(lines)


def _text(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"
