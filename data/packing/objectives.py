"""Blank infilling (GLM): packed samples become inputs, labels and positions with blanks to fill.

A sample from the packer is a row of text, or `slots` prompts with their answers. It becomes `slots` slots of equal
size, which do not see each other, or one slot of the whole sequence. In each slot all tokens see the prefix, and tokens
after the prefix also see the tokens before themselves:

    blanks          text with each span replaced by [MASK] | sop span, for every span, in random order
    ending          text up to a place, [gMASK]            | sop rest
    answer          prompt, [MASK]                         | sop answer

A label is at the input that predicts it. Labels are the spans, each with eop; the rest; the answer with eop. The prefix
has none. The remainder of a slot is padding (id 0, position 0).

All randomness of a sample comes from (data seed, source name, index in the source, slot) by `data/corpus/hashing.py`.
A change that makes another sample of the same text must raise `VERSION`, which every checkpoint records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.config.data_section import GLMObjective
from fsdp_pretrain.data.corpus.hashing import key_of, uniforms
from fsdp_pretrain.data.corpus.manifest import TokenizerEntry
from fsdp_pretrain.errors import ConfigError

from .packer import Packed

IGNORE = -100
"""Label of tokens that are not learned; the default `ignore_index` of PyTorch's losses."""
VERSION = 1
"""Version of the construction; part of a run's identity."""
LONGEST_SPAN = 39
_SPAN_MEAN = 3.0
"""Mean of the Poisson distribution of a span's length, before it is limited to 1 to `LONGEST_SPAN` tokens."""
_BUDGET = 0.15
"""Least share of a piece's tokens that are blanked."""
_SINGLE = 0.02
"""Share of pieces with exactly one blank."""
_SHORT, SHORTEST = 0.02, 32
"""Share of pieces that are cut to a random length, and their minimum tokens."""
_ENDING = 0.2
"""Shortest ending, as a share of the row; the longest is the whole row. All as in GLM-130B."""

Ints = npt.NDArray[np.int64]
Scheme = Literal["arange", "mask"]


class Specials(NamedTuple):
    """Ids of the objective's special tokens. `smask` and `eod` are reserved to keep the published order."""

    mask: int
    gmask: int
    smask: int
    eod: int
    sop: int
    eop: int

    @classmethod
    def behind(cls, vocab_size: int) -> Specials:
        """The ids that follow those of a tokenizer."""
        return cls(*range(vocab_size, vocab_size + len(cls._fields)))

    @classmethod
    def of(cls, tokenizer: TokenizerEntry, vocab: int) -> Specials:
        """The ids that follow those of a tokenizer. Raises ConfigError if a model of `vocab` ids does not have them."""
        ids = cls.behind(tokenizer.vocab_size)
        if ids[-1] >= vocab:
            raise ConfigError(
                f"model.vocab = {vocab}, but the objective's special tokens have the ids {ids[0]} to {ids[-1]}",
                effect="ids above the embedding table would crash a GPU kernel in the middle of a run",
                remedy=f"set model.vocab to at least {ids[-1] + 1}",
            )
        return ids


@dataclass(slots=True)
class Slot:
    """One slot without its padding; arrays are int64 [length]."""

    inputs: Ints
    labels: Ints
    """-100 where nothing is learned."""
    prefix: int
    """Number of leading tokens, which every token of the slot sees."""
    place: Ints
    """First dimension of positions: a masked span counts as one token; a blank has the position of its mask."""
    inside: Ints
    """Second dimension: 0 in the prefix, then 1 (sop), 2, ... in each blank."""

    def line(self, scheme: Scheme) -> Ints:
        """One-dimensional positions: int64 [length].

        `arange` counts up; `mask` gives all tokens of a blank the position of their mask.
        """
        return np.arange(len(self.inputs)) if scheme == "arange" else self.place


