"""From samples to a rank's micro-batches, prepared ahead by a background thread. The only user of torchdata.

The state is two integers, `cursor` (next sample) and `consumed` (samples trained, which drives the batch size); it
belongs to the batch last handed out, is the same on every rank, and fits any world size or micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor
from torchdata.nodes import BaseNode, Prefetcher

from fsdp_pretrain.errors import ConfigError, UserError
from fsdp_pretrain.schedule import BatchSchedule, share_of

from .packer import Packed, Packer, Piece
from .reading import ReadTimes

IGNORE = -100
"""Label of tokens that are not learned; the value PyTorch's losses ignore by default."""


@dataclass(slots=True)
class MicroBatch:
    """One forward pass of one rank.

    Attributes:
        tokens: int64 [b, S + 1].
        labels: int64 [b, S] if some tokens are not to be learned, else None (`tokens[:, 1:]`).
        lengths: int32 [b, D] document lengths, zero-padded, if attention needs them.
        sources: int64 [b], source of each sample.
    """

    tokens: Tensor
    labels: Tensor | None
    lengths: Tensor | None
    sources: Tensor


@dataclass(slots=True)
class StepBatch:
    """A rank's share of one optimiser step, and this share's counts.

    Attributes:
        micro: the micro-batches.
        size: samples of the whole global batch.
        cursor, consumed: the counters after this step.
        targets: tokens to predict.
        documents: documents that end in the share.
        digest: sum over samples of xxh3 of their tokens, modulo 2^64, as a signed integer. Summed over ranks it
            identifies the global batch whatever the number of ranks.
        quarantined: documents taken out of the loss by the packer's checks.
        reads: reads from storage that preparing the share took.
        notices: what went wrong and was mended meanwhile (a shard read from the mirror), for the journal.
    """

    micro: list[MicroBatch]
    size: int
    cursor: int
    consumed: int
    targets: int = 0
    documents: int = 0
    digest: int = 0
    quarantined: list[Piece] = field(default_factory=list)
    reads: ReadTimes = field(default_factory=ReadTimes)
    notices: list[str] = field(default_factory=list)


