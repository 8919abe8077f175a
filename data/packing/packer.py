"""The packer: a pure function from a sample index to tokens and document boundaries.

How a source becomes samples (all integers; S is the sequence length, T the tokens of an epoch, separators included):

1. In epoch e the blocks of the source are permuted, and the documents inside each block. Every document is followed
   by one separator. That is a stream of T tokens; the streams of all epochs are concatenated.
2. Window w covers tokens [w*S, w*S + S] of the endless stream: S inputs and, one further, their labels. Windows
   overlap by one token, so every token is predicted exactly once and nothing is dropped at any end.
3. The windows that start in epoch e are split into `lanes` runs of equal length (+-1). Samples are dealt in rounds,
   one from every lane, in another order each round: consecutive samples come from distant places, and a batch
   smaller than a round does not meet the same lanes periodically.
4. Inside a lane, each stretch of `STRETCH` windows is permuted, so that the windows of a long document do not follow
   each other, while a lane still reads one neighbourhood of the files at a time.
5. In a stage of shorter samples (`data.stages`), a sample is a piece of a window: see `pieces.py`. The order
   above, mixtures and epochs are those of windows, and a sample is a window everywhere else.

So a sample is found from the block table and one block's lengths. There is no iterator state, no shuffle buffer and
no rank here; the permutations depend on (seed, source name, epoch, block) by `data/corpus/hashing.py`, not by some
library's generator that may change. Only the packer writes separators: those of imported documents are stripped, and
`pack_samples` checks the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_pretrain.config.sequence_stages import SequenceStages
from fsdp_pretrain.data.corpus.cached import CacheUse
from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.corpus.reading import READ_TIMEOUT
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.remote import Location

from .mixture import Mixture, MixtureWeight
from .pairs import Pairs
from .pieces import Pieces
from .source import Ints, SourceStream, Span


@dataclass(frozen=True, slots=True)
class Piece:
    """The origin of a part of a sample: tokens [start, stop) of a document, separator not counted."""

    source: str
    shard: str
    document: int
    """Number within the shard."""
    start: int
    stop: int
    length: int
    """Tokens of the whole document, separator not counted."""
    position: int
    """Start within the sample's S + 1 tokens. A separator follows the part, unless the sample ends there."""


