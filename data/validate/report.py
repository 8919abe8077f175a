"""The report of `fsdp-data validate`, for people and for machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fsdp_pretrain.data.corpus.manifest import Separators, Vocabulary
from fsdp_pretrain.units import counted

from .contamination import Contaminated
from .findings import Finding, Findings
from .measure import Measurement

_FILE_FIELDS = ("name", "documents", "tokens", "agreement")
"""Fields of a file in the JSON report."""


@dataclass
class ValidationReport:
    """The result of validating one corpus."""

    directory: str
    # the separators that documents should carry, and who declared them or how they were measured
    separators: tuple[Separators, str]
    vocabulary: Vocabulary  # the vocabulary that the ids were checked against
    fingerprint: str | None  # fingerprint of the tokenizer, if one is known
    findings: Findings
    lengths: dict[str, int]  # quantiles of the document lengths, in tokens
    files: list[Measurement]
    compared: str = ""  # what the text was compared with, and why not; empty if nothing was asked for
    contaminated: list[Contaminated] = field(default_factory=list)  # documents that hold passages of it

    @property
    def documents(self) -> int:
        return sum(file.documents for file in self.files)

    @property
    def tokens(self) -> int:
        return sum(file.tokens for file in self.files)

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
            "compared": self.compared,
            "exit": self.findings.exit_code,
            "findings": [finding.as_dict(self.rate(finding)) for finding in findings],
            "lengths": self.lengths,
            "files": [{name: getattr(file, name) for name in _FILE_FIELDS} for file in self.files],
        }

    def rate(self, finding: Finding) -> float | None:
        """Share of the corpus's documents, tokens or files with a finding; None if that means nothing."""
        totals = {"documents": self.documents, "tokens": self.tokens, "files": len(self.files), "": 0}
        total = totals[finding.kind.unit]
        return finding.count / total if total else None


def render(report: ValidationReport) -> None:
    """Print the report for people."""
    separators, because = report.separators
    files = counted(len(report.files), "file")
    print(f"{report.directory}: {report.documents:_} documents, {report.tokens:_} tokens in {files}")
    packed = ", the packer puts it between documents" if separators == "none" else ""
    print(f"  separators  {separators} ({because}); id {report.vocabulary.eod} of {report.vocabulary.size:_}{packed}")
    lengths = ", ".join(f"{name} {value:_}" for name, value in report.lengths.items())
    print(f"  lengths     {lengths or 'none'} tokens")
    agreements = [file.agreement for file in report.files if file.agreement is not None]
    if agreements:
        print(f"  encoding    at least {min(agreements):.1%} of each file's sampled ids survive re-encoding")
    if report.compared:
        print(f"  compared    {report.compared}")
    for finding in sorted(report.findings.by_code.values(), key=lambda item: item.kind.severity):
        _render_finding(finding, report.rate(finding))
    if not report.findings.by_code:
        print("  clean")


def _render_finding(finding: Finding, rate: float | None) -> None:
    kind = finding.kind
    share = "" if rate is None else f" {kind.unit} ({rate:.3%})"
    print(f"  {kind.severity.upper():7} {finding.code}: {finding.count:_}{share}: {kind.meaning}")
    for example in finding.examples:
        print(f"            at {example}")
    print(f"            remedy: {kind.remedy}")
