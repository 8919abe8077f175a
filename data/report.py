"""The report of `fsdp-data validate`, for people and for machines, with decoded text around what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from .findings import Example, Finding, Findings
from .formats import TokenFile
from .meter import MEASURED_TOKENS, Vocabulary
from .tokenizer import Tokenizer

_AROUND = 12
_BOUNDARY = " ‖ "


@dataclass
class Report:
    """Result of validating one corpus.

    Attributes:
        directory: of the corpus.
        documents, tokens: as stored, separators included.
        separators: what its documents were judged to carry, and `declared` or how that was measured.
        vocabulary: what the ids were judged by.
        fingerprint: of the tokenizer, if one is known.
        lengths: quantiles of the document lengths, in tokens.
        entropy_bits: of the unigrams.
        specials: {id: {text, start, end, inside}}, occurrences of each special token by place in its document.
        files: name, documents, tokens, divergence from the others and agreement with the tokenizer.
        boundaries: decoded text around the first document boundaries.
    """

    directory: str
    documents: int
    tokens: int
    separators: tuple[str, str]
    vocabulary: Vocabulary
    fingerprint: str | None
    findings: Findings
    lengths: dict[str, int]
    entropy_bits: float
    specials: dict[int, dict[str, Any]]
    files: list[dict[str, Any]]
    boundaries: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        found = self.findings.by_code.values()
        return {
            "directory": self.directory,
            "documents": self.documents,
            "tokens": self.tokens,
            "separators": {"judged_as": self.separators[0], "because": self.separators[1]},
            "vocabulary": {"size": self.vocabulary.size, "eod": self.vocabulary.eod},
            "tokenizer": self.fingerprint,
            "exit": self.findings.exit_code,
            "findings": [finding.as_dict(self.rate(finding)) for finding in found],
            "lengths": self.lengths,
            "entropy_bits": self.entropy_bits,
            "specials": self.specials,
            "files": self.files,
            "boundaries": self.boundaries,
        }

    def rate(self, finding: Finding) -> float | None:
        """Share of the corpus's documents, tokens or files that a finding concerns; None where that means nothing."""
        totals = {"documents": self.documents, "tokens": self.tokens, "files": len(self.files), "": 0}
        total = totals[finding.kind.unit]
        return finding.count / total if total else None


def render(report: Report, write: Callable[[str], None] = print) -> None:
    """The report for people."""
    carry, because = report.separators
    write(f"{report.directory}: {report.documents:_} documents, {report.tokens:_} tokens in {len(report.files)} files")
    write(f"  separators  {carry} ({because}); id {report.vocabulary.eod} of {report.vocabulary.size:_}")
    lengths = ", ".join(f"{name} {value:_}" for name, value in report.lengths.items())
    write(f"  lengths     {lengths or 'none'} tokens")
    write(f"  unigrams    {report.entropy_bits:.2f} bits per token")
    diverging = [entry["divergence_bits"] for entry in report.files if entry.get("divergence_bits") is not None]
    if diverging:
        write(f"  divergence  {min(diverging):.2f} to {max(diverging):.2f} bits between a file and the others")
    agreement = [entry["agreement"] for entry in report.files if entry.get("agreement") is not None]
    if agreement:
        write(f"  encoding    at least {min(agreement):.1%} of each file's sampled ids come back from decoding")
    for number, entry in report.specials.items():
        places = ", ".join(f"{entry[place]:_} {word}" for place, word in _PLACES.items() if entry[place])
        write(f"  special     {number} {entry['text']!r}: {places}")
    for text in report.boundaries:
        write(f"  boundary    {text!r}")
    for finding in sorted(report.findings.by_code.values(), key=lambda item: item.kind.severity):
        _render_finding(finding, report.rate(finding), write)
    if not report.findings.by_code:
        write("  clean")


_PLACES = {"start": "at document starts", "end": "at ends", "inside": "inside"}


def _render_finding(finding: Finding, rate: float | None, write: Callable[[str], None]) -> None:
    kind = finding.kind
    share = "" if rate is None else f" {kind.unit} ({rate:.3%})"
    write(f"  {kind.severity.upper():7} {finding.code}: {finding.count:_}{share}: {kind.meaning}")
    for example in finding.examples:
        write(f"            at {example}")
    write(f"            remedy: {kind.remedy}")


def add_texts(examples: Iterable[Example], files: dict[str, TokenFile], tokenizer: Tokenizer) -> None:
    """Give examples that name a document the decoded text around their place; files are read again up to there."""
    for name, file in files.items():
        waiting = [example for example in examples if example.file == name and example.document is not None]
        for run in file.runs(MEASURED_TOKENS) if waiting else ():
            here = [e for e in waiting if run.first <= (e.document or 0) < run.first + len(run.lengths)]
            ends = np.cumsum(run.lengths)
            for example in here:
                example.text = _around(example, run.first, run.tokens, ends, tokenizer)
                waiting.remove(example)
            if not waiting:
                break


def _around(
    example: Example, first: int, tokens: npt.NDArray[Any], ends: npt.NDArray[np.int64], tokenizer: Tokenizer
) -> str:
    """Text from 12 tokens before to 12 after a place, or of the first 24 tokens of a document."""
    n = (example.document or 0) - first
    start, end = int(ends[n - 1]) if n else 0, int(ends[n])
    at = start + (example.token or 0)
    whole = example.token is None and end > start
    low, high = (start, min(end, start + 2 * _AROUND)) if whole else (max(0, at - _AROUND), at + _AROUND)
    high = min(high, len(tokens))
    cuts = [low, *(int(e) for e in ends[(ends > low) & (ends < high)]), high]
    return _BOUNDARY.join(decode_any(tokens[a:b].tolist(), tokenizer) for a, b in pairwise(cuts))


def decode_any(ids: list[int], tokenizer: Tokenizer) -> str:
    """Text of ids; those outside the vocabulary as `<id 70000>`."""
    parts: list[str] = []
    known: list[int] = []
    for number in ids:
        if 0 <= number < tokenizer.vocab_size:
            known.append(number)
        else:
            parts += [tokenizer.decode(known), f"<id {number}>"]
            known = []
    return "".join([*parts, tokenizer.decode(known)])