@dataclass(slots=True)
class Packed:
    """Packed samples.

    Attributes:
        tokens: int64 [n, S + 1]; inputs are `[:, :-1]`, labels `[:, 1:]`. In a mixture with prompts and answers int64
            [n, width], with filler tokens after the S + 1 of a text and between pairs; where a stage of shorter samples
            ends among the samples, with filler after those.
        sample_indices: [n], index of each sample.
        sources: int64 [n], number of each sample's source.
        source_indices: int64 [n], index of each sample, or of the window it is a piece of, in its source.
        separators: int64, positions of separators in the flattened `tokens`: the ends of documents.
        ignore: (row, start, stop) spans of `tokens` that must not be learned: quarantined and excluded documents.
        quarantined: the pieces of the quarantined documents.
        lasts: int64 [n], position of each sample's last token, if not all end with the row.
    """

    tokens: Ints
    sample_indices: Sequence[int]
    sources: Ints
    source_indices: Ints
    separators: Ints
    ignore: list[tuple[int, int, int]] = field(default_factory=list)
    quarantined: list[Piece] = field(default_factory=list)
    lasts: Ints | None = None

    @property
    def documents(self) -> int:
        """Documents that end inside the samples."""
        return len(self.separators)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Document lengths over the S inputs (separators counted), zero-padded: int32 [n, D]. Filler is a document."""
        samples, width = self.tokens.shape
        bounds = self.separators.searchsorted(np.arange(samples + 1) * width)
        rows = []
        for row in range(samples):
            last = width - 1 if self.lasts is None else int(self.lasts[row])
            ends = self.separators[bounds[row] : bounds[row + 1]] - row * width + 1
            ends = np.append(ends[ends < last], [last] if last == width - 1 else [last, width - 1])
            rows.append(np.diff(ends, prepend=0))  # a separator at S is only a label
        lengths = np.zeros((samples, max(map(len, rows))), dtype=np.int32)
        for row, own in enumerate(rows):
            lengths[row, : len(own)] = own
        return lengths

    @property
    def digest(self) -> int:
        """Sum over the samples of xxh3 of their tokens, modulo 2^64: identifies a batch, however it is split."""
        return sum(xxhash.xxh3_64_intdigest(row) for row in self.rows) % 2**64

    @property
    def rows(self) -> list[Any]:
        """The tokens of each sample, int64 [S + 1], without filler after it where lengths differ."""
        if self.lasts is None:
            return list(self.tokens)
        return [row[: last + 1] for row, last in zip(self.tokens, self.lasts.tolist(), strict=True)]


class Packer:
    """Samples of a mixture of corpora. See the module docstring for the construction.

    Args:
        sources: (name, corpus directory or URL, weight).
        lanes: places of an epoch that consecutive samples come from in turn.
        max_epochs: by source name, how often it may be read; unlimited if absent.
        reshuffle: windows from which the rest of each source gets another order.
        exclude: (source, shard, document) that keep their places but are not learned.
        slots: (pairs per sample, tokens per pair) of sources of prompts with answers; None: such sources are refused.
        stages: lengths of the samples; default: all are windows of `sequence_length`.
        cache: the cache for corpora by URL.

    Attributes:
        length: tokens of a window.
        excluded_digest: identifies the documents of `exclude`; empty if there are none.
        pieces: tells which piece of which window a sample is.
        mixture: tells the source of a window.
        pairs: numbers of the sources of prompts with answers.

    Raises:
        DataError: a corpus cannot be opened, the corpora were not made with the same tokenizer, or one holds prompts
            with answers and `slots` is None.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, Location, float | MixtureWeight]],
        sequence_length: int,
        *,
        seed: int,
        lanes: int,
        max_epochs: Mapping[str, float] | None = None,
        reshuffle: Sequence[int] = (),
        exclude: Collection[tuple[str, str, int]] = (),
        read_timeout: float = READ_TIMEOUT,
        slots: tuple[int, int] | None = None,
        stages: SequenceStages | None = None,
        cache: CacheUse | None = None,
    ) -> None:
        self.length, self._excluded = sequence_length, frozenset(exclude)
        lines = "".join(f"{source} {shard} {document}\n" for source, shard, document in sorted(self._excluded))
        self.excluded_digest = hashlib.sha256(lines.encode()).hexdigest() if lines else ""
        self.pieces = Pieces(stages or SequenceStages.constant(sequence_length))
        self._sources: list[SourceStream] = []
        weights: dict[str, MixtureWeight] = {}
        for name, path, given in sources:
            corpus = Corpus(path, read_timeout=read_timeout, cache=cache)
            if corpus.manifest.pairs:
                source: SourceStream = _paired(name, corpus, seed, lanes, slots)
            else:
                source = SourceStream(name, corpus, sequence_length, seed, lanes)
            self._sources.append(source)
            weight = given if isinstance(given, MixtureWeight) else MixtureWeight(((0, given),))
            if max_epochs and name in max_epochs:
                limit = int(max_epochs[name] * source.epoch_length / source.length)
                if not limit:
                    raise DataError(
                        f"max_epochs = {max_epochs[name]:g} of the source {name!r} is less than one sample of "
                        f"{source.length:_} tokens",
                        effect="none of it would be read",
                        remedy="raise max_epochs, or leave the source out",
                    )
                weight = replace(weight, limit=limit)
            weights[name] = weight
        self.pairs = [number for number, source in enumerate(self._sources) if isinstance(source, Pairs)]
        self._width = max(sequence_length + 1, slots[0] * slots[1] if self.pairs and slots else 0)
        self.mixture = Mixture(weights)
        for window in sorted(reshuffle):
            for source, count in zip(self._sources, self.mixture.counts(window), strict=True):
                source.reshuffles.append(count)
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
        self._filler = int(self._special.argmin())  # an ordinary token: a separator could be next to another
        self._signed = any(np.dtype(manifest.dtype).kind == "i" for manifest in manifests)

    @property
    def corpora(self) -> dict[str, Corpus]:
        """The opened corpora by source name."""
        return {source.name: source.corpus for source in self._sources}

    @property
    def streams(self) -> Sequence[SourceStream]:
        """The streams of the sources, in the order of `mixture.names`."""
        return self._sources

    @property
    def epoch_samples(self) -> dict[str, float]:
        """Windows in one epoch of each source."""
        return {source.name: source.epoch_length / source.length for source in self._sources}

    @property
    def capacity(self) -> int | None:
        """Samples before a part of the data in which no source is left; None if there is always one."""
        windows = self.mixture.capacity
        return None if windows is None else self.pieces.first_sample(windows)

    def shares(self, sample_index: int) -> dict[str, float]:
        """The planned share of each source around a sample."""
        return self.mixture.shares(self.pieces.place(sample_index)[0])

    def length_of(self, sample_indices: Sequence[int]) -> int:
        """Tokens of the longest of these samples; those of a window if there are none."""
        stages = self.pieces.stages
        if len(stages.starts) == 1 or not len(sample_indices):
            return self.length
        return max(map(stages.length_at, sample_indices))

    def pack(self, first: int, count: int) -> Packed:
        """Samples [first, first + count); see `pack_samples`."""
        return self.pack_samples(range(first, first + count))

    def pack_samples(self, sample_indices: Sequence[int]) -> Packed:
        """Pack samples by index, and check them.

        Every separator ends a document, no two are adjacent, and no other special token or id outside the vocabulary
        occurs. The separators are so by construction; the contents of shards are checked. A document that breaks this
        is quarantined: its offending tokens are replaced by an ordinary one, and its part of the sample is listed in
        `ignore`.
        """
        count, longest = len(sample_indices), self.length_of(sample_indices)
        width = self._width - self.length + longest
        tokens = np.empty((count, width), dtype=np.int64)
        lasts = np.full(count, width - 1)
        separators, (sources, source_indices) = [], np.empty((2, count), dtype=np.int64)
        for row, sample_index in enumerate(sample_indices):
            sample = self._find(sample_index)
            sources[row], source_indices[row] = sample.source, sample.source_index
            if sample.length < longest:
                lasts[row] = sample.length
            if self.pairs or lasts[row] < width - 1:
                tokens[row] = self._filler
            separators.append(self._fill(sample, tokens[row]))
        flat = tokens.reshape(-1)
        where = np.array([row * width + at for row, ats in enumerate(separators) for at in ats], np.int64)
        flat[where] = self.eod
        packed = Packed(tokens, sample_indices, sources, source_indices, where)
        if (lasts < width - 1).any():
            packed.lasts = lasts
        if not self._clean(flat, len(where)):
            self._quarantine(packed, separators)
        if self._excluded:
            self._leave_out(packed)
        return packed

    def blocks_of(self, sample_index: int) -> tuple[int, list[int]]:
        """(source, blocks that `pack_samples` would read for a sample, in order of use). Raises DataError."""
        sample = self._find(sample_index)
        blocks = self._sources[sample.source].blocks_of(sample.source_index, sample.length + 1, begin=sample.begin)
        return sample.source, blocks

    def _find(self, sample_index: int) -> _Sample:
        """The place of a sample in its source. Raises DataError."""
        window, piece, pieces = self.pieces.place(sample_index)
        length = self.length // pieces
        return _Sample(*self.mixture.source_of(window), piece * length, length)

    def _fill(self, sample: _Sample, row: Ints, spans: list[Span] | None = None) -> list[int]:
        """See `SourceStream.fill`. A sample of text leaves the rest of a wider row unchanged."""
        room = row if sample.source in self.pairs else row[: sample.length + 1]
        return self._sources[sample.source].fill(sample.source_index, room, spans, begin=sample.begin)

    def _clean(self, flat: Ints, separators: int) -> bool:
        """Whether separators just written are the only special tokens, and no id is outside the vocabulary."""
        if self._signed and flat.min() < 0:  # `take` would index a negative id from the end
            return False
        try:
            return int(np.count_nonzero(self._special.take(flat))) == separators
        except IndexError:  # an id above the vocabulary
            return False

    def measure(self, packed: Packed) -> tuple[int, int]:
        """(separators, pairs of adjacent special tokens) among the tokens.

        Counted from the tokens alone, as a check: separators must equal `packed.documents`, pairs 0.
        """
        flat, width = packed.tokens.reshape(-1), packed.tokens.shape[1]
        at = np.flatnonzero(self._special.take(flat))
        adjacent = (np.diff(at) == 1) & (at[1:] % width != 0)  # not across two samples
        return int(np.count_nonzero(flat[at] == self.eod)), int(np.count_nonzero(adjacent))

    def _quarantine(self, packed: Packed, separators: list[list[int]]) -> None:
        """Find the documents of the offending tokens and exclude them from the loss."""
        for row, values in enumerate(packed.tokens):
            outside = (values < 0) | (values >= len(self._special))
            bad = outside | self._special[np.where(outside, 0, values)]
            bad[separators[row]] = False
            if not bad.any():
                continue
            source, spans = self._spans(packed.sample_indices[row])
            for span in spans:
                if bad[span.position : span.end].any():
                    packed.ignore.append((row, span.position, span.end))
                    packed.quarantined.append(_piece(source, span))
            values[bad] = self._filler

    def _leave_out(self, packed: Packed) -> None:
        """Exclude the documents of `exclude` from the loss."""
        for row, sample_index in enumerate(packed.sample_indices):
            source, spans = self._spans(sample_index)
            for span in spans:
                if span.position == span.end:  # only the separator behind the document
                    continue
                document = source.name, source.corpus.manifest.shards[span.block.shard].name, span.document
                stretch = row, span.position, span.end
                if document in self._excluded and stretch not in packed.ignore:
                    packed.ignore.append(stretch)

    def _spans(self, sample_index: int) -> tuple[SourceStream, list[Span]]:
        """The source of a sample, and the spans of documents in it."""
        sample, spans = self._find(sample_index), list[Span]()
        self._fill(sample, np.empty(self._width, dtype=np.int64), spans)
        return self._sources[sample.source], spans

    def provenance(self, sample_index: int) -> list[Piece]:
        """The origins of a sample's tokens, in order."""
        source, spans = self._spans(sample_index)
        return [_piece(source, span) for span in spans]

    def epoch_of(self, sample_index: int) -> int:
        """The epoch of its source in which a sample starts."""
        sample = self._find(sample_index)
        source = self._sources[sample.source]
        epoch, offset = source.start_of(sample.source_index)
        return epoch + (offset + sample.begin) // source.epoch_length

    def epochs_read(self, sample_index: int) -> dict[str, float]:
        """Epochs (also fractions) that each source has completed after samples [0, sample_index)."""
        group = self.pieces.group(sample_index)
        piece, inside = divmod(sample_index - group.sample, group.size)
        counts = np.array(self.mixture.counts(group.window))
        if sample_index > group.sample:  # of each window `piece` pieces, and one more of the first
            first, whole = (np.array(self.mixture.counts(group.window + n)) - counts for n in (inside, group.size))
            counts = counts + (piece * whole + first) / group.pieces
        return {
            source.name: count * source.length / source.epoch_length
            for source, count in zip(self._sources, counts.tolist(), strict=True)
        }


class _Sample(NamedTuple):
    """The place of a sample: `length` tokens from token `begin` on of a window of a source."""

    source: int
    source_index: int
    begin: int
    length: int


def _piece(source: SourceStream, span: Span) -> Piece:
    name = source.corpus.manifest.shards[span.block.shard].name
    first, length = span.block.text(span.at)
    return Piece(source.name, name, span.document, span.start - first, span.stop - first, length, span.position)


def _paired(name: str, corpus: Corpus, seed: int, lanes: int, slots: tuple[int, int] | None) -> Pairs:
    if slots is None:
        raise DataError(
            f"source {name!r} holds prompts with answers, which the causal objective would read as texts",
            remedy='set data.objective.kind = "glm", or leave the source out',
        )
    return Pairs(name, corpus, seed, lanes, slots=slots[0], slot=slots[1])