def fill_blanks(text: Ints, targets: Ints, starts: Ints, lengths: Ints, order: Ints, ids: Specials) -> Slot:
    """The slot of a text with blanks: the text with masks, then the blanks in `order`.

    `targets` [T] are the tokens of `text` [T], or -100 where one is not to be learned; `starts` and `lengths` [n] are
    the spans, ascending and at least one token apart; `order` is a permutation of range(n).
    """
    size, count, total = len(text), len(starts), int(lengths.sum())
    prefix, blanks = size - total + count, total + count
    edges = np.zeros(size + 1, dtype=np.int64)
    edges[starts] = 1
    edges[starts + lengths] = -1
    kept = np.cumsum(edges[:-1]) == 0
    kept[starts] = True
    masked = text.copy()
    masked[starts] = ids.mask
    masks = starts - np.cumsum(lengths) + lengths + np.arange(count)  # their places in the prefix

    sizes = lengths[order] + 1
    ends = np.cumsum(sizes)
    firsts = ends - sizes
    inside = np.arange(1, blanks + 1) - np.repeat(firsts, sizes)
    source = np.repeat(starts[order], sizes) + inside - 1  # the token predicted at each place
    inputs, labels = np.empty((2, prefix + blanks), dtype=np.int64)
    inputs[:prefix] = masked[kept]
    labels[:prefix] = IGNORE
    inputs[prefix:] = text[source - 1]
    inputs[prefix + firsts] = ids.sop
    labels[prefix:] = targets.take(source, mode="clip")  # after the last token comes eop
    labels[prefix + ends - 1] = ids.eop
    place, within = np.zeros((2, prefix + blanks), dtype=np.int64)
    place[:prefix] = np.arange(prefix)
    place[prefix:] = np.repeat(masks[order], sizes)
    within[prefix:] = inside
    return Slot(inputs, labels, prefix, place, within)


def continue_text(context: Ints, rest: Ints, targets: Ints, mask: int, sop: int, end: int | None) -> Slot:
    """The slot of a context [c] and its continuation `rest` [g], g > 0: the end of a text, or the answer to a prompt.

    `targets` [g] are the tokens of the rest, or -100 where one is not to be learned. `mask` follows the context, `sop`
    precedes the rest, and `end`, if given, is the label after it.
    """
    prefix, shown = len(context) + 1, rest if end is not None else rest[:-1]
    inputs, labels = np.empty((2, prefix + 1 + len(shown)), dtype=np.int64)
    inputs[: prefix - 1], inputs[prefix - 1], inputs[prefix], inputs[prefix + 1 :] = context, mask, sop, shown
    labels[:prefix], labels[prefix : prefix + len(rest)] = IGNORE, targets
    if end is not None:
        labels[-1] = end
    place = np.minimum(np.arange(len(inputs)), prefix - 1)
    inside = np.arange(len(inputs)) - place
    return Slot(inputs, labels, prefix, place, inside)


class SpanSampler:
    """Draws the spans of pieces of text of `piece` tokens, which may become `slot` tokens."""

    def __init__(self, objective: GLMObjective, piece: int, slot: int) -> None:
        self._objective, self._piece, self._slot = objective, piece, slot
        weight, weights = 1.0, []
        for length in range(1, LONGEST_SPAN + 1):  # Poisson, up to a factor; gives the same bits on every machine
            weight *= _SPAN_MEAN / length
            weights.append(weight)
        sums = np.array(list(accumulate(weights)))
        self._cumulative = sums / sums[-1]
        self._budgets = (_BUDGET * np.arange(piece + 1)).astype(np.int64)
        self._draws = max(1, int(self._budgets[-1]))  # a span has at least one token

    def draw(self, key: int) -> tuple[int, Ints, Ints, Ints]:
        """Draw spans from a key. Returns the tokens used of the piece, starts and lengths of the spans, and the order
        of their blanks."""
        objective, size = self._objective, self._piece
        chance = uniforms(key, 3 + 3 * self._draws)
        single = chance[0] < _SINGLE
        if chance[1] < _SHORT and size > SHORTEST:
            size = SHORTEST + int(chance[2] * (size - SHORTEST))
        by_span = chance[3:].reshape(3, self._draws)
        lengths = 1 + np.minimum(self._cumulative.searchsorted(by_span[0], "right"), LONGEST_SPAN - 1)
        sums = np.cumsum(lengths)
        count = 1 if single else int(sums.searchsorted(self._budgets[size])) + 1  # until the budget is reached
        if objective.overflow == "shrink" and size + 2 * count > self._slot:
            sizes = np.arange(1, size + 1)
            counts = np.ones_like(sizes) if single else sums.searchsorted(self._budgets[1 : size + 1]) + 1
            size = int((sizes + 2 * counts).searchsorted(self._slot, "right"))
            count = int(counts[size - 1])
        lengths = lengths[:count]
        before = int(sums[count - 1] - lengths[-1])
        lengths[-1] = min(lengths[-1], size - before - (count - 1))  # in tiny pieces: keep a token between spans
        free = size - before - int(lengths[-1]) - count + 1
        places = np.sort((by_span[1, :count] * (free + 1)).astype(np.int64))
        starts = places + np.cumsum(lengths) - lengths + np.arange(count)
        return size, starts, lengths, by_span[2, :count].argsort(kind="stable")


@dataclass(slots=True)
class Infilled:
    """Samples with blanks, ready for a model."""

    inputs: Ints
    """[n, S]"""
    labels: Ints
    """[n, S], -100 where nothing is learned."""
    lengths: npt.NDArray[np.int32]
    """[n, slots], lengths of the slots, padding included, which sum to S; zero-padded."""
    prefix: npt.NDArray[np.int32]
    """[n, slots], length of the prefix of each slot."""
    positions: Ints
    """[n, S], or [n, 2, S] in two dimensions."""


