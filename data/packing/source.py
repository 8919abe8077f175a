"""One corpus as an endless stream of windows: where each sample starts, and the tokens that fill it.

The construction is described in `packer.py`, which also checks the samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.corpus.hashing import key_of, permutation
from fsdp_pretrain.data.corpus.stored import Piece
from fsdp_pretrain.errors import DataError

Ints = npt.NDArray[np.int64]
STRETCH = 1024
"""Windows of a lane that are permuted together: 4M tokens at a sequence length of 4096, the size of a block."""
ROUNDS = 64
"""Rounds of all lanes that a reshuffle keeps together, so that a lane still reads one neighbourhood at a time."""
_AHEAD = 8
"""Documents of a block that are converted to Python numbers at once."""
_cached_permutation = lru_cache(maxsize=64)(permutation)


@dataclass(slots=True, eq=False)
class Block:
    """Documents of one block in the order of one epoch."""

    number: int
    """Row in the block table."""
    ends: Ints
    """[documents], end of each in the block's stream, separators counted."""
    shifts: Ints
    """[documents], token of the stored block = position in the block's stream + shift."""
    documents: Ints
    """[documents], number within the shard."""
    shard: int
    length: int

    def text(self, at: int) -> tuple[int, int]:
        """(first token in the stored block, number of tokens) of the document at index `at`."""
        begin = int(self.ends[at - 1]) if at else 0
        return begin + int(self.shifts[at]), int(self.ends[at]) - begin - 1


class Span(NamedTuple):
    """A part of a document in a row of tokens."""

    block: Block
    at: int
    """Index of the document in the block."""
    position: int
    """Start in the row."""
    start: int
    """First token in the stored block."""
    stop: int

    @property
    def end(self) -> int:
        """End in the row."""
        return self.position + self.stop - self.start

    @property
    def document(self) -> int:
        """Number of the document within its shard."""
        return int(self.block.documents[self.at])


