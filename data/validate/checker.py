"""Checks the separators and other token ids of a file. `validate` reports the errors, `import` refuses the file.

A declaration of separators is true if every document carries exactly these: `trailing` one at its end and none
elsewhere, `leading` one at its beginning and none elsewhere, `none` none at all. No document may contain an id outside
the vocabulary or another special token. A flat array is cut into documents at its separators. So a document at the edge
of the file may lack its separator, and a document that is only a separator comes from two adjacent ones.
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
"""With at most so many ranges of special ids, comparing is faster than looking ids up in a table."""


class CheckedRun(NamedTuple):
    """The result of checking a run, for `validate` and `import`."""

    separators: Ints
    """[documents], number of separators in each."""
    text: Ints
    """[documents], tokens of each without its declared separator; -1 if a finding already reports it as empty."""


class _Specials(NamedTuple):
    """The special tokens of a run, in columns with one entry per token."""

    at: Ints  # position in the run
    document: Ints  # number of the document within the run
    is_separator: Mask  # whether it is the separator
    first: Mask  # whether it is the first token of its document, or
    last: Mask  # the last one

    def where(self, which: Mask) -> _Specials:
        """The entries that a mask selects."""
        return _Specials(
            self.at[which], self.document[which], self.is_separator[which], self.first[which], self.last[which]
        )


class TokenChecker:
    """Checks the runs of one file.

    Attributes:
        vocabulary: the vocabulary that the ids are checked against.
        findings: findings in the runs so far.
        documents, tokens: numbers in the runs so far; tokens include separators.
        empty: number of documents without any token except their declared separator.
        unterminated: number of documents at an edge of a flat file that lack their separator.
        beginning, ending: numbers of documents that begin or end with a separator.
    """

    def __init__(self, name: str, vocabulary: Vocabulary, declared: Separators, *, flat: bool) -> None:
        self._name, self.vocabulary, self._declared = name, vocabulary, declared
        self._cut_at_separators = flat and declared != "none"
        self.findings = Findings()
        self.documents = self.tokens = self.empty = self.unterminated = self.beginning = self.ending = 0
        self._separators = self._both_ends = 0
        self._matching: Counter[Separators] = Counter()  # documents for which each declaration is true
        ids = sorted(vocabulary.specials | {vocabulary.eod})
        breaks = [0, *(n for n in range(1, len(ids)) if ids[n] != ids[n - 1] + 1), len(ids)]
        self._ranges = [(ids[a], ids[b - 1]) for a, b in pairwise(breaks)]
        self._is_special = np.zeros(vocabulary.size, dtype=bool)
        self._is_special[[number for number in ids if number < vocabulary.size]] = True

    def add(self, run: Run) -> CheckedRun:
        """Check every token of a run."""
        self.documents += len(run.lengths)
        self.tokens += len(run.tokens)
        outside = self._outside_vocabulary(run)
        at = self._special_positions(run.tokens)
        if len(outside) and len(at):
            at = np.setdiff1d(at, outside)
        document, ids = run.document_of(at), run.tokens[at]
        first, last = at == run.starts[document], at == run.ends[document] - 1
        specials = _Specials(at, document, ids == self.vocabulary.eod, first, last)
        begins, ends, separators = self._count_separators(run, specials.where(specials.is_separator))
        has_declared = {"none": np.zeros_like(begins), "trailing": ends, "leading": begins}[self._declared]
        text = run.lengths - has_declared
        if self._cut_at_separators:
            self.unterminated += int(np.count_nonzero(separators == 0))
        elif self._declared != "none":
            missing = np.flatnonzero(~has_declared)
            edge = run.starts if self._declared == "leading" else np.maximum(run.ends - 1, run.starts)
            self.count(run, "separator-missing", missing, edge[missing])
            text[missing[run.lengths[missing] == 0]] = -1
        if len(at) > int(np.count_nonzero(has_declared)):
            self._report_undeclared(run, specials, text)
        empty = np.flatnonzero(text == 0)
        self.empty += len(empty)
        if self._cut_at_separators:
            self.count(run, "separator-doubled", empty, run.starts[empty])
        else:
            self.count(run, "empty-documents", empty)
        return CheckedRun(separators, text)

    def bounds(self, run: Run, checked: CheckedRun) -> tuple[Ints, Ints]:
        """Where the text of each document, without a declared separator, starts and ends: int64 [documents]."""
        separators = run.lengths - np.maximum(checked.text, 0)
        if self._declared == "leading":
            return run.starts + separators, run.ends
        return run.starts, run.ends - separators

    def finish(self) -> Findings:
        """The findings of the file, after all its runs were added."""
        if self.unterminated and not self._separators:  # the file has no separator at all, so it was not cut
            self.findings.add("separator-missing", self.unterminated, [Example(self._name, 0)])
        return self.findings

    @property
    def holds(self) -> bool:
        """Whether the declaration is true so far: there are no errors; warnings are allowed."""
        return self.findings.exit_code < 2

    def require(self, source: str, file: TokenFile, tokenizer: Tokenizer) -> None:
        """Raise DataError unless the declaration is true. The error lists the findings and suggests a remedy.

        Reads `file` again, up to the examples of the findings.
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
        """A remedy for the errors of the file, as text."""
        findings = self.findings.by_code
        if "outside-vocabulary" in findings:
            return "name the tokenizer this corpus was made with, or write ids that lost bits again, in a wider type"
        doubled = findings.get("separator-doubled")
        verb, opposite = ("ends", "trailing") if self._declared == "leading" else ("begins", "leading")
        at_edge = self.documents - 1 if self._declared == "leading" else 0
        if self._cut_at_separators and doubled and doubled.count == 1 and doubled.examples[0].document == at_edge:
            return f"the file {verb} with a separator: all documents fit `--separators {opposite}`: declare that"
        if doubled or self._both_ends:
            return (
                "separators are doubled, as when two tools add one each (or documents are empty): "
                "prepare the corpus again from its text, or remove one of each pair"
            )
        if self._matching[self._declared] == self.documents:
            return "prepare the corpus again from its text, or name the right separator with --eod"
        fitting = [kind for kind, count in self._matching.items() if count == self.documents]
        if fitting:
            return f"all documents fit `--separators {fitting[0]}`: declare that"
        counts = ", ".join(f"{count:_} {kind}" for kind, count in self._matching.items())
        return f"no declaration fits all documents (those that fit: {counts}): prepare the corpus again from its text"

    def _outside_vocabulary(self, run: Run) -> Ints:
        """Report ids outside the vocabulary and return their positions; takes one pass if there are none."""
        tokens, size = run.tokens, self.vocabulary.size
        if not len(tokens) or (int(tokens.max()) < size and (tokens.dtype.kind == "u" or int(tokens.min()) >= 0)):
            return np.zeros(0, dtype=np.int64)
        outside = np.flatnonzero((tokens >= size) | (tokens < 0))
        shown = outside[:EXAMPLES]
        places = zip(run.document_of(shown).tolist(), shown.tolist(), strict=True)
        examples = [self.example(run, document, at, f"id {tokens[at]}") for document, at in places]
        self.findings.add("outside-vocabulary", len(outside), examples)
        return outside

    def _special_positions(self, tokens: npt.NDArray[Any]) -> Ints:
        """Positions of special tokens, possibly also of ids outside the vocabulary."""
        if len(self._ranges) > _RANGES:
            return np.flatnonzero(self._is_special.take(tokens, mode="clip"))
        mask: Mask | None = None
        for low, high in self._ranges:
            in_range = tokens == low if low == high else (tokens >= low) & (tokens <= high)
            mask = in_range if mask is None else np.logical_or(mask, in_range, out=mask)
        return np.flatnonzero(mask) if mask is not None and mask.any() else np.zeros(0, dtype=np.int64)

    def _count_separators(self, run: Run, separators: _Specials) -> tuple[Mask, Mask, Ints]:
        """Count the separators of a run.

        Returns:
            [documents], whether each begins with one, whether each ends with one, and how many it has.
        """
        begins, ends = np.zeros((2, len(run.lengths)), dtype=bool)
        begins[separators.document[separators.first]] = True
        ends[separators.document[separators.last]] = True
        counts = np.bincount(separators.document, minlength=len(run.lengths))
        matching: dict[Separators, Mask] = {
            "none": counts == 0,
            "trailing": (counts == 1) & ends,
            "leading": (counts == 1) & begins,
        }
        self._matching.update({kind: int(np.count_nonzero(mask)) for kind, mask in matching.items()})
        self._separators += len(separators.at)
        self._both_ends += int(np.count_nonzero(begins & ends & (counts > 1)))
        self.beginning += int(np.count_nonzero(begins))
        self.ending += int(np.count_nonzero(ends))
        return begins, ends, counts

    def _report_undeclared(self, run: Run, specials: _Specials, text: Ints) -> None:
        """Report special tokens that were not declared. Sets `text` of documents without other tokens to -1."""
        declared = {"none": np.zeros_like(specials.last), "trailing": specials.last, "leading": specials.first}
        undeclared = ~(specials.is_separator & declared[self._declared])
        only = (np.bincount(specials.document[undeclared], minlength=len(text)) == text) & (text > 0)
        special_only = np.flatnonzero(only)
        self.count(run, "special-only-documents", special_only, run.starts[special_only])
        in_text = ~only[specials.document] & (text[specials.document] > 0)
        others = specials.where(in_text & ~specials.is_separator)
        self.count(run, "special-token", others.document, others.at)
        self._report_separators(run, specials.where(in_text & specials.is_separator))
        text[only] = -1

    def _report_separators(self, run: Run, separators: _Specials) -> None:
        """Report groups of adjacent separators within documents."""
        if not len(separators.at):
            return
        opens_group = np.ones(len(separators.at), dtype=bool)
        opens_group[1:] = (np.diff(separators.at) != 1) | (np.diff(separators.document) != 0)
        head = np.flatnonzero(opens_group)
        tail = np.append(head[1:], len(separators.at)) - 1
        at_start, at_end = separators.first[head], separators.last[tail]
        groups_by_code = {
            "separator-doubled": tail > head,
            "separator-at-start": at_start & (self._declared != "leading"),
            "separator-at-end": at_end & ~at_start & (self._declared != "trailing"),
            "separator-inside": ~at_start & ~at_end,
        }
        for code, groups in groups_by_code.items():
            self.count(run, code, separators.document[head[groups]], separators.at[head[groups]])

    def count(self, run: Run, code: str, documents: Ints, at: Ints | None = None) -> None:
        """Count documents of a run that have a defect.

        Args:
            documents: [defects], number of the document within the run; sorted, may repeat.
            at: [defects], position of the defect in the run; None: the whole document.
        """
        distinct, index = np.unique(documents, return_index=True)
        shown = zip(distinct[:EXAMPLES].tolist(), index[:EXAMPLES].tolist(), strict=True)
        examples = [self.example(run, document, None if at is None else int(at[i])) for document, i in shown]
        self.findings.add(code, len(distinct), examples)

    def example(self, run: Run, document: int, at: int | None = None, note: str = "") -> Example:
        """An example of a finding: a document (number within the run), and perhaps a position in the run."""
        token = None if at is None else at - int(run.starts[document])
        return Example(self._name, run.first + document, token, note)
