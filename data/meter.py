"""Measurements of one token file, run by run: what `validate` is made of.

One pass, a handful of vectorised operations per run of a million tokens; whatever needs Python per token or a second
look is done for rare events (special tokens, suspects) or on a sample (unigrams, decoding). Memory: some 20 bytes per
token of a run, plus the histogram of the vocabulary and 8 bytes per document of the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from .corpus import Separators
from .documents import SAMPLE_TOKENS, agreements, degenerate, document_hashes, suspects
from .findings import EXAMPLES, Example, Findings
from .formats import Run
from .tokenizer import Tokenizer

MEASURED_TOKENS = 1_000_000
"""Tokens per run: small enough that a run is still in the processor's cache when it is looked at again."""
LONGEST = 100
"""Longest documents that are remembered of a file; more can not each be a hundredth of a corpus."""
_UNIGRAM_STRIDE = 16
_SAMPLED_DOCUMENTS, _SAMPLED_PER_RUN = 16, 8
_LENGTH_BINS = 64 * 58

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Vocabulary:
    """What the token ids should be."""

    size: int
    eod: int
    specials: frozenset[int]


@dataclass
class Measurement:
    """What was measured of a file, or of a part of it.

    Attributes:
        documents, tokens: as stored, separators included.
        findings: of the file.
        lengths: int64 [bins], documents by length; see `length_quantile`.
        longest: (tokens, document) of the `LONGEST` longest.
        unigrams: int64 [vocabulary], counts of sampled tokens.
        hashes: (number of the first document, uint64 [documents]) of each run.
        specials: {id: [at starts, at ends, inside]}, occurrences of each special token.
        agreement: of each sampled document with its second encoding; see `documents.agreements`.
    """

    documents: int = 0
    tokens: int = 0
    findings: Findings = field(default_factory=Findings)
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_LENGTH_BINS, dtype=np.int64))
    longest: list[tuple[int, int]] = field(default_factory=list)
    unigrams: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    hashes: list[tuple[int, npt.NDArray[np.uint64]]] = field(default_factory=list)
    specials: dict[int, list[int]] = field(default_factory=dict)
    agreement: list[float] = field(default_factory=list)


