"""The position of training: its counters, and how a step advances them."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_pretrain.config.schedule import BatchSchedule
from fsdp_pretrain.config.skips import Skips


@dataclass(frozen=True)
class Position:
    """Position after a step, or before the first."""

    step: int = 0
    """Optimiser steps taken."""
    consumed: int = 0
    """Samples trained; drives every schedule."""
    cursor: int = 0
    """Samples read, skipped ones included; the position in the data."""
    batch: int = 0
    """Samples of the last step."""

    def advance(self, batches: BatchSchedule, skips: Skips) -> Position:
        """The position after one more step."""
        batch = batches.batch_at(self.consumed)
        return Position(self.step + 1, self.consumed + batch, skips.after(self.cursor, batch), batch)
