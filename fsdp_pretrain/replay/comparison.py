"""Replayed steps beside their records: what is equal to the bit, and what stands out. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean, median
from typing import Any

from pydantic import BaseModel

from fsdp_pretrain.config.operations import HealthSection
from fsdp_pretrain.config.steering import StepValues
from fsdp_pretrain.health import limits
from fsdp_pretrain.health.rules import RecentValues
from fsdp_pretrain.record.step_record import StepRecord

_NORM_FLOOR = 0.05  # smallest spread of the logarithm of a norm


class StepComparison(BaseModel):
    """A replayed step beside the record of the step whose batch it had.

    Attributes:
        step, batch_of: number of the step; of the step whose batch it had.
        loss, grad_norm, lr: of the replay; None: not finite.
        recorded_loss, recorded_grad_norm, recorded_lr: as recorded.
        sources, recorded_sources: mean loss by source.
        differs: what is not equal to the bit; `settings` if the learning rate or a ramp is not, `samples` if the tokens
            are not.
        bad, recorded_bad: why it stands out from the steps before; empty: it does not.
        samples: mean loss of every sample, in the order of the batch; empty: not measured.
    """

    step: int
    batch_of: int
    loss: float | None
    grad_norm: float | None
    lr: float
    recorded_loss: float | None
    recorded_grad_norm: float | None
    recorded_lr: float
    sources: dict[str, float | None]
    recorded_sources: dict[str, float | None]
    differs: list[str]
    bad: str
    recorded_bad: str
    samples: list[float | None] = []

    @property
    def distance(self) -> float:
        """Relative difference of the losses; infinite if one is not finite and the other is, 0 if neither is."""
        if self.loss is None or self.recorded_loss is None:
            return 0.0 if self.loss is self.recorded_loss else math.inf
        return abs(self.loss - self.recorded_loss) / max(abs(self.recorded_loss), 1e-12)


class UsualSteps:
    """What losses and gradient norms are usual: those of the steps before. With too few, only what is not finite stands
    out."""

    def __init__(self, records: Sequence[StepRecord], config: HealthSection) -> None:
        self._limit_loss, self._limit_norm = config.tolerance * limits.OUTLIER, config.tolerance * limits.NORM
        self._losses = RecentValues(limits.WINDOW, limits.FLOOR)
        self._norms = RecentValues(limits.WINDOW, _NORM_FLOOR)
        for record in records:
            if record.is_finite and record.grad_norm:
                self._losses.add(record.loss.mean)
                self._norms.add(math.log(record.grad_norm))

    def stands_out(self, record: StepRecord, *, share: float = 1.0) -> str:
        """Why a step stands out, by the limits of `health` times `share`; empty if it does not."""
        if record.not_finite or not record.is_finite:
            return f"{record.not_finite or 'gradients'} not finite"
        loss = self._losses.deviation(record.loss.mean)
        if loss is not None and loss > share * self._limit_loss:
            return f"loss {loss:.0f} spreads above the usual {self._losses.median:.4f}"
        norm = self._norms.deviation(math.log(record.grad_norm)) if record.grad_norm else None
        if norm is not None and norm > share * self._limit_norm:
            return f"gradient norm {record.grad_norm:.3g}, usually {math.exp(self._norms.median):.3g}"
        return ""

    def explained(self, record: StepRecord, samples: Sequence[float | None]) -> str:
        """Why the loss by which a finite step stands out comes from its samples, whatever the state: in this one, where
        they have these mean losses, few of them raise that of the batch by at least half as much; empty if they do not.
        """
        losses = [loss for loss in samples if loss is not None]
        if not losses or not record.is_finite or self._losses.deviation(record.loss.mean) is None:
            return ""
        then, now = record.loss.mean - self._losses.median, mean(losses) - median(losses)
        return f"some samples raise its loss by {now:.2f}" if 0 < then <= 2 * now else ""


def compare(
    replayed: StepRecord,
    recorded: StepRecord,
    usual: UsualSteps,
    then: UsualSteps,
    samples: list[float | None],
    unsteered: StepValues,
) -> StepComparison:
    """Compare a replayed step with the record of its batch.

    Args:
        usual: of the state that was replayed.
        then: of the recorded step.
        samples: see `StepComparison`.
        unsteered: what records leave out, since nothing had changed it by then.
    """
    bad_then = then.stands_out(recorded)
    # A step that stood out does so again if it comes half as far: the verdict must not hang on the last digit.
    bad = usual.stands_out(replayed, share=0.5 if bad_then else 1.0)
    if not bad and bad_then and replayed.step != recorded.step:
        bad = then.explained(recorded, samples)
    fields = ("loss", "loss_sequence", "sources", "z_loss", "grad_norm", "loss_scale", "skipped", "not_finite")
    differs = [name for name in fields if getattr(replayed, name) != getattr(recorded, name)]
    if replayed.data_digest != recorded.data_digest:
        differs.insert(0, "samples")
    if _settings(replayed, unsteered) != _settings(recorded, unsteered):
        differs.insert(0, "settings")
    return StepComparison(
        step=replayed.step,
        batch_of=recorded.step,
        loss=_finite(replayed.loss.mean),
        grad_norm=replayed.grad_norm,
        lr=replayed.lr,
        recorded_loss=_finite(recorded.loss.mean),
        recorded_grad_norm=recorded.grad_norm,
        recorded_lr=recorded.lr,
        sources={name: _finite(loss.mean) for name, loss in replayed.sources.items()},
        recorded_sources={name: _finite(loss.mean) for name, loss in recorded.sources.items()},
        differs=differs,
        bad=bad,
        recorded_bad=bad_then,
        samples=samples,
    )


def _settings(record: StepRecord, unsteered: StepValues) -> dict[str, Any]:
    """Everything that the schedules said for a recorded step."""
    return {**asdict(unsteered), "lr": record.lr, **record.ramps.model_dump()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