class SpecialFinder:
    """Finds special tokens in a run: by comparing, if their ids form a few ranges, else by a table."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = sorted(vocabulary.specials | {vocabulary.eod})
        breaks = [0, *(n for n in range(1, len(ids)) if ids[n] != ids[n - 1] + 1), len(ids)]
        self._ranges = [(ids[a], ids[b - 1]) for a, b in pairwise(breaks)]
        self._table = np.zeros(vocabulary.size, dtype=bool)
        self._table[[number for number in ids if number < vocabulary.size]] = True

    def __call__(self, tokens: npt.NDArray[Any]) -> Positions:
        """Positions of special tokens; ids outside the vocabulary never count."""
        if len(self._ranges) > 4:
            return np.flatnonzero(self._table.take(tokens, mode="clip"))
        mask: npt.NDArray[np.bool_] | None = None
        for low, high in self._ranges:
            hit = tokens == low if low == high else (tokens >= low) & (tokens <= high)
            mask = hit if mask is None else np.logical_or(mask, hit, out=mask)
        return np.flatnonzero(mask) if mask is not None and mask.any() else np.zeros(0, dtype=np.int64)


class Meter:
    """Measures the runs of one file.

    Args:
        name: of the file, for examples.
        vocabulary: what the ids should be.
        separators: what its documents were declared to carry.
        tokenizer: to encode sampled documents again.
        thin: sample the unigrams of a large file instead of counting all.
        flat: the file is one array cut at its separators: none can be missing, and one that stands alone is doubled.
    """

    def __init__(
        self,
        name: str,
        vocabulary: Vocabulary,
        separators: Separators,
        tokenizer: Tokenizer | None,
        *,
        thin: bool,
        flat: bool = False,
    ) -> None:
        self._name, self._vocabulary, self._separators, self._tokenizer = name, vocabulary, separators, tokenizer
        self._find, self._flat = SpecialFinder(vocabulary), flat
        self._stride = _UNIGRAM_STRIDE if thin else 1
        self._samples: list[list[int]] = []
        self.result = Measurement(unigrams=np.zeros(vocabulary.size, dtype=np.int64))

    def add(self, run: Run) -> None:
        """Measure one run."""
        view = _View(run)
        result, tokens = self.result, run.tokens
        result.documents += len(run.lengths)
        result.tokens += len(tokens)
        outside = self._outside(view)
        at = self._find(tokens)
        if len(outside) and len(at):
            at = np.setdiff1d(at, outside)
        body = self._separate(view, at)
        self._lengths(view, body)
        result.hashes.append((run.first, document_hashes(tokens, view.starts, view.ends)))
        notes = {int(n): degenerate(tokens[view.starts[n] : view.ends[n]]) for n in suspects(*view.spans)}
        self._report(view, "degenerate-documents", {n: note for n, note in notes.items() if note})
        sampled = tokens[:: self._stride]
        if len(outside):
            sampled = sampled[~outside_vocabulary(sampled, self._vocabulary.size)]
        result.unigrams += np.bincount(sampled.astype(np.int64), minlength=self._vocabulary.size)
        if self._tokenizer is not None:
            self._sample(view, body, min(self._vocabulary.size, self._tokenizer.vocab_size))

    def finish(self) -> Measurement:
        """The measurement, once all runs were added."""
        if self._tokenizer is not None:
            self.result.agreement = agreements(self._samples, self._tokenizer)
        return self.result

    def _outside(self, view: _View) -> Positions:
        """Positions of ids outside the vocabulary; the usual case costs one pass."""
        tokens, size = view.run.tokens, self._vocabulary.size
        if not len(tokens) or (int(tokens.max()) < size and (tokens.dtype.kind == "u" or int(tokens.min()) >= 0)):
            return np.zeros(0, dtype=np.int64)
        where = np.flatnonzero(outside_vocabulary(tokens, size))
        shown = where[:EXAMPLES]
        inside = view.document_of(shown)
        examples = [
            self._example(view, n, at, f"id {view.run.tokens[at]}")
            for n, at in zip(inside.tolist(), shown.tolist(), strict=True)
        ]
        self.result.findings.add("outside-vocabulary", len(where), examples)
        return where

    def _separate(self, view: _View, at: Positions) -> Positions:
        """Judge special tokens against the declared separators.

        Returns:
            int64 [documents], lengths without declared separators.
        """
        body = view.run.lengths.copy()
        inside = view.document_of(at)
        first, last = at == view.starts[inside], at == view.ends[inside] - 1
        is_eod = view.run.tokens[at] == self._vocabulary.eod
        self._tabulate(view.run.tokens[at], first, last)
        expected = is_eod & {"none": np.zeros_like(last), "trailing": last, "leading": first}[self._separators]
        body[inside[expected]] -= 1
        if self._separators != "none" and not self._flat:
            lacking = view.run.lengths > 0
            lacking[inside[expected]] = False
            edge = view.ends - 1 if self._separators == "trailing" else view.starts
            self._count(view, "separator-missing", np.flatnonzero(lacking), edge)
        if expected.all():
            return body
        foreign = np.bincount(inside[~expected], minlength=len(body))
        only = (foreign == body) & (body > 0)
        self._count(view, "special-only-documents", np.flatnonzero(only), view.starts)
        judged = ~only[inside] & (body[inside] > 0)
        self._count_at(view, "special-token", at[judged & ~is_eod], inside[judged & ~is_eod])
        keep = judged & is_eod
        self._groups(view, at[keep], inside[keep])
        body[only] = -1  # neither empty nor one token: already named
        return body

    def _groups(self, view: _View, at: Positions, inside: Positions) -> None:
        """Findings about groups of adjacent separators within documents."""
        if not len(at):
            return
        opens = np.ones(len(at), dtype=bool)
        opens[1:] = (np.diff(at) != 1) | (np.diff(inside) != 0)
        head = np.flatnonzero(opens)
        tail = np.append(head[1:], len(at)) - 1
        document = inside[head]
        at_start, at_end = at[head] == view.starts[document], at[tail] == view.ends[document] - 1
        doubled = tail > head
        chosen = {
            "separator-doubled": doubled,
            "separator-at-start": at_start & (self._separators != "leading"),
            "separator-at-end": at_end & ~at_start & (self._separators != "trailing"),
            "separator-inside": ~at_start & ~at_end,
        }
        for code, which in chosen.items():
            self._count_at(view, code, at[head[which]], document[which])

    def _tabulate(self, ids: npt.NDArray[Any], first: npt.NDArray[np.bool_], last: npt.NDArray[np.bool_]) -> None:
        places = np.where(first, 0, np.where(last, 1, 2))
        pairs, counts = np.unique(ids.astype(np.int64) * 3 + places, return_counts=True)
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            self.result.specials.setdefault(pair // 3, [0, 0, 0])[pair % 3] += count

    def _lengths(self, view: _View, body: Positions) -> None:
        result, lengths = self.result, view.run.lengths
        alone = self._flat and self._separators != "none"
        empty = np.flatnonzero(body == 0)
        self._count(view, "separator-doubled" if alone else "empty-documents", empty, view.starts if alone else None)
        self._count(view, "one-token-documents", np.flatnonzero(body == 1), view.starts)
        result.lengths += np.bincount(_length_bin(lengths), minlength=_LENGTH_BINS)
        least = result.longest[-1][0] if len(result.longest) == LONGEST else -1
        if len(lengths) and int(lengths.max()) > least:
            order = np.argsort(-lengths, kind="stable")[:LONGEST]
            here = [(int(lengths[n]), view.run.first + int(n)) for n in order]
            result.longest = sorted([*result.longest, *here], key=lambda pair: (-pair[0], pair[1]))[:LONGEST]

    def _sample(self, view: _View, body: Positions, size: int) -> None:
        """Remember the beginnings of a few documents of this run."""
        wanted = min(_SAMPLED_PER_RUN, _SAMPLED_DOCUMENTS - len(self._samples))
        good = np.flatnonzero(body >= SAMPLE_TOKENS // 4)
        count = max(0, min(wanted, len(good)))
        chosen = good[np.linspace(0, len(good) - 1, count).astype(np.int64)]
        hidden = self._vocabulary.specials | {self._vocabulary.eod}
        for n in chosen:
            ids = view.run.tokens[view.starts[n] : view.ends[n]][:SAMPLE_TOKENS].tolist()
            self._samples.append([i for i in ids if 0 <= i < size and i not in hidden])

    def _count(self, view: _View, code: str, documents: Positions, tokens: Positions | None = None) -> None:
        """Count documents, each found at one of its tokens (positions [documents of the run])."""
        shown = documents[:EXAMPLES].tolist()
        examples = [self._example(view, n, None if tokens is None else int(tokens[n])) for n in shown]
        self.result.findings.add(code, len(documents), examples)

    def _count_at(self, view: _View, code: str, at: Positions, inside: Positions) -> None:
        """Count documents (`inside`, sorted, may repeat) in which something stands at positions `at`."""
        documents, first = np.unique(inside, return_index=True)
        pairs = zip(documents[:EXAMPLES].tolist(), at[first[:EXAMPLES]].tolist(), strict=True)
        self.result.findings.add(code, len(documents), [self._example(view, n, place) for n, place in pairs])

    def _report(self, view: _View, code: str, notes: dict[int, str]) -> None:
        examples = [self._example(view, n, None, note) for n, note in list(notes.items())[:EXAMPLES]]
        self.result.findings.add(code, len(notes), examples)

    def _example(self, view: _View, n: int, at: int | None, note: str = "") -> Example:
        token = None if at is None else at - int(view.starts[n])
        return Example(self._name, view.run.first + n, token, note)


class _View:
    """A run with the bounds of its documents."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.ends = np.cumsum(run.lengths)
        self.starts = self.ends - run.lengths

    @property
    def spans(self) -> tuple[npt.NDArray[Any], Positions, Positions]:
        return self.run.tokens, self.starts, self.ends

    def document_of(self, at: Positions) -> Positions:
        """Number within the run of the document that holds each position."""
        found: Positions = np.searchsorted(self.ends, at, side="right")
        return found


def outside_vocabulary(tokens: npt.NDArray[Any], size: int) -> npt.NDArray[np.bool_]:
    """Which ids are at or above `size`, or negative; bool, of the shape of `tokens`."""
    outside: npt.NDArray[np.bool_] = tokens >= size
    return outside | (tokens < 0) if tokens.dtype.kind == "i" else outside


def _length_bin(lengths: Positions) -> Positions:
    """Bins of lengths: exact below 128, then 64 to each doubling."""
    octave = np.maximum(np.frexp(lengths.astype(np.float64))[1].astype(np.int64) - 7, 0)
    bins: Positions = octave * 64 + (lengths >> octave)
    return bins


def length_quantile(bins: npt.NDArray[np.int64], share: float) -> int:
    """Length below which a share of the documents lies, exact below 128 and low by at most 1.6 % above."""
    total = int(bins.sum())
    if not total:
        return 0
    found = int(np.searchsorted(np.cumsum(bins), min(total, int(share * (total - 1)) + 1)))
    octave = max(0, found // 64 - 1)
    return (found - octave * 64) << octave
