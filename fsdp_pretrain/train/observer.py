"""The points of training at which services take part: the only way in which the loop and its steps know of them.

Built-in observers: saves, group statistics, the held-out loss, health, what follows a checkpoint, the profiler, live
control; `job/phases.py` puts them in order. Those that measure or communicate are on every rank. Nothing here imports
torch: health has none.
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

    from .step_sums import StepCounts


@dataclass(frozen=True)
class RollbackRequest:
    """Go back to before an incident, and skip its samples."""

    key: str  # of the incident
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
        stop, save, profile, steer, overdue: some rank asked for it, see `StepCounts`.
        saved: sum of the numbers of finished saves.
        rollback: what an observer asks for.
    """

    step: int = 0
    stop: bool = False
    save: bool = False
    profile: bool = False
    steer: bool = False
    saved: int = 0
    overdue: bool = False
    rollback: RollbackRequest | None = None

    def add(self, counts: StepCounts) -> None:
        """What the sums of one more step say."""
        for name in ("stop", "save", "profile", "steer", "overdue"):
            setattr(self, name, getattr(self, name) or getattr(counts, name) > 0)
        self.saved = max(self.saved, counts.saved)


class Observer:
    """Something beside training, on every rank; here it does nothing.

    Only `start` and `between_steps` may communicate or wait for the device, and then on all ranks together. An error
    that a method raises ends the run.
    """

    def start(self) -> None:
        """Before the first step."""

    def before_step(self, step: int) -> None:
        """Before a step is issued, with its number."""

    def requests(self) -> Mapping[str, int]:
        """What this rank asks all ranks to agree on, by field of `StepCounts`: summed in the next step."""
        return {}

    def beside(self, step: int) -> list[str]:
        """Names of what runs on this node beside a step, for its record."""
        return []

    def before_update(self, state: TrainState, scale: Tensor | None) -> None:
        """The gradients of the step that leads to `state` are complete. `scale`: see `Gradients.scale`."""

    def after_update(self) -> Tensor | None:
        """The step was taken, or skipped. Returns what was measured, on the device, for `fields`."""
        return None

    def after_step(self, state: TrainState) -> Tensor | None:
        """A step was issued, which led to `state`. Returns what was measured, on the device, for `fields`."""
        return None

    def fields(self, measured: Tensor) -> Mapping[str, Any]:
        """Fields of a step's record, from what was measured in that step, now in host memory."""
        return {}

    def judge(self, record: StepRecord) -> Verdict | None:
        """A step's record is complete: the same on every rank, two steps later. The verdict must be so too."""
        return None

    def recorded(self, record: StepRecord, verdict: Verdict) -> None:
        """A record was written. `verdict`: what this observer returned for it."""

    def between_steps(self, agreed: AgreedActions) -> Exit | None:
        """All ranks have issued the same step. Returns the reason to end training, if there is one."""
        return None

    def saved(self, result: SaveResult) -> None:
        """A checkpoint was committed and verified."""

    def reconfigured(self, config: Config) -> None:
        """From the next step on the run has this configuration, in which only the timeline differs."""

    def end(self, step: int) -> None:
        """The last step was issued and recorded; its state is saved next."""

    def close(self) -> None:
        """Training has ended, in whatever way."""
