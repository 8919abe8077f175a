"""Where training stands: the counters, and the one rule by which a step moves them on. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_pretrain.schedule import BatchSchedule

from .skip import Skips


@dataclass(frozen=True)
class Position:
    """After a step, or before the first.

    Attributes:
        step: optimiser steps taken.
        consumed: samples trained; drives every schedule.
        cursor: samples read, those skipped included; the position in the data.
        batch: samples of the last step.
    """

    step: int = 0
    consumed: int = 0
    cursor: int = 0
    batch: int = 0

    def advance(self, batches: BatchSchedule, skips: Skips) -> Position:
        """After the next step."""
        batch = batches.batch_at(self.consumed)
        return Position(self.step + 1, self.consumed + batch, skips.after(self.cursor, batch), batch)
