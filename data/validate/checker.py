"""Checks what the documents of a file carry: `validate` reports the findings, `import` refuses because of them.

A declaration holds if every document carries exactly what it says: `trailing` one separator at its end and none
elsewhere, `leading` one at its beginning, `none` none at all. No document may hold an id outside the vocabulary or
another special token. In a flat array, which is cut at its separators, a document at the edge of the file may lack its
separator, and a document that is only its separator shows two adjacent ones.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.data.corpus.formats import Ints, Run, TokenFile
from fsdp_pretrain.data.corpus.manifest import Separators, Vocabulary
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import DataError

from .findings import EXAMPLES, Example, Findings
from .texts import add_texts

Mask = npt.NDArray[np.bool_]
_RANGES = 4
"""Up to this many ranges of special ids comparing is faster than a table."""


class CheckedRun(NamedTuple):
    """What was found in a run, for those that measure or copy it."""

    separators: Ints
    """[documents] separators in each."""
    text: Ints
    """[documents] tokens without the declared separator; -1 if a finding already reports the document as empty."""


class _Specials(NamedTuple):
    """The special tokens of a run, one entry each."""

    at: Ints
    document: Ints
    is_separator: Mask
    first: Mask
    last: Mask

    def where(self, which: Mask) -> _Specials:
        return _Specials(
            self.at[which], self.document[which], self.is_separator[which], self.first[which], self.last[which]
        )


class TokenChecker:
    """Checks the runs of one file.

    Attributes:
        vocabulary: that the ids are checked against.
        findings: of the runs added.
        documents, tokens: of the runs added, separators included in the tokens.
        empty: documents without any token except their declared separator.
        unterminated: pieces at an edge of a flat file that lack their separator.
        beginning, ending: documents that begin or end with a separator.
    """

    def __init__(self, name: str, vocabulary: Vocabulary, declared: Separators, *, flat: bool) -> None:
        self._name, self.vocabulary, self._declared = name, vocabulary, declared
        self._cut = flat and declared != "none"
        self.findings = Findings()
        self.documents = self.tokens = self.empty = self.unterminated = self.beginning = self.ending = 0
        self._separators = self._both_ends = 0
        self._fitting: Counter[Separators] = Counter()
        ids = sorted(vocabulary.specials | {vocabulary.eod})
        breaks = [0, *(n for n in range(1, len(ids)) if ids[n] != ids[n - 1] + 1), len(ids)]
        self._ranges = [(ids[a], ids[b - 1]) for a, b in pairwise(breaks)]
        self._table = np.zeros(vocabulary.size, dtype=bool)
        self._table[[number for number in ids if number < vocabulary.size]] = True

    def add(self, run: Run) -> CheckedRun:
        """Check every token of a run."""
        self.documents += len(run.lengths)
        self.tokens += len(run.tokens)
        outside = self._outside(run)
        at = self._find(run.tokens)
        if len(outside) and len(at):
            at = np.setdiff1d(at, outside)
        inside, ids = run.document_of(at), run.tokens[at]
        first, last = at == run.starts[inside], at == run.ends[inside] - 1
        specials = _Specials(at, inside, ids == self.vocabulary.eod, first, last)
        begin, end, separators = self._add_separators(run, specials.where(specials.is_separator))
        carrying = {"none": np.zeros_like(begin), "trailing": end, "leading": begin}[self._declared]
        text = run.lengths - carrying
        if self._cut:
            self.unterminated += int(np.count_nonzero(separators == 0))
        elif self._declared != "none":
            lacking = np.flatnonzero(~carrying)
            edge = run.starts if self._declared == "leading" else np.maximum(run.ends - 1, run.starts)
            self.count(run, "separator-missing", lacking, edge[lacking])
            text[lacking[run.lengths[lacking] == 0]] = -1
        if len(at) > int(np.count_nonzero(carrying)):
            self._name_undeclared(run, specials, text)
        empty = np.flatnonzero(text == 0)
        self.empty += len(empty)
        if self._cut:
            self.count(run, "separator-doubled", empty, run.starts[empty])
        else:
            self.count(run, "empty-documents", empty)
        return CheckedRun(separators, text)

    def finish(self) -> Findings:
        """The findings, after all runs were added."""
        if self.unterminated and not self._separators:  # no cut at all: not just an edge
            self.findings.add("separator-missing", self.unterminated, [Example(self._name, 0)])
        return self.findings

    @property
    def holds(self) -> bool:
        """Whether nothing contradicts the declaration yet; warnings do not."""
        return self.findings.exit_code < 2

    def require(self, source: str, file: TokenFile, tokenizer: Tokenizer) -> None:
        """Raise DataError with findings, rates, first places and a declaration that would fit, unless it holds.

        Reads `file` once more, up to the places.
        """
        errors = [finding for finding in self.finish().by_code.values() if finding.kind.severity == "error"]
        if not errors:
            return
        add_texts([example for finding in errors for example in finding.examples], self._name, file, tokenizer)
        cause = f"{source} does not hold what `--separators {self._declared}` and the tokenizer declare:"
        for finding in errors:
            total = self.tokens if finding.kind.unit == "tokens" else self.documents
            share = f"{finding.count:_} of {total:_} {finding.kind.unit} ({finding.count / total:.3%})"
            cause += f"\n  {finding.code}: {share}: {finding.kind.meaning}"
            cause += "".join(f"\n    at {example}" for example in finding.examples)
        raise DataError(
            cause,
            effect="the model would train on ids outside any text, or on wrong document boundaries",
            remedy=self._remedy(),
        )

    def _remedy(self) -> str:
        found = self.findings.by_code
        if "outside-vocabulary" in found:
            return "name the tokenizer this corpus was made with, and the right type of the tokens (--dtype)"
        doubled = found.get("separator-doubled")
        edge = ("ends", "trailing") if self._declared == "leading" else ("begins", "leading")
        at_edge = self.documents - 1 if self._declared == "leading" else 0
        if self._cut and doubled and doubled.count == 1 and doubled.examples[0].document == at_edge:
            return f"the file {edge[0]} with a separator: all documents fit `--separators {edge[1]}`: declare that"
        if doubled or self._both_ends:
            return (
                "separators are doubled, as when two tools add one each (or documents are empty): "
                "prepare the corpus again from its text, or remove one of each pair"
            )
        if self._fitting[self._declared] == self.documents:
            return "prepare the corpus again from its text, or name the right separator with --eod"
        fitting = [kind for kind, count in self._fitting.items() if count == self.documents]
        if fitting:
            return f"all documents fit `--separators {fitting[0]}`: declare that"
        counts = ", ".join(f"{count:_} {kind}" for kind, count in self._fitting.items())
        return f"no declaration fits all documents (those that fit: {counts}): prepare the corpus again from its text"

    def _outside(self, run: Run) -> Ints:
        """Positions of ids outside the vocabulary; the usual case costs one pass."""
        tokens, size = run.tokens, self.vocabulary.size
        if not len(tokens) or (int(tokens.max()) < size and (tokens.dtype.kind == "u" or int(tokens.min()) >= 0)):
            return np.zeros(0, dtype=np.int64)
        found = np.flatnonzero((tokens >= size) | (tokens < 0))
        shown = found[:EXAMPLES]
        places = zip(run.document_of(shown).tolist(), shown.tolist(), strict=True)
        examples = [self.example(run, document, at, f"id {tokens[at]}") for document, at in places]
        self.findings.add("outside-vocabulary", len(found), examples)
        return found

    def _find(self, tokens: npt.NDArray[Any]) -> Ints:
        """Positions of special tokens, possibly also of ids outside the vocabulary."""
        if len(self._ranges) > _RANGES:
            return np.flatnonzero(self._table.take(tokens, mode="clip"))
        mask: Mask | None = None
        for low, high in self._ranges:
            hit = tokens == low if low == high else (tokens >= low) & (tokens <= high)
            mask = hit if mask is None else np.logical_or(mask, hit, out=mask)
        return np.flatnonzero(mask) if mask is not None and mask.any() else np.zeros(0, dtype=np.int64)

    def _add_separators(self, run: Run, held: _Specials) -> tuple[Mask, Mask, Ints]:
        """Count separators; [documents] whether each begins, and ends, with one, and how many it has."""
        begin, end = np.zeros((2, len(run.lengths)), dtype=bool)
        begin[held.document[held.first]] = True
        end[held.document[held.last]] = True
        counts = np.bincount(held.document, minlength=len(run.lengths))
        fitting: dict[Separators, Mask] = {
            "none": counts == 0,
            "trailing": (counts == 1) & end,
            "leading": (counts == 1) & begin,
        }
        self._fitting.update({kind: int(np.count_nonzero(where)) for kind, where in fitting.items()})
        self._separators += len(held.at)
        self._both_ends += int(np.count_nonzero(begin & end & (counts > 1)))
        self.beginning += int(np.count_nonzero(begin))
        self.ending += int(np.count_nonzero(end))
        return begin, end, counts

    def _name_undeclared(self, run: Run, specials: _Specials, text: Ints) -> None:
        """Report special tokens that were not declared; sets `text` of documents that hold no others to -1."""
        declared = {"none": np.zeros_like(specials.last), "trailing": specials.last, "leading": specials.first}
        undeclared = ~(specials.is_separator & declared[self._declared])
        only = (np.bincount(specials.document[undeclared], minlength=len(text)) == text) & (text > 0)
        alone = np.flatnonzero(only)
        self.count(run, "special-only-documents", alone, run.starts[alone])
        mixed = ~only[specials.document] & (text[specials.document] > 0)
        foreign = specials.where(mixed & ~specials.is_separator)
        self.count(run, "special-token", foreign.document, foreign.at)
        self._name_separators(run, specials.where(mixed & specials.is_separator))
        text[only] = -1

    def _name_separators(self, run: Run, held: _Specials) -> None:
        """Report groups of adjacent separators within documents."""
        if not len(held.at):
            return
        opens = np.ones(len(held.at), dtype=bool)
        opens[1:] = (np.diff(held.at) != 1) | (np.diff(held.document) != 0)
        head = np.flatnonzero(opens)
        tail = np.append(head[1:], len(held.at)) - 1
        at_start, at_end = held.first[head], held.last[tail]
        chosen = {
            "separator-doubled": tail > head,
            "separator-at-start": at_start & (self._declared != "leading"),
            "separator-at-end": at_end & ~at_start & (self._declared != "trailing"),
            "separator-inside": ~at_start & ~at_end,
        }
        for code, which in chosen.items():
            self.count(run, code, held.document[head[which]], held.at[head[which]])

    def count(self, run: Run, code: str, documents: Ints, at: Ints | None = None) -> None:
        """Count documents of a run (sorted, may repeat), each found by the token at a position of the run."""
        found, index = np.unique(documents, return_index=True)
        shown = zip(found[:EXAMPLES].tolist(), index[:EXAMPLES].tolist(), strict=True)
        examples = [self.example(run, document, None if at is None else int(at[i])) for document, i in shown]
        self.findings.add(code, len(found), examples)

    def example(self, run: Run, document: int, at: int | None = None, note: str = "") -> Example:
        """An example: a document of the run, at a position of the run."""
        token = None if at is None else at - int(run.starts[document])
        return Example(self._name, run.first + document, token, note)
