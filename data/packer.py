"""The packer: a pure function from a sample index to tokens and document boundaries.

How a source becomes samples (all integers; S is the sequence length, T the tokens of an epoch, separators included):

1. In epoch e the blocks of the source are permuted, and the documents inside each block. Every document is followed
   by one separator. That is a line of T tokens; the lines of all epochs are laid end to end.
2. Window w covers tokens [w*S, w*S + S] of that endless line: S inputs and, one further, their labels. Windows
   overlap by one token, so every token is predicted exactly once and nothing is dropped at any end.
3. The windows that start in epoch e are split into `lanes` runs of equal length (+-1). Samples are dealt in rounds,
   one from every lane in an order permuted anew each round: consecutive samples come from far apart, and a batch
   smaller than a round does not meet the same lanes every so many steps.
4. Inside a lane, each stretch of `STRETCH` windows is permuted, so that the windows of a long document do not follow
   each other, while a lane still reads one neighbourhood of the files at a time.

So a sample is found from the block table and one block's lengths. There is no iterator state, no shuffle buffer and
no rank in this file; the permutations depend on (seed, source name, epoch, block) by a hash defined here, not by a
library's generator that may change. The packer alone writes separators, and `pack` checks what it hands out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_pretrain.errors import DataError

from .corpus import Corpus
from .mixture import Mixture
from .reading import READ_TIMEOUT, Places

Ints = npt.NDArray[np.int64]
STRETCH = 1024
"""Windows of a lane that are permuted together: 4M tokens at a sequence length of 4096, the size of a block."""


def permutation(key: int, size: int) -> Ints:
    """A permutation of range(size) that depends on `key` alone, now and in every later version.

    Each index is hashed (the finaliser of splitmix64) and the indices are sorted by hash; the index fills the low bits
    of its own sort key, so there are no ties and any sorting algorithm gives the same order.
    """
    index = np.arange(size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    low = np.uint64((1 << max(1, (size - 1).bit_length())) - 1)
    x = (x & ~low) | index
    x.sort()
    return (x & low).astype(np.int64)


def _key(*parts: object) -> int:
    return xxhash.xxh3_64_intdigest("/".join(str(part) for part in parts).encode())


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a stretch of a sample comes from: tokens [start, stop) of a document, separator not counted."""

    source: str
    shard: str
    document: int
    start: int
    stop: int


@dataclass(slots=True)
class _Block:
    """Documents of one block in their order in one epoch."""

    ends: Ints
    """[documents] where each ends in the block's line, separators counted."""
    shifts: Ints
    """[documents] token of the shard's flat array = position in the block's line + shift."""
    documents: Ints
    """[documents] number within the shard."""
    tokens: npt.NDArray[Any]
    """The shard's flat array."""
    load: Callable[[_Block, int], npt.NDArray[Any]]
    """Bring a chunk of that array, and the next one, into memory under watch; the array to use from then on."""
    chunk_bits: int
    chunks: range
    """Chunks of 2 ** chunk_bits tokens that the block lies in."""
    waiting: set[int]
    """Those of them that were not loaded yet."""
    shard: int
    length: int


@dataclass(slots=True)
class Packed:
    """Consecutive samples, packed.

    Attributes:
        tokens: int64 [n, S + 1]; inputs are `[:, :-1]`, labels `[:, 1:]`.
        lengths: int32 [n, D], document lengths over the S inputs (separators counted), zero-padded.
        sources: int64 [n], number of the source each sample comes from.
        first: index of the first sample.
        ignore: (row, start, stop) spans of `tokens` that must not be learned: quarantined documents.
        quarantined: the pieces those spans come from.
        documents: documents that end inside the samples, so separators written.
    """

    tokens: Ints
    lengths: npt.NDArray[np.int32]
    sources: Ints
    first: int
    documents: int
    ignore: list[tuple[int, int, int]] = field(default_factory=list)
    quarantined: list[Piece] = field(default_factory=list)


_AHEAD = 8
_CHUNK_BITS = 15
"""Tokens are brought into memory in chunks of 2 ** 15, two at a time: about what the kernel reads ahead by itself."""
_NEAR = 32
"""Chunks looked at together before one of them is loaded: what is in memory already is found at little cost."""
_Span = tuple[_Block, int, int, int, int]
"""(block, index of the document in it, position in the row, first and last + 1 token in the shard)"""


