"""Measures one token file for `validate`, run by run.

It takes one pass, with a few vectorised operations per run of a million tokens. Checks that need Python per token or a
second pass are made only for rare cases (special tokens, suspects of degenerate text) or on a sample (decoding).
Memory: some 20 bytes per token of a run, and 10 to 12 per document of the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.data.corpus.formats import Ints, Run
from fsdp_pretrain.data.text.documents import (
    FOREIGN_AGREEMENT,
    SAMPLE_TOKENS,
    agreements,
    degenerate,
    document_hashes,
    suspects,
)
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import DataError

from .checker import TokenChecker
from .contamination import Shared, shared_passages
from .findings import EXAMPLES, Findings
from .protected import ProtectedTexts

_SAMPLED_DOCUMENTS, _SAMPLED_PER_RUN = 16, 8
_JUDGED_DOCUMENTS = 3


class RunDocuments(NamedTuple):
    """The documents of a run: number of the first in its file, and [documents] their lengths and `document_hashes`."""

    first: int
    lengths: npt.NDArray[np.integer]
    hashes: npt.NDArray[np.uint64]


@dataclass
class Measurement:
    """The measurements of one file.

    Attributes:
        documents, tokens: numbers as stored, separators included.
        runs: the documents of each run.
        shared: passages of protected texts in the documents of each run.
        agreement: share of ids that stay the same when a document is decoded and encoded again, median of the sampled
            documents; None: too few samples, or no tokenizer.
    """

    name: str
    findings: Findings
    documents: int = 0
    tokens: int = 0
    runs: list[RunDocuments] = field(default_factory=list)
    shared: list[Shared] = field(default_factory=list)
    agreement: float | None = None


def measure(
    name: str,
    runs: Iterable[Run],
    checker: TokenChecker,
    tokenizer: Tokenizer | None,
    protected: ProtectedTexts | None = None,
) -> Measurement:
    """Check and measure the runs of a file, or those before its first damage.

    Args:
        tokenizer: encodes sampled documents again; None: this is not checked.
        protected: texts that the documents are compared with, if there is a tokenizer to decode them.
    """
    measured, samples = Measurement(name, checker.findings), list[list[int]]()
    try:
        for run in runs:
            checked = checker.add(run)
            text = checked.text
            short = np.flatnonzero(text == 1)
            checker.count(run, "one-token-documents", short, run.starts[short])
            lengths = run.lengths.astype(np.min_scalar_type(int(run.lengths.max(initial=0))))
            hashes = document_hashes(run.tokens, *checker.bounds(run, checked))
            measured.runs.append(RunDocuments(run.first, lengths, hashes))
            _find_degenerate(run, checker)
            if tokenizer is not None:
                samples += _sample(run, text, checker, tokenizer, _SAMPLED_DOCUMENTS - len(samples))
                if protected is not None:
                    measured.shared.append(shared_passages(run, tokenizer, protected))
    except (DataError, OSError) as error:
        checker.findings.unreadable(name, error)
    checker.finish()
    measured.documents, measured.tokens = checker.documents, checker.tokens
    if tokenizer is not None and len(shares := agreements(samples, tokenizer)) >= _JUDGED_DOCUMENTS:
        measured.agreement = float(np.median(shares))
        if measured.agreement < FOREIGN_AGREEMENT:
            note = f"{measured.agreement:.1%} of the ids survive re-encoding (median of {len(shares)} documents)"
            checker.findings.note("foreign-tokens", name, note)
    return measured


def _find_degenerate(run: Run, checker: TokenChecker) -> None:
    examples = []
    for document in suspects(run.tokens, run.starts, run.ends).tolist():
        if note := degenerate(run.tokens[run.starts[document] : run.ends[document]]):
            examples.append(checker.example(run, document, note=note))
    checker.findings.add("degenerate-documents", len(examples), examples[:EXAMPLES])


def _sample(run: Run, text: Ints, checker: TokenChecker, tokenizer: Tokenizer, most: int) -> list[list[int]]:
    """The beginnings of up to `most` documents of a run, without special tokens. `text`: see `CheckedRun`."""
    long, vocabulary = np.flatnonzero(text >= SAMPLE_TOKENS // 4), checker.vocabulary
    sampled = long[np.linspace(0, len(long) - 1, min(_SAMPLED_PER_RUN, most, len(long))).astype(np.int64)]
    specials, size = vocabulary.specials | {vocabulary.eod}, min(vocabulary.size, tokenizer.vocab_size)
    beginnings = [run.tokens[run.starts[n] : run.ends[n]][:SAMPLE_TOKENS].tolist() for n in sampled]
    return [[i for i in ids if 0 <= i < size and i not in specials] for ids in beginnings]