class Infilling:
    """The objective as a pure function: turns packed samples into samples of `sequence_length` tokens with blanks.

    Args:
        seed: the data seed.
        names, pairs, separator: those of the packer.
        two_dimensions: whether positions have two dimensions.
    """

    def __init__(
        self,
        objective: GLMObjective,
        sequence_length: int,
        *,
        seed: int,
        names: Sequence[str],
        pairs: Sequence[int],
        separator: int,
        ids: Specials,
        two_dimensions: bool = False,
    ) -> None:
        self._objective, self._seed, self.length = objective, seed, sequence_length
        self._names, self._pairs, self._separator = names, frozenset(pairs), separator
        self._ids = ids
        self._slots, self._flat = objective.slots, not two_dimensions
        self._slot, self._piece = sequence_length // self._slots, objective.row // self._slots
        self._spans = SpanSampler(objective, self._piece, self._slot)
        self._shortest = max(1, int(_ENDING * objective.row))

    def empty(self, count: int) -> Infilled:
        """`count` samples of one slot of padding, with nothing to learn."""
        shape = (count, self.length)
        lengths, prefix = np.zeros((2, count, self._slots), dtype=np.int32)
        lengths[:, 0] = self.length
        positions = np.zeros(shape if self._flat else (count, 2, self.length), dtype=np.int64)
        return Infilled(np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64), lengths, prefix, positions)

    def apply(self, packed: Packed) -> Infilled:
        """Make samples with blanks; tokens of `packed.ignore` are not learned."""
        out, targets = self.empty(len(packed.tokens)), packed.tokens
        if packed.ignore:
            targets = packed.tokens.copy()
            for row, start, stop in packed.ignore:
                targets[row, start:stop] = IGNORE
        for row, (source, number) in enumerate(
            zip(packed.sources.tolist(), packed.source_indices.tolist(), strict=True)
        ):
            if source in self._pairs:
                self._answers(out, row, packed.tokens[row], targets[row])
            else:
                self._blanks_or_ending(out, row, packed.tokens[row], targets[row], (self._names[source], number))
        return out

    def _blanks_or_ending(self, out: Infilled, row: int, text: Ints, targets: Ints, sample: tuple[str, int]) -> None:
        """Write a row of text with short blanks in each slot, or with one long ending."""
        objective, ids, size = self._objective, self._ids, self._objective.row
        kind, where = uniforms(key_of(self._seed, *sample, "infilling"), 2).tolist()
        if kind >= objective.mask_share:
            context = size - self._shortest - int(where * (size - self._shortest + 1))
            rest = slice(context, size)
            slot = continue_text(text[:context], text[rest], targets[rest], ids.gmask, ids.sop, None)
            self._put(out, row, 0, slot, "arange")
            return
        out.lengths[row] = self._slot
        for number in range(self._slots):
            key = key_of(self._seed, *sample, "infilling", number)
            used, starts, lengths, order = self._spans.draw(key)
            piece = slice(number * self._piece, number * self._piece + used)
            self._put(out, row, number, fill_blanks(text[piece], targets[piece], starts, lengths, order, ids), "mask")

    def _answers(self, out: Infilled, row: int, text: Ints, targets: Ints) -> None:
        """Write a prompt with its answer into each slot; in `text` both are followed by a separator, see `pairs`."""
        ids = self._ids
        out.lengths[row] = self._slot
        for number in range(self._slots):
            at = number * self._slot
            here = text[at : at + self._slot]
            middle, end = np.flatnonzero(here == self._separator).tolist()
            label = targets[at + middle + 1 : at + end]
            if (targets[at : at + middle] == IGNORE).any():  # without its prompt, an answer is not learned either
                label = np.full_like(label, IGNORE)
            slot = continue_text(here[:middle], here[middle + 1 : end], label, ids.mask, ids.sop, ids.eop)
            self._put(out, row, number, slot, "arange")

    def _put(self, out: Infilled, row: int, number: int, slot: Slot, scheme: Scheme) -> None:
        """Write a slot, truncated to its size."""
        first = number * self._slot
        size = min(len(slot.inputs), int(out.lengths[row, number]))
        here = slice(first, first + size)
        out.inputs[row, here], out.labels[row, here] = slot.inputs[:size], slot.labels[:size]
        out.prefix[row, number] = slot.prefix
        if self._flat:
            out.positions[row, here] = slot.line(scheme)[:size]
        else:
            out.positions[row, 0, here], out.positions[row, 1, here] = slot.place[:size], slot.inside[:size]