class _Source:
    """One corpus as an endless line of windows."""

    def __init__(self, name: str, corpus: Corpus, sequence_length: int, seed: int, lanes: int) -> None:
        self.name, self.corpus, self.length, self.seed, self.lanes = (
            name,
            corpus,
            sequence_length,
            seed,
            lanes,
        )
        blocks = corpus.blocks
        self.block_lengths: Ints = blocks[:, 4] + blocks[:, 3]  # one separator for each document that is not empty
        self.epoch_tokens = int(self.block_lengths.sum())
        self._epochs: OrderedDict[int, tuple[list[int] | Ints, Ints]] = OrderedDict()
        self._blocks: OrderedDict[tuple[int, int], _Block] = OrderedDict()
        self._stretches: OrderedDict[tuple[int, int, int], npt.NDArray[np.int16]] = OrderedDict()
        self._latest_round: tuple[tuple[int, int], Ints] = ((-1, -1), np.empty(0, np.int64))
        self._chunk_bits = max(_CHUNK_BITS, sequence_length.bit_length())  # a sample lies in two chunks at most
        self._keep_blocks = max(64, min(2 * lanes, 4096))

    def locate(self, number: int) -> tuple[int, int]:
        """(epoch, offset in the epoch's line) where sample `number` of this source starts."""
        total, length = self.epoch_tokens, self.length
        epoch = number * length // total
        first = -(-epoch * total // length)
        count = -(-(epoch + 1) * total // length) - first
        run, longer = divmod(count, self.lanes)
        position, turn = divmod(number - first, self.lanes)
        lane = int(self._round(epoch, position, self.lanes if position < run else longer)[turn])
        stretch, inside = divmod(position, STRETCH)
        size = min(STRETCH, run + (lane < longer) - stretch * STRETCH)
        start = first + lane * run + min(lane, longer) + stretch * STRETCH
        window = start + int(self._stretch(epoch, lane, stretch, size)[inside])
        return epoch, window * length - epoch * total

    def _round(self, epoch: int, position: int, size: int) -> Ints:
        """The order of the lanes in one round."""
        if self._latest_round[0] != (epoch, position):
            order = permutation(_key(self.seed, self.name, epoch, "round", position), size)
            self._latest_round = ((epoch, position), order)
        return self._latest_round[1]

    def _stretch(self, epoch: int, lane: int, stretch: int, size: int) -> npt.NDArray[np.int16]:
        """The order of the windows of one stretch of a lane."""
        found = self._stretches.get((epoch, lane, stretch))
        if found is None:
            order = permutation(_key(self.seed, self.name, epoch, "lane", lane, stretch), size).astype(np.int16)
            found = self._stretches[(epoch, lane, stretch)] = order
            if len(self._stretches) > 4 * self.lanes + 64:
                self._stretches.popitem(last=False)
        return found

    def _epoch(self, epoch: int) -> tuple[Any, Ints]:
        """(block order, cumulative ends of the blocks in that order)."""
        plan = self._epochs.get(epoch)
        if plan is None:
            order = permutation(_key(self.seed, self.name, epoch), len(self.block_lengths))
            plan = self._epochs[epoch] = (order, np.cumsum(self.block_lengths[order]))
            if len(self._epochs) > 3:
                self._epochs.popitem(last=False)
        return plan

    def _block(self, epoch: int, block: int) -> _Block:
        found = self._blocks.get((epoch, block))
        if found is not None:
            self._blocks.move_to_end((epoch, block))
            return found
        shard_number, first, count, nonempty, _ = self.corpus.blocks[block].tolist()
        shard = self.corpus.shard(shard_number, ("index", first, first + count))
        lengths = shard.lengths[first : first + count]
        order = permutation(_key(self.seed, self.name, epoch, block), count)
        if nonempty < count:  # an empty document would put two separators side by side
            order = order[lengths[order] > 0]
        sizes = lengths[order].astype(np.int64) + 1
        ends = np.cumsum(sizes)
        starts = shard.pointers[first : first + count] // shard.dtype.itemsize
        bits = self._chunk_bits
        chunks = range(int(starts[0]) >> bits, (int(starts[-1] + lengths[-1]) >> bits) + 1)
        built = _Block(
            ends=ends,
            shifts=starts[order] - (ends - sizes),
            documents=first + order,
            tokens=shard.tokens,
            load=self._load,
            chunk_bits=bits,
            chunks=chunks,
            waiting=set(chunks),
            shard=shard_number,
            length=int(self.block_lengths[block]),
        )
        self._blocks[(epoch, block)] = built
        if len(self._blocks) > self._keep_blocks:
            self._blocks.popitem(last=False)
        return built

    def _load(self, block: _Block, chunk: int) -> npt.NDArray[Any]:
        bits, near = self._chunk_bits, range(chunk & -_NEAR, (chunk & -_NEAR) + _NEAR)
        shard = self.corpus.kept(block.shard, ("tokens", near[0] << bits, (near[-1] + 2) << bits))
        if shard is None:
            near = range(chunk, chunk + 1)
            shard = self.corpus.shard(block.shard, ("tokens", chunk << bits, (chunk + 2) << bits))
        if shard.tokens is not block.tokens:  # opened anew, perhaps from the mirror
            block.tokens, block.waiting = shard.tokens, set(block.chunks)
        block.waiting.difference_update(near)
        return block.tokens

    def fill(self, number: int, row: Ints, pieces: list[_Span] | None = None) -> list[int]:
        """Write sample `number` into `row` [S + 1], all but the separators; note the stretches in `pieces` if given.

        Returns:
            Positions of the separators, ascending.
        """
        epoch, offset = self.locate(number)
        separators: list[int] = []
        filled = 0
        while True:
            order, block_ends = self._epoch(epoch)
            rank = int(block_ends.searchsorted(offset, "right"))
            while rank < len(order):
                block = self._block(epoch, int(order[rank]))
                inside = offset - (int(block_ends[rank]) - block.length)
                filled = _copy(block, inside, row, filled, separators, pieces)
                if filled == len(row):
                    return separators
                offset = int(block_ends[rank])
                rank += 1
            epoch, offset = epoch + 1, 0


def _copy(block: _Block, inside: int, row: Ints, filled: int, separators: list[int], pieces: list[_Span] | None) -> int:
    """Copy a block's line from position `inside` into row[filled:] until either ends; the new `filled`."""
    at, need, tokens = int(block.ends.searchsorted(inside, "right")), len(row), block.tokens
    waiting, bits = block.waiting, block.chunk_bits
    while at < len(block.ends):
        ahead = slice(at, at + _AHEAD)  # a few documents at once: numpy scalars cost more than the copies
        for end, shift in zip(block.ends[ahead].tolist(), block.shifts[ahead].tolist(), strict=True):
            take = min(end - inside, need - filled)
            text = min(take, end - 1 - inside)  # without the separator
            start = inside + shift
            if waiting and start >> bits in waiting:
                tokens = block.load(block, start >> bits)
                waiting = block.waiting
            row[filled : filled + text] = tokens[start : start + text]
            if pieces is not None:
                pieces.append((block, at, filled, start, start + text))
            filled += take
            if text < take:
                separators.append(filled - 1)
            if filled == need:
                return filled
            inside = end
            at += 1
    return filled


class Packer:
    """Samples of a mixture of corpora. See the module text for the construction.

    Args:
        sources: (name, corpus directory, weight).
        sequence_length: S, tokens predicted per sample.
        seed: seed of the data order.
        lanes: places of an epoch that consecutive samples come from in turn.
        mirrors: by source name, a directory with a copy of its corpus.
        read_timeout: seconds after which a read from a corpus counts as hanging.

    Raises:
        DataError: a corpus cannot be opened, or the corpora were not made with the same tokenizer.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, Path, float]],
        sequence_length: int,
        *,
        seed: int,
        lanes: int,
        mirrors: Mapping[str, Path] | None = None,
        read_timeout: float = READ_TIMEOUT,
    ) -> None:
        self.length = sequence_length
        corpora = [Corpus(path, (mirrors or {}).get(name), read_timeout=read_timeout) for name, path, _ in sources]
        self._sources = [
            _Source(name, corpus, sequence_length, seed, lanes)
            for (name, _, _), corpus in zip(sources, corpora, strict=True)
        ]
        self._mixture = Mixture([weight for _, _, weight in sources])
        manifests = [source.corpus.manifest for source in self._sources]
        self.tokenizer = manifests[0].tokenizer
        for source, manifest in zip(self._sources, manifests, strict=True):
            if manifest.tokenizer.fingerprint != self.tokenizer.fingerprint:
                raise DataError(
                    f"sources {self._sources[0].name!r} and {source.name!r} were made with different tokenizers",
                    effect="the same id would mean different text in one run",
                    remedy="prepare one of them again with the other's tokenizer",
                )
        self.eod = self.tokenizer.eod
        self._special = np.zeros(self.tokenizer.vocab_size, dtype=bool)
        self._special[[self.eod, *self.tokenizer.specials]] = True
        self._signed = any(np.dtype(manifest.dtype).kind == "i" for manifest in manifests)

    @property
    def corpora(self) -> dict[str, Corpus]:
        """The opened corpora by source name."""
        return {source.name: source.corpus for source in self._sources}

    @property
    def epoch_samples(self) -> dict[str, float]:
        """Samples in one epoch of each source."""
        return {source.name: source.epoch_tokens / self.length for source in self._sources}

    @property
    def places(self) -> list[Places]:
        """Where the corpora are read from, source by source."""
        return [source.corpus.places for source in self._sources]

    def pack(self, first: int, count: int) -> Packed:
        """Samples [first, first + count), checked.

        Every separator stands at a document's end and nowhere else, no two are adjacent, no other special token and no
        id outside the vocabulary occurs: by construction for what this class writes, by measurement for what the shards
        hold. A document that breaks this is quarantined: its offending tokens are replaced by the separator and its
        whole stretch is listed in `ignore`.
        """
        tokens = np.empty((count, self.length + 1), dtype=np.int64)
        separators, sources = [], np.empty(count, dtype=np.int64)
        for row in range(count):
            source, number = self._mixture.locate(first + row)
            sources[row] = source
            separators.append(self._sources[source].fill(number, tokens[row]))
        flat = tokens.reshape(-1)
        where = [row * (self.length + 1) + at for row, ats in enumerate(separators) for at in ats]
        flat[where] = self.eod
        packed = Packed(tokens, _document_lengths(separators, self.length), sources, first, len(where))
        if not self._clean(flat, len(where)):
            self._quarantine(packed, separators)
        return packed

    def _clean(self, flat: Ints, separators: int) -> bool:
        """Whether the only special tokens are the separators just written and no id is outside the vocabulary."""
        if self._signed and flat.min() < 0:  # `take` would count a negative id from the end
            return False
        try:
            return int(np.count_nonzero(self._special.take(flat))) == separators
        except IndexError:  # an id above the vocabulary
            return False

    def _quarantine(self, packed: Packed, separators: list[list[int]]) -> None:
        """Find the documents behind the offending tokens and take them out of the loss."""
        for row in range(len(packed.tokens)):
            values = packed.tokens[row]
            outside = (values < 0) | (values >= len(self._special))
            bad = outside | self._special[np.where(outside, 0, values)]
            bad[separators[row]] = False
            if not bad.any():
                continue
            source = self._sources[int(packed.sources[row])]
            pieces: list[_Span] = []
            _, number = self._mixture.locate(packed.first + row)
            source.fill(number, np.empty(self.length + 1, dtype=np.int64), pieces)
            for block, at, position, start, stop in pieces:
                if bad[position : position + stop - start].any():
                    packed.ignore.append((row, position, position + stop - start))
                    packed.quarantined.append(self._piece(source, block, at, start, stop))
            values[bad] = self.eod

    def _piece(self, source: _Source, block: _Block, at: int, start: int, stop: int) -> Piece:
        entry, document = source.corpus.manifest.shards[block.shard].name, int(block.documents[at])
        shard = source.corpus.shard(block.shard)
        first = int(shard.pointers[document]) // shard.dtype.itemsize
        return Piece(source.name, entry, document, start - first, stop - first)

    def provenance(self, index: int) -> list[Piece]:
        """Which documents sample `index` is made of, in order."""
        number, inner = self._mixture.locate(index)
        source = self._sources[number]
        pieces: list[_Span] = []
        source.fill(inner, np.empty(self.length + 1, dtype=np.int64), pieces)
        return [self._piece(source, block, at, start, stop) for block, at, _, start, stop in pieces]

    def position(self, index: int) -> dict[str, float]:
        """Epochs completed by each source once samples [0, index) have been read."""
        counts = self._mixture.counts(index)
        return {
            source.name: count * self.length / source.epoch_tokens
            for source, count in zip(self._sources, counts, strict=True)
        }


def _document_lengths(separators: list[list[int]], length: int) -> npt.NDArray[np.int32]:
    """Lengths of the documents over the S inputs of each sample, zero-padded: int32 [n, D]."""
    rows = []
    for ats in separators:
        row, last = [], -1
        for at in ats:
            end = min(at, length - 1)  # a separator at S is only a label
            row.append(end - last)
            last = end
        if last < length - 1:
            row.append(length - 1 - last)
        rows.append(row)
    width = max(map(len, rows))
    return np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int32)
