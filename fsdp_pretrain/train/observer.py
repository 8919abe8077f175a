"""Callbacks of training: the only way in which the loop and its steps know of services.

Built-in observers: saves, group statistics, the held-out loss, health, repeated micro-batches, the evaluation worker,
the mirror's uploader, the profiler, live control; `job/phases.py` puts them in order. Those that measure or communicate
are on every rank. Imports no torch, since `health` does without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import Exit, NumericError, UserError
from fsdp_pretrain.run.step_record import HealthFinding, StepRecord

if TYPE_CHECKING:
    from torch import Tensor

    from fsdp_pretrain.checkpoint.dcp import SaveResult
    from fsdp_pretrain.checkpoint.state import TrainState
    from fsdp_pretrain.data.packing.loader import StepBatch

    from .step_metrics import StepCounts


@dataclass(frozen=True)
class RollbackRequest:
    """A request to go back to before an incident, and to skip its samples."""

    key: str  # that of the incident, such as `loss/spike`
    cause: str  # one sentence
    start: int  # first step of the incident
    end: int  # last step of the incident
    first: int  # samples [first, stop) cover the incident's steps and the margins around them
    stop: int
    target: int  # go back to a checkpoint of this step or earlier, if possible
    before: Position | None = None  # position before the last step, if that was not finite
    rank: int | None = None  # the only rank whose loss was not finite then, if there was just one
    repeats: bool | None = None  # whether that step was non-finite again when repeated; None: not repeated


@dataclass
class Verdict:
    """An observer's verdict on a record: findings to report, and whether to go back or to end the run with an error."""

    findings: list[HealthFinding] = field(default_factory=list)
    rollback: RollbackRequest | None = None
    error: UserError | None = None

    def fail(self, text: str, effect: str, remedy: str) -> None:
        """End the run; the first reason wins."""
        self.error = self.error or NumericError(text, effect=effect, remedy=remedy).on_all_ranks()


@dataclass
class AgreedActions:
    """What the ranks agreed on, from the sums of the steps collected since the last actions.

    Attributes:
        step: number of the last step that was issued.
        stop, save, profile, steer, repeat, overdue: whether some rank asked for it, see `StepCounts`.
        saved: sum over the ranks of the numbers of finished saves, see `Checkpointing.signals`.
        rollback: the rollback that an observer asks for.
    """

    step: int = 0
    stop: bool = False
    save: bool = False
    profile: bool = False
    steer: bool = False
    repeat: bool = False
    saved: int = 0
    overdue: bool = False
    rollback: RollbackRequest | None = None

    def add(self, counts: StepCounts) -> None:
        """Add the sums of one more step."""
        for name in ("stop", "save", "profile", "steer", "repeat", "overdue"):
            setattr(self, name, getattr(self, name) or getattr(counts, name) > 0)
        self.saved = max(self.saved, counts.saved)


@dataclass(frozen=True)
class Sum:
    """What this rank's rows add to a sum over all rows: a 0-dim tensor on the device."""

    value: Tensor


@dataclass(frozen=True)
class Max:
    """The maximum over this rank's rows: a 0-dim tensor on the device."""

    value: Tensor


class Observer:
    """Base class of what takes part in training; its methods do nothing.

    Attributes:
        restored: whether the tensors of an extension's observer were loaded from a checkpoint, known at `start`.

    Only `start` and `between_steps` may communicate or wait for the device, and then on all ranks together. An error
    that a method raises ends the run.
    """

    restored = False

    def tensors(self) -> Mapping[str, Tensor]:
        """Of an observer of an extension: its live tensors that checkpoints keep, such as an average of the weights.

        Always the same ones: DTensors sharded as the model's parameters, or plain tensors that are alike on every rank.
        """
        return {}

    def start(self) -> None:
        """Called before the first step, when model and optimiser have their values."""

    def batch_read(self, batch: StepBatch) -> None:
        """Called with this rank's share of each batch, in host memory, before it is trained."""

    def before_step(self, step: int) -> None:
        """Called before the step of this number is issued."""

    def requests(self) -> Mapping[str, int]:
        """This rank's requests to all ranks, by field of `StepCounts`; they are summed in the next step."""
        return {}

    def beside(self, step: int) -> list[str]:
        """Names of what runs on this node beside a step, such as `save`: the field `beside` of its record."""
        return []

    def before_update(self, state: TrainState, scale: Tensor | None) -> None:
        """Called when the gradients of the step that leads to `state` are complete. `scale`: see `Gradients.scale`."""

    def measures(self) -> Mapping[str, Sum | Max]:
        """Of an observer of an extension: measures of this step, by name, after its update; the same on every rank.

        They are gathered with those of others, and are in the field `observed` of the step's record, as
        `PACKAGE:PART/NAME`.
        """
        return {}

    def after_update(self) -> Tensor | None:
        """Called when the optimiser took or skipped the step. Returns a device tensor for `fields`, or None."""
        return None

    def after_step(self, state: TrainState) -> Tensor | None:
        """Called when the step that led to `state` was issued. Returns a device tensor for `fields`, or None."""
        return None

    def fields(self, measured: Tensor) -> Mapping[str, Any]:
        """Fields of a step's record, from the tensor that this observer returned in that step, now in host memory."""
        return {}

    def judge(self, record: StepRecord) -> Verdict | None:
        """Judge a step by its record, two steps later, before it is written. All ranks must return the same verdict."""
        return None

    def recorded(self, record: StepRecord, verdict: Verdict) -> None:
        """Called on every rank when a step's record was written: the place to log. `verdict`: from `judge`."""

    def between_steps(self, agreed: AgreedActions) -> Exit | None:
        """Called when all ranks have issued the same step. Returns the reason to end training, if there is one."""
        return None

    def saved(self, result: SaveResult) -> None:
        """Called when a checkpoint was committed and verified."""

    def reconfigured(self, config: Config) -> None:
        """Called when the timeline changed: `config` counts from the next step on, and differs in nothing else."""

    def end(self, step: int) -> None:
        """Called when the last step was issued and recorded; its state is saved next."""

    def close(self) -> None:
        """Called when training has ended, in whatever way."""
