"""What `fsdp-data validate` can find, and findings as they are counted and merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

Severity = Literal["error", "warning"]
Unit = Literal["documents", "tokens", "files", ""]
EXAMPLES = 3
"""Located examples that a finding keeps."""


class Kind(NamedTuple):
    """One entry of the catalogue.

    Attributes:
        severity: `error` where training would go wrong, `warning` where a person should look.
        unit: what the count counts, and what its rate is a share of; empty where a share means nothing.
        meaning: what was found.
        remedy: what to do.
    """

    severity: Severity
    unit: Unit
    meaning: str
    remedy: str


CATALOGUE: dict[str, Kind] = {
    "unreadable": Kind(
        "error",
        "files",
        "a file is missing, truncated or not what its name says",
        "restore it, or prepare the shard again",
    ),
    "manifest-mismatch": Kind(
        "error",
        "",
        "the files are not those the manifest describes",
        "restore the shard or prepare it again",
    ),
    "checksum": Kind(
        "error",
        "files",
        "the bytes of a file changed since it was written",
        "restore the file from a good copy",
    ),
    "index": Kind(
        "error",
        "files",
        "the index points outside its file, backwards, to overlapping documents, or leaves tokens out",
        "prepare the shard again",
    ),
    "outside-vocabulary": Kind(
        "error",
        "tokens",
        "token ids at or above the vocabulary size, or negative",
        "the wrong tokenizer or dtype was declared",
    ),
    "separator-at-end": Kind(
        "error",
        "documents",
        "documents end with a separator that was not declared; the packer adds its own",
        "prepare again, or import declaring `trailing`",
    ),
    "separator-at-start": Kind(
        "error",
        "documents",
        "documents begin with a separator that was not declared; the packer adds its own",
        "prepare again, or import declaring `leading`",
    ),
    "separator-inside": Kind(
        "error",
        "documents",
        "the separator stands inside documents",
        "documents were joined, or their text held the separator; prepare again from text",
    ),
    "separator-doubled": Kind(
        "error",
        "documents",
        "two or more separators stand side by side",
        "two tools added one each; prepare again from text",
    ),
    "separator-missing": Kind(
        "error",
        "documents",
        "documents lack the separator that was declared",
        "declare `none` if none carries one; otherwise documents were cut: prepare again from text",
    ),
    "special-token": Kind(
        "error",
        "documents",
        "control tokens other than the separator stand in documents",
        "they were parsed from text or added by the tokenizer; prepare again",
    ),
    "special-only-documents": Kind(
        "error",
        "documents",
        "documents of nothing but control tokens",
        "their text was empty and the tokenizer added specials; drop them when preparing",
    ),
    "tokenizer": Kind(
        "error",
        "",
        "the corpus was made with another tokenizer",
        "prepare with the tokenizer of the run, or point the run at this one",
    ),
    "foreign-tokens": Kind(
        "error",
        "files",
        "sampled documents, decoded and encoded again with the tokenizer, give other ids",
        "the file was made with another tokenizer or its ids were changed; prepare it again",
    ),
    "vocabulary-too-small": Kind(
        "error",
        "",
        "the model's vocabulary is smaller than the tokenizer's",
        "raise model.vocab",
    ),
    "empty-documents": Kind(
        "warning",
        "documents",
        "documents without tokens, declared separators aside (the packer leaves them out)",
        "drop them when preparing",
    ),
    "one-token-documents": Kind(
        "warning",
        "documents",
        "documents of a single token, declared separators aside",
        "check how the input was split",
    ),
    "giant-documents": Kind(
        "warning",
        "documents",
        "documents far longer than all others that make up a sizeable part of the corpus",
        "check that no file of many documents was taken for one (`--split lines`)",
    ),
    "duplicate-documents": Kind(
        "warning",
        "documents",
        "documents that repeat an earlier one token by token (first copies not counted)",
        "deduplicate the input; look for a file that was given twice",
    ),
    "degenerate-documents": Kind(
        "warning",
        "documents",
        "long documents of one token, or of one short passage over and over",
        "filter them out of the input: a few of them can upset training",
    ),
    "divergent-shard": Kind(
        "warning",
        "files",
        "ids are distributed unlike those of the other files: another vocabulary, or another language",
        "pass --tokenizer to have it decided by decoding; otherwise look at the file",
    ),
}
"""Every finding `validate` can make."""


@dataclass
class Example:
    """Where a defect is.

    Attributes:
        file: name of the file.
        document: number of the document within the file, if it concerns one.
        token: position within the document, if it concerns one.
        note: what was measured there.
        text: decoded text around the place, document boundaries shown as `‖`; None without a tokenizer.
    """

    file: str
    document: int | None = None
    token: int | None = None
    note: str = ""
    text: str | None = None

    def __str__(self) -> str:
        place = [self.file] if self.file else []
        place += [] if self.document is None else [f"document {self.document}"]
        place += [] if self.token is None else [f"token {self.token}"]
        parts = [", ".join(place), self.note, "" if self.text is None else repr(self.text)]
        return ": ".join(part for part in parts if part)


@dataclass
class Finding:
    """One kind of defect: how often and where first."""

    code: str
    count: int
    examples: list[Example] = field(default_factory=list)

    @property
    def kind(self) -> Kind:
        """Its entry in the catalogue."""
        return CATALOGUE[self.code]

    def as_dict(self, rate: float | None) -> dict[str, Any]:
        """For `--json`: count, rate, examples (`place` is the example as text), meaning and remedy."""
        examples = [{**asdict(example), "place": str(example)} for example in self.examples]
        return {"code": self.code, "count": self.count, "rate": rate, **self.kind._asdict(), "examples": examples}


class Findings:
    """Findings by code; merging adds counts and keeps the first examples."""

    def __init__(self) -> None:
        self.by_code: dict[str, Finding] = {}

    def add(self, code: str, count: int, examples: Iterable[Example] = ()) -> None:
        """Count defects (nothing happens for 0)."""
        if not count:
            return
        finding = self.by_code.setdefault(code, Finding(code, 0))
        finding.count += int(count)
        finding.examples += list(examples)[: EXAMPLES - len(finding.examples)]

    def note(self, code: str, file: str, note: str) -> None:
        """Count one defect of a file."""
        self.add(code, 1, [Example(file, note=note)])

    def merge(self, other: Findings) -> None:
        """Add another file's findings."""
        for finding in other.by_code.values():
            self.add(finding.code, finding.count, finding.examples)

    @property
    def exit_code(self) -> int:
        """0 clean, 1 warnings, 2 errors."""
        severities = {finding.kind.severity for finding in self.by_code.values()}
        return 2 if "error" in severities else 1 if severities else 0
