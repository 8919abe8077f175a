"""What separators the documents of a file really carry, measured against what was declared.

A declaration holds if every document carries exactly what it says: `trailing` one separator at its end and none
elsewhere, `leading` one at its beginning, `none` none at all. No document may hold an id outside the vocabulary or
another special token.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.errors import DataError

from .corpus import Separators
from .formats import Ints, Run
from .tokenizer import Tokenizer

_PLACES = 3
_CONTEXT = 6
_DOUBLED = "doubled separators"
_MISSING = "no separator"
_BOTH = "a separator at both ends, so two between documents"
_KINDS = (
    "what was declared",
    _DOUBLED,
    _MISSING,
    "a separator inside",
    _BOTH,
    "a separator at the end",
    "a separator at the beginning",
)
Mask = npt.NDArray[np.bool_]


class Measure:
    """Adds up over the runs of one file.

    Args:
        tokenizer: whose ids these should be.
        declared: what stored documents are said to carry.
        flat: the file is one array cut at its separators: it may begin or end inside a document, and a document that
            is nothing but its separator shows two separators side by side.

    Attributes:
        documents, tokens: seen so far, separators included in the tokens.
        empty: documents without any token but their separator.
        unterminated: stretches at an edge of a flat file that lack their separator.
    """

    def __init__(self, tokenizer: Tokenizer, declared: Separators, *, flat: bool) -> None:
        self._tokenizer, self._declared, self._flat = tokenizer, declared, flat
        self._special = np.zeros(tokenizer.vocab_size, dtype=bool)
        self._special[list(tokenizer.specials)] = True
        self._special[tokenizer.eod] = False
        self.documents = self.tokens = self.empty = self.unterminated = 0
        self._outside = self._foreign = self._separators = 0
        self._edge_alone = False
        self._fits: Counter[Separators] = Counter()
        self._wrong: Counter[str] = Counter()
        self._places: dict[str, list[str]] = {"outside": [], "foreign": [], "separators": []}

    @property
    def holds(self) -> bool:
        """Whether nothing so far contradicts the declaration."""
        return not (self._outside or self._foreign or self._wrong)

    def add(self, run: Run) -> Ints:
        """Look at every token of a run; int64 [documents], separators in each document."""
        tokens, lengths = run.tokens, run.lengths
        ends = np.cumsum(lengths)
        starts = ends - lengths
        self.documents += len(lengths)
        self.tokens += len(tokens)
        outside = tokens >= self._tokenizer.vocab_size
        if tokens.dtype.kind == "i":
            outside |= tokens < 0
        if outside.any():
            self._outside += int(np.count_nonzero(outside))
            self._note_all("outside", run, ends, np.flatnonzero(outside))
        else:
            foreign = np.flatnonzero(self._special.take(tokens))
            self._foreign += len(foreign)
            self._note_all("foreign", run, ends, foreign)
        at = np.flatnonzero(tokens == self._tokenizer.eod)
        self._separators += len(at)
        counts = np.diff(np.searchsorted(at, np.append(0, ends)))
        self._add_separators(run, starts, at, counts)
        return counts

    def _add_separators(self, run: Run, starts: Ints, at: Ints, counts: Ints) -> None:
        """Compare with the declaration: separators stand at tokens `at` of the run, `counts` in each document."""
        ends = starts + run.lengths
        owner = np.searchsorted(ends, at, "right")
        first, last, doubled = np.zeros((3, len(counts)), dtype=bool)
        first[owner[at == starts[owner]]] = True
        last[owner[at == ends[owner] - 1]] = True
        doubled[owner[1:][(np.diff(at) == 1) & (np.diff(owner) == 0)]] = True
        alone = (run.lengths == 1) & (counts == 1)
        fits: dict[Separators, Mask] = {
            "none": counts == 0,
            "trailing": (counts == 1) & last,
            "leading": (counts == 1) & first,
        }
        for name, where in fits.items():
            self._fits[name] += int(np.count_nonzero(where))
        self.empty += int(np.count_nonzero(run.lengths == counts))
        good = fits[self._declared]
        if self._flat and self._declared != "none":
            edge = counts == 0
            self.unterminated += int(np.count_nonzero(edge))
            doubled |= alone
            if self._declared == "leading":
                self._edge_alone = bool(alone[-1])
            elif run.first == 0:
                self._edge_alone = bool(alone[0])
            good = (good | edge) & ~alone
        if good.all():
            return
        inner = counts - first - last + alone
        kind = np.select([good, doubled, counts == 0, inner > 0, first & last & ~alone, last], range(6), 6)
        self._wrong.update({_KINDS[n]: count for n, count in enumerate(np.bincount(kind).tolist()) if n and count})
        for document in np.flatnonzero(~good)[: _PLACES - len(self._places["separators"])].tolist():
            held = at[owner == document]
            self._note("separators", run, int(held[-1]) if len(held) else max(0, int(ends[document]) - 1), document)

    def _note_all(self, kind: str, run: Run, ends: Ints, at: Ints) -> None:
        for position in at[: _PLACES - len(self._places[kind])].tolist():
            self._note(kind, run, position, int(np.searchsorted(ends, position, "right")))

    def _note(self, kind: str, run: Run, position: int, document: int) -> None:
        """Remember a place: document, token, and the text around it."""
        begin = max(0, position - _CONTEXT)
        near = run.tokens[begin : position + _CONTEXT].tolist()
        known = all(0 <= token < self._tokenizer.vocab_size for token in near)
        shown = repr(self._tokenizer.decode(near)) if known else f"ids {near}"
        token = position - int(run.lengths[:document].sum())
        self._places[kind].append(f"document {run.first + document}, token {token}: {shown}")

    def require(self, name: str) -> None:
        """Raise DataError, with counts, rates, first places and the declaration that would fit, unless it holds."""
        if self.unterminated and not self._separators:  # no cut at all: not the edge of anything
            self._wrong[_MISSING] += self.unterminated
        if self._outside:
            size = self._tokenizer.vocab_size
            raise DataError(
                f"{name}: {_share(self._outside, self.tokens, 'tokens')} are outside the vocabulary of {size}"
                + self._listed("outside"),
                remedy="name the tokenizer this corpus was made with, and the right type of the tokens (--dtype)",
            )
        if self._wrong:
            wrong = ", ".join(f"{count:_} with {kind}" for kind, count in self._wrong.items())
            raise DataError(
                f"{name}: {_share(sum(self._wrong.values()), self.documents, 'documents')} do not carry what "
                f"`--separators {self._declared}` declares: {wrong}" + self._listed("separators"),
                effect="the model would see other boundaries between documents than one separator each",
                remedy=self._remedy(),
            )
        if self._foreign:
            raise DataError(
                f"{name}: {_share(self._foreign, self.tokens, 'tokens')} are special tokens other than the separator"
                + self._listed("foreign"),
                effect="the packer would take every such document out of the loss",
                remedy="prepare the corpus again from its text, or name the right separator with --eod",
            )

    def _remedy(self) -> str:
        if self._edge_alone and self._wrong.total() == 1:
            edge, other = ("ends", "trailing") if self._declared == "leading" else ("begins", "leading")
            return f"the file {edge} with a separator: all documents fit `--separators {other}`: declare that"
        if self._wrong[_DOUBLED] or self._wrong[_BOTH]:
            return (
                "separators are doubled, as when two tools add one each (or documents are empty): "
                "prepare the corpus again from its text, or remove one of each pair"
            )
        fitting = [kind for kind in self._fits if kind != self._declared and self._fits[kind] == self.documents]
        if fitting:
            return f"all documents fit `--separators {fitting[0]}`: declare that"
        counts = ", ".join(f"{count:_} {kind}" for kind, count in self._fits.items())
        return f"no declaration fits all documents (those that fit: {counts}): prepare the corpus again from its text"

    def _listed(self, kind: str) -> str:
        return "".join(f"\n  at {place}" for place in self._places[kind])


def _share(count: int, total: int, what: str) -> str:
    return f"{count:_} of {total:_} {what} ({count / max(1, total):.3%})"
