"""Measurements of one token file, run by run, for `validate`.

It takes one pass, with a few vectorised operations per run of a million tokens. Checks that need Python per token or a
second pass are made only for rare events (special tokens, suspects) or on a sample (decoding). Memory: some 20 bytes
per token of a run, and 10 to 12 per document of the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.data.corpus.formats import Ints, Run
from fsdp_pretrain.data.corpus.manifest import Vocabulary
from fsdp_pretrain.data.text.documents import SAMPLE_TOKENS, agreements, degenerate, document_hashes, suspects
from fsdp_pretrain.data.text.tokenizer import Tokenizer

from .checker import TokenChecker
from .findings import EXAMPLES, Findings

_SAMPLED_DOCUMENTS, _SAMPLED_PER_RUN = 16, 8


class RunDocuments(NamedTuple):
    """The documents of a run: number of the first, and [documents] their lengths and `document_hashes`."""

    first: int
    lengths: npt.NDArray[np.integer]
    hashes: npt.NDArray[np.uint64]


@dataclass
class Measurement:
    """The measurements of a file.

    Attributes:
        documents, tokens: numbers as stored, separators included.
        runs: the documents of each run.
        agreement: how far each sampled document agrees with its re-encoding, see
            `fsdp_pretrain.data.text.documents.agreements`.
    """

    findings: Findings
    documents: int = 0
    tokens: int = 0
    runs: list[RunDocuments] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)


class Meter:
    """Measures the runs of one file, in addition to its `TokenChecker`.

    `tokenizer`: encodes sampled documents again.
    """

    def __init__(self, checker: TokenChecker, vocabulary: Vocabulary, tokenizer: Tokenizer | None) -> None:
        self._checker, self._vocabulary, self._tokenizer = checker, vocabulary, tokenizer
        self._samples: list[list[int]] = []
        self._result = Measurement(self._checker.findings)

    def add(self, run: Run) -> None:
        """Measure one run."""
        checked = self._checker.add(run)
        short = np.flatnonzero(checked.text == 1)
        self._checker.count(run, "one-token-documents", short, run.starts[short])
        lengths = run.lengths.astype(np.min_scalar_type(int(run.lengths.max(initial=0))))
        hashes = document_hashes(run.tokens, run.starts, run.ends)
        self._result.runs.append(RunDocuments(run.first, lengths, hashes))
        self._find_degenerate(run)
        if self._tokenizer is not None:
            self._sample(run, checked.text, min(self._vocabulary.size, self._tokenizer.vocab_size))

    def finish(self) -> Measurement:
        """The measurement, after all runs were added."""
        self._checker.finish()
        self._result.documents, self._result.tokens = self._checker.documents, self._checker.tokens
        if self._tokenizer is not None:
            self._result.agreement = agreements(self._samples, self._tokenizer)
        return self._result

    def _find_degenerate(self, run: Run) -> None:
        examples = []
        for document in suspects(run.tokens, run.starts, run.ends).tolist():
            if note := degenerate(run.tokens[run.starts[document] : run.ends[document]]):
                examples.append(self._checker.example(run, document, note=note))
        self._result.findings.add("degenerate-documents", len(examples), examples[:EXAMPLES])

    def _sample(self, run: Run, text: Ints, size: int) -> None:
        """Keep the beginnings of a few documents of this run as samples. `text`: see `CheckedRun`."""
        wanted = min(_SAMPLED_PER_RUN, _SAMPLED_DOCUMENTS - len(self._samples))
        good = np.flatnonzero(text >= SAMPLE_TOKENS // 4)
        chosen = good[np.linspace(0, len(good) - 1, min(wanted, len(good))).astype(np.int64)]
        hidden = self._vocabulary.specials | {self._vocabulary.eod}
        for n in chosen:
            ids = run.tokens[run.starts[n] : run.ends[n]][:SAMPLE_TOKENS].tolist()
            self._samples.append([i for i in ids if 0 <= i < size and i not in hidden])
