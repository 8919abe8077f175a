"""Makes a rank's micro-batches of samples, and prefetches them in a thread (with torchdata).

A batch is a function of the position before it, which is the same on every rank and for any world size or micro-batch.
Every batch carries the position after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torchdata.nodes import BaseNode, Prefetcher

from fsdp_pretrain.config.schedule import BatchSchedule, share_of
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.data.corpus.reading import ReadTimes
from fsdp_pretrain.errors import ConfigError, UserError

from .batch import MicroBatch
from .objectives import IGNORE, Infilled, Infilling
from .own_objective import OwnObjective
from .packer import Packed, Packer, Piece
from .position import Position
from .unigrams import Unigrams


@dataclass(slots=True)
class StepBatch:
    """A rank's share of one optimiser step, with counts of this share.

    Attributes:
        position: position after the step.
        targets: tokens to predict.
        documents: documents that end in the share.
        separators, adjacent_specials: counted from the tokens, see `Packer.measure`.
        digest: sum of `Packed.digest`, as a signed 64-bit integer. The sum over the ranks identifies the global batch,
            however many ranks there are.
        shares, epochs: by source: the planned share around this step, and the epochs read after it.
        reads: times of the reads from storage for this share.
        notices: damage that was repaired, for the journal.
        distance: how unusual the tokens of the share are, see `Unigrams.score`; None if unknown.
    """

    micro: list[MicroBatch]
    position: Position
    targets: int = 0
    documents: int = 0
    separators: int = 0
    adjacent_specials: int = 0
    digest: int = 0
    quarantined: list[Piece] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    epochs: dict[str, float] = field(default_factory=dict)
    reads: ReadTimes = field(default_factory=ReadTimes)
    notices: list[str] = field(default_factory=list)
    distance: float | None = None


class _Steps(BaseNode[Any]):
    """Produces `StepBatch`es in the prefetching thread."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self._loader, self._position = loader, loader.start
        self._failed = False

    def next(self) -> StepBatch | UserError:
        """The next batch, or the error that ends the stream."""
        if self._failed:  # do not wait for the same file again
            raise StopIteration
        try:
            batch = self._loader.build(self._position)
        except UserError as error:  # returned instead of raised, since torchdata would wrap it into another exception
            self._failed = True
            return error
        self._position = batch.position
        self._loader.built(batch.position)
        return batch

    def get_state(self) -> dict[str, Any]:
        return {}  # every batch carries its position


class Loader(Iterator[StepBatch]):
    """An endless stream of this rank's share of each global batch.

    The global batch at cursor c is the next B samples from c that are not skipped; rank r of W takes the r-th of W
    equal slices.

    Args:
        batches: global batch as a function of consumed samples.
        rank, world: this rank, and the number of ranks that split a batch.
        micro_batch: samples per forward pass.
        start: position before the first batch.
        skips: samples not to train.
        prefetch: steps prepared ahead; 0: prepare them in the caller's thread.
        with_lengths: whether to include document lengths.
        across_documents: whether to learn the first token of a document from the separator before it.
        objective: makes the samples that are trained; None: predict every next token.
        pin: whether to put tensors in pinned memory, for asynchronous copies to a GPU.
        unigrams: compares the tokens of every step with earlier ones.
        built: called with the position after each batch, as soon as the batch is built.
    """

    def __init__(
        self,
        packer: Packer,
        batches: BatchSchedule,
        *,
        rank: int,
        world: int,
        micro_batch: int,
        start: Position | None = None,
        skips: Skips | None = None,
        prefetch: int = 4,
        with_lengths: bool = False,
        across_documents: bool = True,
        objective: Infilling | OwnObjective | None = None,
        pin: bool = False,
        unigrams: Unigrams | None = None,
        built: Callable[[Position], None] = lambda _: None,
    ) -> None:
        self._packer, self._batches, self._skips = packer, batches, skips or Skips()
        self._rank, self._world = rank, world
        self._micro_batch, self._pin = micro_batch, pin
        self._with_lengths, self._across_documents, self._objective = with_lengths, across_documents, objective
        self._unigrams = unigrams
        self.start, self.built = start or Position(), built
        steps = _Steps(self)
        self._node: BaseNode[Any] = Prefetcher(steps, prefetch, snapshot_frequency=0) if prefetch else steps

    def __next__(self) -> StepBatch:
        """The next step's share. Raises DataError if a shard cannot be read; the stream then ends."""
        batch = next(self._node)
        if isinstance(batch, UserError):
            raise batch
        result: StepBatch = batch
        return result

    def build(self, before: Position) -> StepBatch:
        """This rank's share of the global batch after a position, a pure function."""
        step = StepBatch([], before.advance(self._batches, self._skips))
        share = share_of(0, step.position.batch, self._rank, self._world)
        indices = self._skips.take(before.cursor, step.position.batch)[share.start : share.stop]
        step.shares = self._packer.shares(before.cursor)
        step.epochs = self._packer.epochs_read(step.position.cursor)
        tokens = list[Any]()
        for start in range(0, len(indices), self._micro_batch):
            packed = self._packer.pack_samples(indices[start : start + self._micro_batch])
            micro = micro_batch(
                packed,
                with_lengths=self._with_lengths,
                across_documents=self._across_documents,
                objective=self._objective,
            )
            step.micro.append(pinned(micro) if self._pin else micro)
            step.targets += micro.targets
            step.documents += packed.documents
            separators, adjacent = self._packer.measure(packed)
            step.separators += separators
            step.adjacent_specials += adjacent
            step.quarantined += packed.quarantined
            step.digest += packed.digest
            tokens += [packed.tokens] if packed.lasts is None else packed.rows
        step.digest = (step.digest + 2**63) % 2**64 - 2**63
        for corpus in self._packer.corpora.values():
            step.reads.add(corpus.reads.take_times())
            step.notices += corpus.reads.take_notices()
        if self._unigrams is not None:
            step.distance = self._unigrams.score(tokens, step.shares)
        return step

    def blank(self, before: Position) -> StepBatch:
        """A share of the same shape without targets, which keeps a rank without data in step with the others."""
        step = StepBatch([], before.advance(self._batches, self._skips))
        share = share_of(0, step.position.batch, self._rank, self._world)
        indices = self._skips.take(before.cursor, step.position.batch)[share.start : share.stop]
        for start in range(0, len(indices), self._micro_batch):
            count = min(self._micro_batch, len(indices) - start)
            length = self._packer.length_of(indices[start : start + count])
            sources = torch.zeros(count, dtype=torch.int64)
            if isinstance(self._objective, Infilling):
                micro = _infilled(self._objective.empty(count), sources)
            else:
                lengths = torch.full((count, 1), length, dtype=torch.int32) if self._with_lengths else None
                tokens = torch.zeros(count, length + 1, dtype=torch.int64)
                micro = MicroBatch(tokens, torch.full((count, length), IGNORE), lengths, sources)
            step.micro.append(pinned(micro) if self._pin else micro)
        return step