class _Steps(BaseNode[Any]):
    """Produces `StepBatch`es; runs in the prefetching thread."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self._loader = loader
        self.cursor = self.consumed = 0
        self._failed = False

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        state = initial_state or {"cursor": self._loader.cursor, "consumed": self._loader.consumed}
        self.cursor, self.consumed = state["cursor"], state["consumed"]

    def next(self) -> StepBatch | UserError:
        if self._failed:  # do not wait for the same file again
            raise StopIteration
        try:
            batch = self._loader.build(self.cursor, self.consumed)
        except UserError as error:  # hand it over whole: torchdata would rebuild it around a traceback
            self._failed = True
            return error
        self.cursor, self.consumed = batch.cursor, batch.consumed
        return batch

    def get_state(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "consumed": self.consumed}


class Loader(Iterator[StepBatch]):
    """An endless stream of this rank's share of each global batch.

    The global batch at cursor c is samples [c, c + B); rank r of W takes the r-th of W equal slices.

    Args:
        packer: where samples come from.
        batches: global batch as a function of consumed samples.
        rank, world: this rank among those that split a batch.
        micro_batch: samples per forward pass.
        cursor, consumed: where to start.
        prefetch: steps prepared ahead; 0 prepares in the caller's thread.
        with_lengths: include document lengths.
        pin: put tensors in pinned memory, for asynchronous copies to a GPU.
    """

    def __init__(
        self,
        packer: Packer,
        batches: BatchSchedule,
        *,
        rank: int,
        world: int,
        micro_batch: int,
        cursor: int = 0,
        consumed: int = 0,
        prefetch: int = 4,
        with_lengths: bool = False,
        pin: bool = False,
    ) -> None:
        self._packer, self._batches, self._rank, self._world = packer, batches, rank, world
        self._micro_batch, self._with_lengths, self._pin = micro_batch, with_lengths, pin
        self.cursor, self.consumed = cursor, consumed
        steps = _Steps(self)
        self._node: BaseNode[Any] = Prefetcher(steps, prefetch, snapshot_frequency=0) if prefetch else steps

    def __next__(self) -> StepBatch:
        """The next step's share. Raises DataError if a shard cannot be read; nothing follows then."""
        batch = next(self._node)
        if isinstance(batch, UserError):
            raise batch
        self.cursor, self.consumed = batch.cursor, batch.consumed
        result: StepBatch = batch
        return result

    def state(self) -> dict[str, int]:
        """Where the batch last handed out ends; arguments of a new Loader that continues."""
        return {"cursor": self.cursor, "consumed": self.consumed}

    def build(self, cursor: int, consumed: int) -> StepBatch:
        """This rank's share of the global batch at `cursor`, a pure function."""
        size = self._batches.batch_at(consumed)
        step = StepBatch([], size, cursor + size, consumed + size)
        share = share_of(cursor, size, self._rank, self._world)
        for start in share[:: self._micro_batch]:
            packed = self._packer.pack(start, min(self._micro_batch, share.stop - start))
            step.micro.append(self._micro(packed))
            step.targets += packed.tokens.shape[0] * self._packer.length - _ignored(packed)
            step.documents += packed.documents
            step.quarantined += packed.quarantined
            step.digest += sum(xxhash.xxh3_64_intdigest(row) for row in packed.tokens)
        step.digest = (step.digest + 2**63) % 2**64 - 2**63
        for places in self._packer.places:
            step.reads.add(places.take_times())
            step.notices += places.take_notices()
        return step

    def blank(self, cursor: int, consumed: int) -> StepBatch:
        """A share of the same shape with nothing to learn: keeps a rank that has no data in step with the others."""
        size, length = self._batches.batch_at(consumed), self._packer.length
        step = StepBatch([], size, cursor + size, consumed + size)
        share = share_of(cursor, size, self._rank, self._world)
        for start in share[:: self._micro_batch]:
            count = min(self._micro_batch, share.stop - start)
            lengths = torch.full((count, 1), length, dtype=torch.int32) if self._with_lengths else None
            labels = torch.full((count, length), IGNORE)
            zeros = torch.zeros(count, length + 1, dtype=torch.int64)
            step.micro.append(self._pinned(zeros, labels, lengths, zeros[:, 0].clone()))
        return step

    def _micro(self, packed: Packed) -> MicroBatch:
        tokens = torch.from_numpy(packed.tokens)
        labels = lengths = None
        if packed.ignore:
            labels = tokens[:, 1:].clone()
            for row, start, stop in packed.ignore:
                labels[row, max(0, start - 1) : stop - 1] = IGNORE
        if self._with_lengths:
            lengths = torch.from_numpy(packed.lengths)
        return self._pinned(tokens, labels, lengths, torch.from_numpy(packed.sources))

    def _pinned(self, *tensors: Tensor | None) -> MicroBatch:
        if self._pin:
            tensors = tuple(tensor.pin_memory() if tensor is not None else None for tensor in tensors)
        return MicroBatch(*tensors)  # type: ignore[arg-type]


def _ignored(packed: Packed) -> int:
    """Labels inside `ignore`; the first token of a row is an input only."""
    return sum(stop - max(1, start) for _, start, stop in packed.ignore)


def check_batches(batches: list[int], world: int, micro_batch: int) -> None:
    """Raise ConfigError unless every global batch of the run splits over `world` ranks into whole micro-batches."""
    bad = [size for size in batches if size % (world * micro_batch)]
    if bad:
        raise ConfigError(
            f"a global batch of {bad[0]} samples does not split over {world} ranks into micro-batches of {micro_batch}",
            remedy=f"make train.global_batch (and every batch of the ramp) a multiple of {world * micro_batch}, "
            f"or change train.micro_batch or the number of ranks",
        )
