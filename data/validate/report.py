"""The report of `fsdp-data validate`, for people and for machines, with decoded text around the findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from fsdp_pretrain.data.corpus.formats import MEASURED_TOKENS, Run, TokenFile
from fsdp_pretrain.data.corpus.manifest import Separators, Vocabulary
from fsdp_pretrain.data.text.tokenizer import Tokenizer

from .findings import Example, Finding, Findings

_AROUND = 12
_BOUNDARY = " ‖ "


@dataclass
class FileFigures:
    """One file in the report; `agreement`: with the tokenizer, if known."""

    name: str
    documents: int = 0
    tokens: int = 0
    agreement: float | None = None


@dataclass
class ValidationReport:
    """The result of validating one corpus.

    Attributes:
        documents, tokens: numbers as stored, separators included.
        separators: the separators that documents should carry, and whether they were declared or how they were
            measured.
        vocabulary: the vocabulary that the ids were checked against.
        fingerprint: fingerprint of the tokenizer, if one is known.
        lengths: quantiles of the document lengths, in tokens.
    """

    directory: str
    documents: int
    tokens: int
    separators: tuple[Separators, str]
    vocabulary: Vocabulary
    fingerprint: str | None
    findings: Findings
    lengths: dict[str, int]
    files: list[FileFigures]

    def as_dict(self) -> dict[str, Any]:
        """The report for `--json`."""
        findings = self.findings.by_code.values()
        return {
            "directory": self.directory,
            "documents": self.documents,
            "tokens": self.tokens,
            "separators": {"judged_as": self.separators[0], "because": self.separators[1]},
            "vocabulary": {"size": self.vocabulary.size, "eod": self.vocabulary.eod},
            "tokenizer": self.fingerprint,
            "exit": self.findings.exit_code,
            "findings": [finding.as_dict(self.rate(finding)) for finding in findings],
            "lengths": self.lengths,
            "files": [asdict(file) for file in self.files],
        }

    def rate(self, finding: Finding) -> float | None:
        """Share of the corpus's documents, tokens or files with a finding; None if that means nothing."""
        totals = {"documents": self.documents, "tokens": self.tokens, "files": len(self.files), "": 0}
        total = totals[finding.kind.unit]
        return finding.count / total if total else None


def render(report: ValidationReport, write: Callable[[str], None] = print) -> None:
    """Print the report for people."""
    carry, because = report.separators
    write(f"{report.directory}: {report.documents:_} documents, {report.tokens:_} tokens in {len(report.files)} files")
    write(f"  separators  {carry} ({because}); id {report.vocabulary.eod} of {report.vocabulary.size:_}")
    lengths = ", ".join(f"{name} {value:_}" for name, value in report.lengths.items())
    write(f"  lengths     {lengths or 'none'} tokens")
    agreement = [file.agreement for file in report.files if file.agreement is not None]
    if agreement:
        write(f"  encoding    at least {min(agreement):.1%} of each file's sampled ids survive re-encoding")
    for finding in sorted(report.findings.by_code.values(), key=lambda item: item.kind.severity):
        _render_finding(finding, report.rate(finding), write)
    if not report.findings.by_code:
        write("  clean")


def _render_finding(finding: Finding, rate: float | None, write: Callable[[str], None]) -> None:
    kind = finding.kind
    share = "" if rate is None else f" {kind.unit} ({rate:.3%})"
    write(f"  {kind.severity.upper():7} {finding.code}: {finding.count:_}{share}: {kind.meaning}")
    for example in finding.examples:
        write(f"            at {example}")
    write(f"            remedy: {kind.remedy}")


def add_texts(examples: Iterable[Example], files: dict[str, TokenFile], tokenizer: Tokenizer) -> None:
    """Add the decoded text to examples that name a document; reads the files again, up to these documents."""
    for name, file in files.items():
        waiting = [example for example in examples if example.file == name and example.document is not None]
        for run in file.runs(MEASURED_TOKENS) if waiting else ():
            here = [e for e in waiting if run.first <= (e.document or 0) < run.first + len(run.lengths)]
            for example in here:
                example.text = _around(example, run, tokenizer)
                waiting.remove(example)
            if not waiting:
                break


def _around(example: Example, run: Run, tokenizer: Tokenizer) -> str:
    """The text from 12 tokens before to 12 after a place, or of the first 24 tokens of a document."""
    n, ends = (example.document or 0) - run.first, run.ends
    start, end = int(run.starts[n]), int(ends[n])
    at = start + (example.token or 0)
    whole = example.token is None and end > start
    low, high = (start, min(end, start + 2 * _AROUND)) if whole else (max(0, at - _AROUND), at + _AROUND)
    high = min(high, len(run.tokens))
    cuts = [low, *(int(e) for e in ends[(ends > low) & (ends < high)]), high]
    return _BOUNDARY.join(decode_any(run.tokens[a:b].tolist(), tokenizer) for a, b in pairwise(cuts))


def decode_any(ids: list[int], tokenizer: Tokenizer) -> str:
    """The text of ids; an id outside the vocabulary is shown as `<id 70000>`."""
    parts: list[str] = []
    known: list[int] = []
    for number in ids:
        if 0 <= number < tokenizer.vocab_size:
            known.append(number)
        else:
            parts += [tokenizer.decode(known), f"<id {number}>"]
            known = []
    return "".join([*parts, tokenizer.decode(known)])
