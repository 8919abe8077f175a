"""The catalogue of findings of `fsdp-data validate`, and the findings of a corpus, which are counted and merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from fsdp_pretrain.errors import DataError

Unit = Literal["documents", "tokens", "files", ""]
EXAMPLES = 3
"""Most examples that a finding keeps."""


class FindingKind(NamedTuple):
    """One entry of the catalogue: the meaning of a finding, and the remedy."""

    severity: Literal["error", "warning"]
    """`error`: training would go wrong; `warning`: a person should check."""
    meaning: str
    remedy: str
    unit: Unit = "documents"
    """Unit of the count and of its rate; empty if a rate means nothing."""


_error, _warning = partial(FindingKind, "error"), partial(FindingKind, "warning")
CATALOGUE: dict[str, FindingKind] = {
    "unreadable": _error(
        "a file is missing, truncated or not what its name says",
        "restore it, or delete the shard's .json and repeat the command that made it",
        unit="files",
    ),
    "manifest-mismatch": _error(
        "the files are not those the manifest describes",
        "restore the shard, or delete its .json and repeat the command that made it",
        unit="",
    ),
    "checksum": _error(
        "the bytes of a file changed since it was written", "restore the file from a good copy", unit="files"
    ),
    "index": _error(
        "the index points outside its file, backwards, to overlapping documents, or leaves tokens out",
        "delete the shard's .json and repeat the command that made it",
        unit="files",
    ),
    "outside-vocabulary": _error(
        "token ids at or above the vocabulary size, or negative",
        "the wrong tokenizer or dtype was declared",
        unit="tokens",
    ),
    "separator-at-end": _error(
        "documents end with a separator that was not declared; the packer adds its own",
        "prepare again, or import declaring `trailing`",
    ),
    "separator-at-start": _error(
        "documents begin with a separator that was not declared; the packer adds its own",
        "prepare again, or import declaring `leading`",
    ),
    "separator-inside": _error(
        "the separator stands inside documents",
        "documents were joined, or their text held the separator; prepare again from text",
    ),
    "separator-doubled": _error(
        "two or more separators stand side by side", "two tools added one each; prepare again from text"
    ),
    "separator-missing": _error(
        "documents lack the separator that was declared",
        "declare `none` if none carries one; otherwise documents were cut: prepare again from text",
    ),
    "special-token": _error(
        "control tokens other than the separator stand in documents",
        "they were parsed from text or added by the tokenizer; prepare again",
    ),
    "special-only-documents": _error(
        "documents of nothing but control tokens",
        "their text was empty and the tokenizer added specials; drop them when preparing",
    ),
    "tokenizer": _error(
        "the corpus was made with another tokenizer",
        "prepare with the tokenizer of the run, or point the run at this one",
        unit="",
    ),
    "foreign-tokens": _error(
        "sampled documents, decoded and encoded again with the tokenizer, give other ids",
        "the file was made with another tokenizer or its ids were changed; prepare it again",
        unit="files",
    ),
    "vocabulary-too-small": _error(
        "the model's vocabulary is smaller than the tokenizer's", "raise model.vocab", unit=""
    ),
    "held-out-documents": _error(
        "documents are also in the held-out data of the run (`eval.loss_on`), token by token",
        "prepare again with the --holdout that `fsdp-data split` was given",
    ),
    "contaminated-documents": _warning(
        "documents hold passages of the data that the run is evaluated on (`--against`, `--protect`)",
        "look at some, and set `data.exclude` to the LIST that --contamination writes, or prepare without them",
    ),
    "empty-documents": _warning(
        "documents without tokens, declared separators aside (the packer leaves them out)", "drop them when preparing"
    ),
    "one-token-documents": _warning(
        "documents of a single token, declared separators aside", "check how the input was split"
    ),
    "giant-documents": _warning(
        "documents far longer than all others that make up a sizeable part of the corpus",
        "check that no file of many documents was taken for one (`--split lines`)",
    ),
    "duplicate-documents": _warning(
        "documents that repeat an earlier one token by token (first copies not counted)",
        "deduplicate the input; look for a file that was given twice",
    ),
    "degenerate-documents": _warning(
        "long documents of one token, or of one short passage over and over",
        "filter them out of the input: a few of them can destabilise training",
    ),
}
"""All findings of `validate`, by code."""


@dataclass
class Example:
    """The place of a defect: a file, perhaps a document in it, and perhaps a token of the document."""

    file: str
    document: int | None = None  # this and the next: numbers within the file and within the document
    token: int | None = None
    note: str = ""  # details of the defect at this place
    text: str | None = None  # the text around it, with document boundaries as `‖`; None without a tokenizer

    def __str__(self) -> str:
        place = [self.file] if self.file else []
        place += [] if self.document is None else [f"document {self.document}"]
        place += [] if self.token is None else [f"token {self.token}"]
        parts = [", ".join(place), self.note, "" if self.text is None else repr(self.text)]
        return ": ".join(part for part in parts if part)


@dataclass
class Finding:
    """One kind of defect: how often it occurs, and its first examples."""

    code: str
    count: int
    examples: list[Example] = field(default_factory=list)

    @property
    def kind(self) -> FindingKind:
        return CATALOGUE[self.code]

    def as_dict(self, rate: float | None) -> dict[str, Any]:
        """The finding for `--json`: count, rate, examples (`place`: the example as text), meaning and remedy."""
        examples = [{**asdict(example), "place": str(example)} for example in self.examples]
        return {"code": self.code, "count": self.count, "rate": rate, **self.kind._asdict(), "examples": examples}


class Findings:
    """Findings by their code. Merging adds the counts and keeps the first examples."""

    def __init__(self) -> None:
        self.by_code: dict[str, Finding] = {}

    def add(self, code: str, count: int, examples: Iterable[Example] = ()) -> None:
        """Add defects of one kind; a count of 0 has no effect."""
        if not count:
            return
        finding = self.by_code.setdefault(code, Finding(code, 0))
        finding.count += int(count)
        finding.examples += list(examples)[: EXAMPLES - len(finding.examples)]

    def note(self, code: str, file: str, note: str) -> None:
        """Add one defect of a file."""
        self.add(code, 1, [Example(file, note=note)])

    def unreadable(self, file: str, error: DataError | OSError) -> None:
        """Add a file that cannot be read to its end."""
        self.note("unreadable", file, error.cause if isinstance(error, DataError) else error.strerror or str(error))

    def merge(self, other: Findings) -> None:
        """Add all findings of another object."""
        for finding in other.by_code.values():
            self.add(finding.code, finding.count, finding.examples)

    @property
    def exit_code(self) -> int:
        """Exit code of `validate`: 0 clean, 1 warnings, 2 errors."""
        severities = {finding.kind.severity for finding in self.by_code.values()}
        return 2 if "error" in severities else 1 if severities else 0
