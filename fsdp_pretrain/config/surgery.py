"""Operations on the optimiser's state at points of a run, `[[optimizer.surgery]]`: what they say, when they act."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, model_validator

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.units import Progress

from .base import Section
from .schedule import Schedule

if TYPE_CHECKING:
    from .config import Config


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
Moments = Literal["both", "exp_avg", "exp_avg_sq", "none"]
Frozen = Literal["fill", "keep"]


class SurgerySection(Section):
    """A reset of Adam's moments, or a time without updates, of some parameters from a point of the run on."""

    at: Progress
    """Place in training: steps, samples or tokens since the beginning of the run. It acts before the first step that
    begins there or later: `"4000 steps"` changes the state of checkpoint 4000."""
    parameters: list[Pattern] = []
    """Regular expressions: the parameters whose name matches one. Empty: all."""
    reset: Moments = "both"
    """What is set to zero. `both`: moments and step count, as at the beginning of a run. `exp_avg`: the first moment;
    the next updates are small. `exp_avg_sq`: the second moment and the step count, only with `freeze`. `none`:
    nothing."""
    freeze: Progress | None = None
    """How long these parameters are neither updated nor decayed. Their gradients still count in the norm. Default: not
    at all."""
    frozen_moments: Frozen = "fill"
    """What their moments do meanwhile. `fill`: take in the gradients, so that the first update after a reset has the
    usual size. `keep`: stay as they are."""
    reason: str = ""
    """Why, for the journal."""

    @model_validator(mode="after")
    def _acts(self) -> SurgerySection:
        lasts = self.freeze is not None and self.freeze.value > 0
        if self.reset == "none" and not lasts:
            raise ValueError("it resets nothing and freezes nothing; set `reset` or `freeze`")
        if self.reset == "exp_avg_sq" and not (lasts and self.frozen_moments == "fill"):
            raise ValueError(
                "reset = exp_avg_sq: Adam counts steps once for both moments, so with the first kept the next updates "
                "would be up to 1 / (1 - beta1) times too large; reset both, or freeze while the moments fill"
            )
        return self

    def begins(self, schedule: Schedule) -> int:
        """Samples consumed at `at`."""
        return schedule.samples(self.at)

    def ends(self, schedule: Schedule) -> int:
        """Samples consumed when `freeze` is over."""
        begins = self.begins(schedule)
        return begins if self.freeze is None else schedule.behind(begins, self.freeze)


def is_due(place: int, *, consumed: int, batch: int) -> bool:
    """Whether the step that begins at `consumed`, after one of `batch` samples, is the first at or past a place."""
    return consumed - batch < place <= consumed or (batch == 0 and place == consumed)


def refuse_missed(new: Config, old: Config, *, consumed: int, batch: int) -> None:
    """Raise ConfigError for operations that are past, and were not declared when training passed them.

    Args:
        new, old: the configuration to continue with, and the one that led to a checkpoint.
        consumed, batch: counters of the checkpoint.
    """
    known = [each.model_copy(update={"reason": ""}) for each in old.optimizer.surgery]
    for each in new.optimizer.surgery:
        past = each.begins(new.schedule) <= consumed - batch
        if past and each.model_copy(update={"reason": ""}) not in known:
            raise ConfigError(
                f"optimizer.surgery at {each.at}: the checkpoint to continue from is past it, and was trained without",
                effect="it would never act",
                remedy="name a place ahead, or go back with `fsdp-pretrain rollback RUN --to STEP`",
            )
