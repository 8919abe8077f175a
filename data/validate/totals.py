"""Adds the measurements of files up for the whole corpus: counts, quantiles, and findings that need all documents.

Memory: 10 to 12 bytes per document (hashes and lengths).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.data.text.documents import FOREIGN_AGREEMENT, repeated

from .findings import EXAMPLES, Example, Findings
from .meter import Measurement, RunDocuments
from .report import FileFigures

GIANT_TIMES, GIANT_SHARE = 20, 0.01
"""A document is a giant from 20 times the 99th percentile of lengths and a hundredth of the corpus's tokens on."""
_JUDGED_DOCUMENTS = 3
Hashes = npt.NDArray[np.uint64]
_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


class Totals:
    """Adds up the measurements of named files."""

    def __init__(self, names: list[str]) -> None:
        self.findings = Findings()
        self.documents = self.tokens = 0
        self.files = [FileFigures(name) for name in names]
        self._runs: list[tuple[int, RunDocuments]] = []

    def add(self, file: int, measured: Measurement) -> None:
        """Add a measurement of file number `file`."""
        self.findings.merge(measured.findings)
        self.documents += measured.documents
        self.tokens += measured.tokens
        self.files[file].documents, self.files[file].tokens = measured.documents, measured.tokens
        self._runs += [(file, run) for run in measured.runs]
        self._judge(self.files[file], measured.agreement)

    def add_findings(self, held_out: Mapping[str, Hashes]) -> None:
        """Add the findings that need all documents: giants, duplicates, held-out documents."""
        if self.documents:
            self._giants()
            self._duplicates()
        for name, hashes in held_out.items():
            self._held_out(name, hashes)

    def lengths(self) -> dict[str, int]:
        """Quantiles of the document lengths, in tokens as stored."""
        if not self.documents:
            return {}
        lengths = np.concatenate([run.lengths for _, run in self._runs])
        values = np.quantile(lengths, [*_QUANTILES, 1], method="lower").tolist()
        return dict(zip([*(f"p{share * 100:g}" for share in _QUANTILES), "max"], values, strict=True))

    def _judge(self, file: FileFigures, agreement: list[float]) -> None:
        """Judge whether the tokenizer made a file, by the agreement of its sampled documents."""
        if len(agreement) >= _JUDGED_DOCUMENTS:
            file.agreement = float(np.median(agreement))
            if file.agreement < FOREIGN_AGREEMENT:
                note = f"{file.agreement:.1%} of the ids survive re-encoding (median of {len(agreement)} documents)"
                self.findings.note("foreign-tokens", file.name, note)

    def _giants(self) -> None:
        bound = max(GIANT_TIMES * self.lengths()["p99"], GIANT_SHARE * self.tokens, 2)
        giants = [
            (int(run.lengths[n]), file, run.first + n)
            for file, run in self._runs
            for n in np.flatnonzero(run.lengths >= bound).tolist()
        ]
        giants.sort(key=lambda giant: (-giant[0], *giant[1:]))
        examples = [
            Example(
                self.files[file].name, document, note=f"{tokens:_} tokens, {tokens / self.tokens:.1%} of the corpus"
            )
            for tokens, file, document in giants[:EXAMPLES]
        ]
        self.findings.add("giant-documents", len(giants), examples)

    def _duplicates(self) -> None:
        extra, values = repeated([run.hashes for _, run in self._runs])
        examples: list[Example] = []
        for value in values[:EXAMPLES]:
            copies = (
                (file, run.first + int(n)) for file, run in self._runs for n in np.flatnonzero(run.hashes == value)
            )
            (one, number), *others = islice(copies, EXAMPLES + 1)
            note = f"the same as {self.files[one].name}, document {number}"
            examples += [Example(self.files[file].name, again, note=note) for file, again in others]
        self.findings.add("duplicate-documents", extra, examples)

    def _held_out(self, name: str, hashes: Hashes) -> None:
        for file, run in self._runs:
            documents = np.flatnonzero(np.isin(run.hashes, hashes))
            note = f"also in the held-out corpus {name!r}"
            examples = [Example(self.files[file].name, run.first + int(n), note=note) for n in documents[:EXAMPLES]]
            self.findings.add("held-out-documents", len(documents), examples)