def micro_batch(
    packed: Packed, *, with_lengths: bool, across_documents: bool, objective: Infilling | OwnObjective | None = None
) -> MicroBatch:
    """Turn packed samples into tensors; see `Loader` for the arguments."""
    if isinstance(objective, Infilling):
        return _infilled(objective.apply(packed), torch.from_numpy(packed.sources))
    tokens = torch.from_numpy(packed.tokens)
    labels = None
    if packed.ignore or packed.lasts is not None or not across_documents:
        labels = tokens[:, 1:].clone()
        for row, start, stop in packed.ignore:
            labels[row, max(0, start - 1) : max(0, stop - 1)] = IGNORE
    if labels is not None and packed.lasts is not None:
        for row, last in enumerate(packed.lasts.tolist()):
            labels[row, last:] = IGNORE
    if labels is not None and not across_documents:
        ends = torch.zeros(tokens.shape, dtype=torch.bool)
        ends.view(-1)[torch.from_numpy(packed.separators)] = True
        labels[ends[:, :-1]] = IGNORE
    lengths = torch.from_numpy(packed.lengths) if with_lengths else None
    batch = MicroBatch(tokens, labels, lengths, torch.from_numpy(packed.sources))
    return batch if objective is None else objective.change(batch, packed)


def _infilled(samples: Infilled, sources: Tensor) -> MicroBatch:
    lengths, prefix, positions = map(torch.from_numpy, (samples.lengths, samples.prefix, samples.positions))
    tokens = torch.nn.functional.pad(torch.from_numpy(samples.inputs), (0, 1))
    return MicroBatch(tokens, torch.from_numpy(samples.labels), lengths, sources, prefix, positions)


def pinned(micro: MicroBatch) -> MicroBatch:
    """A copy in pinned memory."""
    tensors = (getattr(micro, attribute.name) for attribute in fields(micro))
    return MicroBatch(*(tensor.pin_memory() if tensor is not None else None for tensor in tensors))  # type: ignore[arg-type]


def check_batches(batches: list[int], world: int, micro_batch: int) -> None:
    """Raise ConfigError unless every global batch of the run splits over `world` ranks into whole micro-batches."""
    bad = [size for size in batches if size % (world * micro_batch)]
    if bad:
        raise ConfigError(
            f"a global batch of {bad[0]} samples does not split over {world} ranks into micro-batches of {micro_batch}",
            remedy=f"make train.global_batch (and every batch of the ramp) a multiple of {world * micro_batch}, "
            f"or change train.micro_batch or the number of ranks",
        )
