"""A corpus from the measurements of its files: counts, quantiles, and the findings that need the whole.

Memory: 8 bytes per document (hashes).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice

import numpy as np
import numpy.typing as npt

from data.text.documents import FOREIGN_AGREEMENT, repeated

from .findings import EXAMPLES, Example, Findings
from .meter import LONGEST, Measurement, length_quantile
from .report import FileFigures, SpecialPlaces

GIANT_TIMES, GIANT_SHARE = 20, 0.01
"""A document is giant at 20 times the 99th percentile of the lengths and a hundredth of the corpus's tokens."""
_JUDGED_DOCUMENTS = 3
Hashes = npt.NDArray[np.uint64]
_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


class Totals:
    """Adds up the measurements of named files."""

    def __init__(self, names: list[str]) -> None:
        self.findings = Findings()
        self.documents = self.tokens = 0
        self.files = [FileFigures(name) for name in names]
        self._lengths: npt.NDArray[np.int64] | None = None
        self._longest: list[tuple[int, int, int]] = []
        self._hashes: list[tuple[int, int, Hashes]] = []
        self._specials: Counter[tuple[int, int]] = Counter()

    def add(self, file: int, measured: Measurement) -> None:
        """Add a measurement of file number `file`."""
        self.findings.merge(measured.findings)
        self.documents += measured.documents
        self.tokens += measured.tokens
        self.files[file].documents, self.files[file].tokens = measured.documents, measured.tokens
        self._lengths = measured.lengths if self._lengths is None else self._lengths + measured.lengths
        here = [(tokens, file, document) for tokens, document in measured.longest]
        self._longest = sorted([*self._longest, *here], key=lambda item: (-item[0], *item[1:]))[:LONGEST]
        self._hashes += [(file, first, hashes) for first, hashes in measured.hashes]
        self._judge(self.files[file], measured.agreement)
        for number, counts in measured.specials.items():
            self._specials.update({(number, place): count for place, count in enumerate(counts)})

    def add_findings(self, held_out: Mapping[str, Hashes]) -> None:
        """Add the findings about the whole: giants, duplicates, held-out documents."""
        self._giants()
        self._duplicates()
        for name, hashes in held_out.items():
            self._held_out(name, hashes)

    def lengths(self) -> dict[str, int]:
        """Quantiles of the document lengths, in tokens as stored."""
        if self._lengths is None or not self.documents:
            return {}
        quantiles = {f"p{share * 100:g}": length_quantile(self._lengths, share) for share in _QUANTILES}
        return {**quantiles, "max": self._longest[0][0] if self._longest else 0}

    def specials(self, texts: Mapping[int, str]) -> dict[int, SpecialPlaces]:
        """Occurrences of each special token, with its text if that is known."""
        numbers = sorted({number for number, _ in self._specials})
        return {n: SpecialPlaces(texts.get(n, ""), *(self._specials[n, place] for place in range(3))) for n in numbers}

    def _judge(self, file: FileFigures, agreement: list[float]) -> None:
        """Whether a file is of the tokenizer."""
        if len(agreement) >= _JUDGED_DOCUMENTS:
            file.agreement = float(np.median(agreement))
            if file.agreement < FOREIGN_AGREEMENT:
                note = f"{file.agreement:.1%} of the ids survive re-encoding (median of {len(agreement)} documents)"
                self.findings.note("foreign-tokens", file.name, note)

    def _giants(self) -> None:
        if self._lengths is None:
            return
        bound = max(GIANT_TIMES * length_quantile(self._lengths, 0.99), GIANT_SHARE * self.tokens)
        giants = [item for item in self._longest if item[0] >= max(bound, 2)]
        examples = [
            Example(
                self.files[file].name, document, note=f"{tokens:_} tokens, {tokens / self.tokens:.1%} of the corpus"
            )
            for tokens, file, document in giants[:EXAMPLES]
        ]
        self.findings.add("giant-documents", len(giants), examples)

    def _duplicates(self) -> None:
        if not self._hashes:
            return
        extra, values = repeated([hashes for _, _, hashes in self._hashes])
        examples: list[Example] = []
        for value in values[:EXAMPLES]:
            found = ((file, first + int(n)) for file, first, h in self._hashes for n in np.flatnonzero(h == value))
            (one, number), *others = islice(found, EXAMPLES + 1)
            note = f"the same as {self.files[one].name}, document {number}"
            examples += [Example(self.files[file].name, again, note=note) for file, again in others]
        self.findings.add("duplicate-documents", extra, examples)

    def _held_out(self, name: str, hashes: Hashes) -> None:
        for file, first, here in self._hashes:
            found = np.flatnonzero(np.isin(here, hashes))
            note = f"also in the held-out corpus {name!r}"
            examples = [Example(self.files[file].name, first + int(n), note=note) for n in found[:EXAMPLES]]
            self.findings.add("held-out-documents", len(found), examples)