class SourceStream:
    """One corpus as an endless stream of windows.

    Attributes:
        length: tokens of a window.
        block_lengths: tokens of each block's stream, separators included: int64 [blocks].
        epoch_length: tokens of an epoch's stream, separators included.
        reshuffles: number of samples of this source before each reshuffle.
    """

    def __init__(self, name: str, corpus: Corpus, length: int, seed: int, lanes: int) -> None:
        self.name, self.corpus = name, corpus
        self.length, self.seed, self.lanes = length, seed, lanes
        blocks = corpus.blocks
        self.block_lengths: Ints = blocks[:, 4] + blocks[:, 3]  # one separator for each document that is not empty
        self.epoch_length = int(self.block_lengths.sum())
        self.reshuffles: list[int] = []
        self._epoch = lru_cache(maxsize=3)(self._order_blocks)
        self._block = lru_cache(maxsize=max(64, min(2 * lanes, 4096)))(self._open_block)
        self._round = lru_cache(maxsize=1)(self._order_lanes)
        self._stretch = lru_cache(maxsize=4 * lanes + 64)(self._order_windows)

    def start_of(self, source_index: int) -> tuple[int, int]:
        """(epoch, offset in the epoch's stream) where sample `source_index` of this source starts."""
        total, length = self.epoch_length, self.length
        epoch = source_index * length // total
        first, count = self.epoch_windows(epoch)
        for generation in reversed(range(len(self.reshuffles))):
            source_index = self._reshuffled(source_index, generation, first, count)
        run, longer = divmod(count, self.lanes)
        position, turn = divmod(source_index - first, self.lanes)
        lane = int(self._round(epoch, position, self.lanes if position < run else longer)[turn])
        stretch, inside = divmod(position, STRETCH)
        size = min(STRETCH, run + (lane < longer) - stretch * STRETCH)
        start = first + lane * run + min(lane, longer) + stretch * STRETCH
        window = start + int(self._stretch(epoch, lane, stretch, size)[inside])
        return epoch, window * length - epoch * total

    def _reshuffled(self, source_index: int, generation: int, first: int, count: int) -> int:
        """The place of a sample after a reshuffle, which permutes chunks of the rest of its epoch, and each inside."""
        begin = self.reshuffles[generation]
        if source_index < begin or begin < first:
            return source_index
        size, left = self.lanes * ROUNDS, first + count - begin
        chunk, inside = divmod(source_index - begin, size)
        whole = left // size
        if chunk < whole:
            chunk = int(_cached_permutation(key_of(self.seed, self.name, "chunks", generation, first), whole)[chunk])
        key = key_of(self.seed, self.name, "chunk", generation, first, chunk)
        return begin + chunk * size + int(_cached_permutation(key, min(size, left - chunk * size))[inside])

    def epoch_windows(self, epoch: int) -> tuple[int, int]:
        """(first, number) of the windows that start in an epoch, which are also its samples by source index."""
        first = -(-epoch * self.epoch_length // self.length)
        return first, -(-(epoch + 1) * self.epoch_length // self.length) - first

    def _order_lanes(self, epoch: int, position: int, size: int) -> Ints:
        return permutation(key_of(self.seed, self.name, epoch, "round", position), size)

    def _order_windows(self, epoch: int, lane: int, stretch: int, size: int) -> npt.NDArray[np.int16]:
        return permutation(key_of(self.seed, self.name, epoch, "lane", lane, stretch), size).astype(np.int16)

    def _order_blocks(self, epoch: int) -> tuple[Ints, Ints]:
        """(order of the blocks in an epoch, their cumulative ends in that order)."""
        order = permutation(key_of(self.seed, self.name, epoch), len(self.block_lengths))
        return order, np.cumsum(self.block_lengths[order])

    def _open_block(self, epoch: int, block: int) -> Block:
        shard, first, _ = self.corpus.blocks[block, :3].tolist()
        lengths: npt.NDArray[Any] = self.corpus.lengths(block) - self.corpus.manifest.carried
        starts = self._starts(block, lengths)
        order = self._order(epoch, block, lengths)
        sizes = lengths[order].astype(np.int64) + 1
        ends = np.cumsum(sizes)
        return Block(
            number=block,
            ends=ends,
            shifts=starts[order] - (ends - sizes),
            documents=first + order,
            shard=shard,
            length=int(self.block_lengths[block]),
        )

    def _order(self, epoch: int, block: int, lengths: Ints) -> Ints:
        """The order of the documents of a block, given their lengths."""
        order = permutation(key_of(self.seed, self.name, epoch, block), len(lengths))
        if int(self.corpus.blocks[block, 3]) < len(lengths):  # an empty one would make two separators adjacent
            order = order[lengths[order] > 0]
        return order

    def _starts(self, block: int, lengths: npt.NDArray[np.int32]) -> Ints:
        """The places in a block's tokens at which the texts of its documents begin, after carried separators. Raises
        DataError if a document does not carry the separator that the manifest declares."""
        manifest, sizes = self.corpus.manifest, lengths.astype(np.int64) + self.corpus.manifest.carried
        starts: Ints = np.cumsum(sizes) - sizes
        if not manifest.carried:
            return starts
        tokens = self.corpus.tokens(block, 0, int(sizes.sum()))
        at = starts + (lengths if manifest.separators == "trailing" else 0)
        wrong = np.flatnonzero((lengths < 0) | (tokens.take(at, mode="clip") != manifest.tokenizer.eod))
        if len(wrong):
            first, name = int(self.corpus.blocks[block, 1]), self.corpus.block(block).name
            raise DataError(
                f"{name}.bin, document {first + int(wrong[0])}: no {manifest.separators} separator where the "
                f"manifest declares one ({len(wrong)} of the {len(lengths)} documents around it)",
                effect="the shard changed since it was imported: the run would train on tokens that were not checked",
                remedy="restore the shard, or import the corpus again",
            )
        return starts + (manifest.separators == "leading")

    def blocks_of(self, source_index: int, count: int, *, begin: int = 0) -> list[int]:
        """The blocks that `fill` would open for `count` tokens of a sample from token `begin` on, in order of use."""
        epoch, offset = self.start_of(source_index)
        epochs, offset = divmod(offset + begin, self.epoch_length)
        epoch += epochs
        blocks: list[int] = []
        while True:
            order, block_ends = self._epoch(epoch)
            rank = int(block_ends.searchsorted(offset, "right"))
            while rank < len(order):
                blocks.append(int(order[rank]))
                count -= int(block_ends[rank]) - offset
                if count <= 0:
                    return blocks
                offset = int(block_ends[rank])
                rank += 1
            epoch, offset = epoch + 1, 0

    def fill(self, source_index: int, row: Ints, spans: list[Span] | None = None, *, begin: int = 0) -> list[int]:
        """Write a sample from its token `begin` on into `row`, except the separators, and append its spans to `spans`.

        `row` is int64 [S + 1], or shorter for a piece of a window.

        Returns:
            Positions of the separators in the row, ascending.
        """
        epoch, offset = self.start_of(source_index)
        epochs, offset = divmod(offset + begin, self.epoch_length)
        epoch += epochs
        separators: list[int] = []
        filled = 0
        while True:
            order, block_ends = self._epoch(epoch)
            rank = int(block_ends.searchsorted(offset, "right"))
            while rank < len(order):
                block = self._block(epoch, int(order[rank]))
                inside = offset - (int(block_ends[rank]) - block.length)
                filled = self._copy(block, inside, row, filled, separators, spans)
                if filled == len(row):
                    return separators
                offset = int(block_ends[rank])
                rank += 1
            epoch, offset = epoch + 1, 0

    def _copy(
        self, block: Block, inside: int, row: Ints, filled: int, separators: list[int], spans: list[Span] | None
    ) -> int:
        """Copy a block's stream from position `inside` into row[filled:] until one ends; returns `filled` after it."""
        at, need, pieces = int(block.ends.searchsorted(inside, "right")), len(row), list[Piece]()
        while at < len(block.ends) and filled < need:
            ahead = slice(at, at + _AHEAD)  # a few documents at once: numpy scalars cost more than the copies
            for end, shift in zip(block.ends[ahead].tolist(), block.shifts[ahead].tolist(), strict=True):
                take, start = end - inside, inside + shift
                text = take - 1  # without the separator
                if take > need - filled:
                    take = need - filled
                    text = min(take, text)
                if text:
                    pieces.append((filled, start, start + text))
                if spans is not None:
                    spans.append(Span(block, at, filled, start, start + text))
                filled += take
                if text < take:
                    separators.append(filled - 1)
                if filled == need:
                    break
                inside = end
                at += 1
        self.corpus.copy(block.number, pieces, row)
        return filled
