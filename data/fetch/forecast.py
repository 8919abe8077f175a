"""Which blocks a node will read, step after step: arithmetic on the configuration and a position. Reads nothing."""

from __future__ import annotations

from fsdp_pretrain.config.schedule import BatchSchedule, share_of
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import DataError


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

    def advance(self) -> list[tuple[int, int]] | None:
        """(source, block) of what the next step reads, in the order in which it is first needed, each once.

        Sources are numbered as in the packer, blocks as in the corpus's block table. None at the end of the run or of
        the data.
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
        return sorted(found, key=found.__getitem__)
