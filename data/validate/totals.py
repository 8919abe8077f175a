"""Combines the measurements of files: quantiles, and the findings that need all documents of the corpus.

Memory: 10 to 12 bytes per document (hashes and lengths).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.data.text.documents import repeated

from .findings import EXAMPLES, Example, Findings
from .measure import Measurement

GIANT_TIMES, GIANT_SHARE = 20, 0.01
"""A document is a giant if it has 20 times the 99th percentile of lengths and 1% of the corpus's tokens, or more."""
Hashes = npt.NDArray[np.uint64]
_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


def all_findings(files: Sequence[Measurement], held_out: Mapping[str, Hashes]) -> Findings:
    """The findings of all files, and those that need all documents: giants, duplicates, held-out documents.

    `held_out`: hashes of the documents of each held-out corpus, by its name.
    """
    findings = Findings()
    for file in files:
        findings.merge(file.findings)
    if any(file.documents for file in files):
        _add_giants(files, findings)
        _add_duplicates(files, findings)
    for name, hashes in held_out.items():
        _add_held_out(files, findings, name, hashes)
    return findings


def quantiles(files: Sequence[Measurement]) -> dict[str, int]:
    """Quantiles of the document lengths, in tokens as stored; empty without documents."""
    lengths = [run.lengths for file in files for run in file.runs]
    if not any(map(len, lengths)):
        return {}
    values = np.quantile(np.concatenate(lengths), [*_QUANTILES, 1], method="lower").tolist()
    return dict(zip([*(f"p{share * 100:g}" for share in _QUANTILES), "max"], values, strict=True))


def _add_giants(files: Sequence[Measurement], findings: Findings) -> None:
    tokens = sum(file.tokens for file in files)
    least = max(GIANT_TIMES * quantiles(files)["p99"], GIANT_SHARE * tokens, 2)
    giants = [
        (int(run.lengths[n]), number, run.first + n)
        for number, file in enumerate(files)
        for run in file.runs
        for n in np.flatnonzero(run.lengths >= least).tolist()
    ]
    giants.sort(key=lambda giant: (-giant[0], *giant[1:]))
    examples = [
        Example(files[number].name, document, note=f"{size:_} tokens, {size / tokens:.1%} of the corpus")
        for size, number, document in giants[:EXAMPLES]
    ]
    findings.add("giant-documents", len(giants), examples)


def _add_duplicates(files: Sequence[Measurement], findings: Findings) -> None:
    repeats, repeated_hashes = repeated([run.hashes for file in files for run in file.runs])
    examples: list[Example] = []
    for repeated_hash in repeated_hashes[:EXAMPLES]:
        copies = (
            (file.name, run.first + int(n))
            for file in files
            for run in file.runs
            for n in np.flatnonzero(run.hashes == repeated_hash)
        )
        (first_file, first_document), *others = islice(copies, EXAMPLES + 1)
        note = f"the same as {first_file}, document {first_document}"
        examples += [Example(name, document, note=note) for name, document in others]
    findings.add("duplicate-documents", repeats, examples)


def _add_held_out(files: Sequence[Measurement], findings: Findings, corpus: str, hashes: Hashes) -> None:
    note = f"also in the held-out corpus {corpus!r}"
    for file in files:
        for run in file.runs:
            documents = np.flatnonzero(np.isin(run.hashes, hashes))
            examples = [Example(file.name, run.first + int(n), note=note) for n in documents[:EXAMPLES]]
            findings.add("held-out-documents", len(documents), examples)
