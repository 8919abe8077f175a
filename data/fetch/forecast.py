"""Which blocks a node will read, step after step: computed from the configuration and a position, without reading."""

from __future__ import annotations

from fsdp_pretrain.config.schedule import BatchSchedule, share_of
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import DataError


class Forecast:
    """The blocks that some ranks read, from a position on; see `Loader.build`.

    Args:
        packer: the run's packer; nothing is read through it.
        batches: global batch by consumed samples.
        skips: samples not trained.
        start: position before the first step.
        world: number of ranks that split a batch.
        ranks: the ranks of the node.
        until: consumed samples at which the run ends; None: never.

    Attributes:
        position: position after the last step that was forecast.
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

    def advance(self) -> list[tuple[int, int]] | None:
        """(source, block) of every block that the next step reads, in the order of first use.

        Sources are numbered as in the packer, blocks as in the corpus's block table. None at the end of the run or of
        the data.
        """
        before = self.position
        if self._until is not None and before.consumed >= self._until:
            return None
        after = before.advance(self._batches, self._skips)
        share = len(share_of(0, after.batch, 0, self._world))
        first = self._skips.after(before.cursor, self._ranks.start * share)
        first_use: dict[tuple[int, int], int] = {}
        try:
            for number, sample in enumerate(self._skips.take(first, share * len(self._ranks))):
                source, blocks = self._packer.blocks_of(sample)
                for block in blocks:  # all ranks begin at once, each with its first sample
                    at = first_use.setdefault((source, block), number % share)
                    first_use[source, block] = min(at, number % share)
        except DataError:
            return None
        self.position = after
        return sorted(first_use, key=first_use.__getitem__)
