"""Which blocks a node will read, step after step: arithmetic on the configuration and a position. Reads nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from data.packing.packer import Packer
from data.packing.position import Position
from fsdp_pretrain.config.schedule import BatchSchedule, share_of
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.errors import DataError

Key = tuple[str, int]
"""A block: (corpus fingerprint, row of the block table)."""
_MOST_USES = 300_000
"""Forecast at a time: about 50 MB, minutes to hours of training."""


class Use(NamedTuple):
    """A block that a step reads."""

    step: int
    """Number of the step."""
    source: int
    """Numbered as in the packer."""
    block: int
    """Row of the corpus's block table."""


class Forecast:
    """The blocks that some ranks read, from a position on; see `Loader.build`.

    Args:
        packer: of the run; nothing is read through it.
        batches: global batch by consumed samples.
        skips: samples not trained.
        start: position before the first step.
        world: number of ranks that split a batch.
        ranks: those of the node.
        until: consumed samples at which the run ends; None: never.

    Attributes:
        position: after the last step forecast so far.
    """

    def __init__(
        self,
        packer: Packer,
        batches: BatchSchedule,
        skips: Skips,
        start: Position,
        *,
        world: int,
        ranks: range,
        until: int | None = None,
    ) -> None:
        self._packer, self._batches, self._skips = packer, batches, skips
        self._world, self._ranks, self._until = world, ranks, until
        self.position = start

    def advance(self) -> list[Use] | None:
        """The blocks of the next step in the order in which they are first needed, each once.

        None at the end of the run or of the data.
        """
        before = self.position
        if self._until is not None and before.consumed >= self._until:
            return None
        after = before.advance(self._batches, self._skips)
        share = len(share_of(0, after.batch, 0, self._world))
        first = self._skips.after(before.cursor, self._ranks.start * share)
        found: dict[tuple[int, int], int] = {}
        try:
            for number, sample in enumerate(self._skips.take(first, share * len(self._ranks))):
                source, blocks = self._packer.blocks_of(sample)
                for block in blocks:  # all ranks begin at once, each with its first sample
                    at = found.setdefault((source, block), number % share)
                    found[source, block] = min(at, number % share)
        except DataError:
            return None
        self.position = after
        order = sorted(found, key=lambda use: found[use])
        return [Use(after.step, source, block) for source, block in order]


class Upcoming:
    """The uses of cached blocks that are ahead of the ranks, as far as they are forecast.

    Args:
        forecast: of the node's ranks.
        cached: fingerprint of the corpus of each source by URL; the blocks of others do not count.

    Attributes:
        uses: by block the steps that read it, ascending; in the order of the first use when it was forecast.
        ended: the run or the data ends with the last step forecast.
    """

    def __init__(self, forecast: Forecast, cached: Mapping[int, str]) -> None:
        self._forecast, self._cached = forecast, cached
        self._order = deque[tuple[int, Key]]()
        self.uses: dict[Key, deque[int]] = {}
        self.ended = False

    @property
    def last_step(self) -> int:
        """The last step that is forecast."""
        return self._forecast.position.step

    @property
    def is_full(self) -> bool:
        """Whether no more is forecast at present."""
        return self.ended or len(self._order) >= _MOST_USES

    def extend(self) -> None:
        """Forecast one more step."""
        uses = self._forecast.advance()
        self.ended = uses is None
        for use in uses or ():
            if use.source in self._cached:
                key = self._cached[use.source], use.block
                self.uses.setdefault(key, deque()).append(use.step)
                self._order.append((use.step, key))

    def drop(self, step: int) -> None:
        """All ranks have built their batches up to a step."""
        while self._order and self._order[0][0] <= step:
            _, key = self._order.popleft()
            self.uses[key].popleft()
            if not self.uses[key]:
                del self.uses[key]

    def in_order(self) -> list[Key]:
        """The blocks that are used, the one that is used next first."""
        return sorted(self.uses, key=lambda key: self.uses[key][0])
