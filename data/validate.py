"""`fsdp-data validate`: measure what a corpus really holds. No torch; streaming; every finding has a remedy.

The manifest is not believed: files are measured against it, and every token is looked at.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from fsdp_pretrain.errors import DataError

from .corpus import BLOCK_TOKENS, Manifest, read_manifest
from .shards import Shard, file_checksum
from .tokenizer import Tokenizer

Severity = Literal["error", "warning"]
_EXAMPLES = 3

CATALOGUE: dict[str, tuple[Severity, str, str]] = {
    # code: (severity, what it means, remedy)
    "unreadable": (
        "error",
        "a file is missing, truncated or not what its name says",
        "restore it, or prepare the shard again",
    ),
    "manifest-mismatch": (
        "error",
        "a shard is not the one the manifest describes",
        "restore the shard or prepare it again",
    ),
    "checksum": (
        "error",
        "the bytes of a file changed since it was written",
        "restore the file from a good copy",
    ),
    "index": (
        "error",
        "the index points outside its file, backwards or to overlapping documents",
        "prepare the shard again",
    ),
    "outside-vocabulary": (
        "error",
        "token ids at or above the vocabulary size",
        "the wrong tokenizer or dtype was declared",
    ),
    "separator-at-end": (
        "error",
        "documents end with the separator that the packer adds again",
        "prepare again, or import declaring `trailing`",
    ),
    "separator-at-start": (
        "error",
        "documents begin with the separator",
        "prepare again, or import declaring `leading`",
    ),
    "separator-inside": (
        "error",
        "the separator stands inside documents",
        "documents were joined, or their text held the separator",
    ),
    "separator-doubled": (
        "error",
        "two separators stand side by side inside a document",
        "two tools added one each; prepare again from text",
    ),
    "special-token": (
        "error",
        "control tokens stand in documents",
        "they were parsed from text or added by the tokenizer; prepare again",
    ),
    "tokenizer": (
        "error",
        "the corpus was made with another tokenizer",
        "prepare with the tokenizer of the run, or point the run at this one",
    ),
    "vocabulary-too-small": (
        "error",
        "the model's vocabulary is smaller than the tokenizer's",
        "raise model.vocab",
    ),
    "empty-documents": (
        "warning",
        "documents without tokens (the packer leaves them out)",
        "drop them when preparing",
    ),
    "one-token-documents": ("warning", "documents of a single token", "check how the input was split"),
}
"""Every finding `validate` can make."""

_PER_DOCUMENT = {code for code in CATALOGUE if code.startswith(("separator-", "special-")) or "documents" in code}


@dataclass
class Finding:
    """One kind of defect: how often and where first."""

    code: str
    count: int
    examples: list[str] = field(default_factory=list)

    @property
    def severity(self) -> Severity:
        """`error` or `warning`."""
        return CATALOGUE[self.code][0]


class Findings:
    """Findings by code; merging adds counts and keeps the first examples."""

    def __init__(self) -> None:
        self.by_code: dict[str, Finding] = {}

    def add(self, code: str, count: int, examples: Iterable[str] = ()) -> None:
        """Count defects (nothing happens for 0)."""
        if not count:
            return
        finding = self.by_code.setdefault(code, Finding(code, 0))
        finding.count += count
        finding.examples += list(examples)[: _EXAMPLES - len(finding.examples)]

    def merge(self, other: Findings) -> None:
        """Add another shard's findings."""
        for finding in other.by_code.values():
            self.add(finding.code, finding.count, finding.examples)

    @property
    def exit_code(self) -> int:
        """0 clean, 1 warnings, 2 errors."""
        severities = {finding.severity for finding in self.by_code.values()}
        return 2 if "error" in severities else 1 if severities else 0


@dataclass(frozen=True)
class Vocabulary:
    """What the token ids should be."""

    size: int
    eod: int
    specials: frozenset[int]


@dataclass
class Report:
    """Result of validating one corpus."""

    directory: str
    documents: int
    tokens: int
    findings: Findings

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "directory": self.directory,
            "documents": self.documents,
            "tokens": self.tokens,
            "exit": self.findings.exit_code,
            "findings": [self._describe(finding) for finding in self.findings.by_code.values()],
        }

    def rate(self, finding: Finding) -> float | None:
        """Share of the corpus's documents or tokens that a finding concerns; None for findings about files."""
        code = finding.code
        total = self.tokens if code == "outside-vocabulary" else self.documents if code in _PER_DOCUMENT else 0
        return finding.count / total if total else None

    def _describe(self, finding: Finding) -> dict[str, Any]:
        severity, meaning, remedy = CATALOGUE[finding.code]
        facts = {"severity": severity, "rate": self.rate(finding), "meaning": meaning, "remedy": remedy}
        return {**asdict(finding), **facts}


def validate(
    directory: Path,
    *,
    tokenizer: Tokenizer | None = None,
    vocabulary: Vocabulary | None = None,
    workers: int = 1,
    checksums: bool = True,
    quiet: bool = False,
) -> Report:
    """Look at every document of a corpus, or of a bare directory of `.bin`/`.idx` shards.

    Args:
        directory: with `manifest.json`; without one, `vocabulary` must be given and every `.idx` below is taken.
        tokenizer: compare the corpus with this tokenizer.
        vocabulary: overrides the manifest's.
        workers: processes.
        checksums: also read every file once more and compare checksums.
        quiet: no progress bar.

    Raises:
        DataError: the directory holds no shards, or nothing says what the ids should be.
    """
    findings = Findings()
    manifest = read_manifest(directory) if (directory / "manifest.json").exists() else None
    if manifest is not None:
        prefixes = [entry.prefix(directory) for entry in manifest.shards]
        entry = manifest.tokenizer
        vocabulary = vocabulary or Vocabulary(entry.vocab_size, entry.eod, frozenset(entry.specials))
        findings.merge(_compare(directory, manifest, tokenizer))
    else:
        prefixes = [path.with_suffix("") for path in sorted(directory.rglob("*.idx"))]
        if not prefixes:
            raise DataError(f"{directory} has neither manifest.json nor .idx files: nothing to validate")
        if vocabulary is None and tokenizer is not None:
            vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.eod, frozenset(tokenizer.specials))
        if vocabulary is None:
            raise DataError(
                f"{directory} has no manifest, so nothing says what its ids mean",
                remedy="pass --tokenizer T, or --vocab-size N and --eod ID",
            )
    documents = tokens = 0
    calls = [(prefix, number, manifest, vocabulary, checksums) for number, prefix in enumerate(prefixes)]
    sizes = [
        path.stat().st_size if (path := prefix.with_name(prefix.name + ".bin")).exists() else 0 for prefix in prefixes
    ]
    bar = tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="validate", disable=True if quiet else None)
    with bar:
        for number, (found, shard_documents, shard_tokens) in _each(calls, workers):
            findings.merge(found)
            documents, tokens = documents + shard_documents, tokens + shard_tokens
            bar.update(sizes[number])
    return Report(str(directory), documents, tokens, findings)


def _each(calls: list[Any], workers: int) -> Iterator[tuple[int, tuple[Findings, int, int]]]:
    if workers <= 1 or len(calls) == 1:
        for number, call in enumerate(calls):
            yield number, _check_shard(*call)
        return
    with ProcessPoolExecutor(min(workers, len(calls)), multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_check_shard, *call): number for number, call in enumerate(calls)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _compare(directory: Path, manifest: Manifest, tokenizer: Tokenizer | None) -> Findings:
    """The manifest against the tokenizer stored beside it and against the one asked for."""
    findings = Findings()
    entry = manifest.tokenizer
    try:
        stored = Tokenizer.load(directory / entry.file, eod=entry.eod)
        if stored.fingerprint != entry.fingerprint:
            findings.add("tokenizer", 1, [f"{stored.path}: not the tokenizer the manifest names"])
    except DataError as error:
        findings.add("unreadable", 1, [error.cause])
    if tokenizer is not None and tokenizer.fingerprint != entry.fingerprint:
        both = f"manifest {entry.fingerprint[:12]}, {tokenizer.path} {tokenizer.fingerprint[:12]}"
        findings.add("tokenizer", 1, [both])
    return findings


def _check_shard(
    prefix: Path, number: int, manifest: Manifest | None, vocabulary: Vocabulary, checksums: bool
) -> tuple[Findings, int, int]:
    """Everything about one shard: (findings, documents, tokens)."""
    findings = Findings()
    try:
        shard = Shard(prefix)
    except DataError as error:
        findings.add("unreadable", 1, [error.cause])
        return findings, 0, 0
    if manifest is not None:
        entry = manifest.shards[number]
        held = {
            "documents": shard.documents,
            "tokens": int(shard.lengths.sum(dtype=np.int64)),
            "dtype": shard.dtype.name,
        }
        said = {"documents": entry.documents, "tokens": entry.tokens, "dtype": manifest.dtype}
        wrong = [
            f"{prefix.name}: {key} is {held[key]}, the manifest says {said[key]}"
            for key in said
            if held[key] != said[key]
        ]
        if shard.tokens.nbytes != entry.bytes:
            wrong.append(f"{prefix.name}.bin has {shard.tokens.nbytes} bytes, the manifest says {entry.bytes}")
        findings.add("manifest-mismatch", len(wrong), wrong)
        if checksums:
            for suffix, expected in ((".bin", entry.bin_xxh3), (".idx", entry.idx_xxh3)):
                path = prefix.with_name(prefix.name + suffix)
                findings.add("checksum", file_checksum(path) != expected, [str(path)])
    if not _index_is_sound(shard):
        findings.add("index", 1, [str(prefix)])
        return findings, shard.documents, int(shard.lengths.sum(dtype=np.int64))
    _check_lengths(shard, findings)
    for first, stop in _runs(shard):
        _check_tokens(shard, first, stop, vocabulary, findings)
    return findings, shard.documents, int(shard.lengths.sum(dtype=np.int64))


def _index_is_sound(shard: Shard) -> bool:
    """Documents lie one behind the other inside the file, one sequence each."""
    lengths, pointers = shard.lengths.astype(np.int64), shard.pointers
    if not shard.documents:
        return True
    contiguous = np.array_equal(pointers[1:], pointers[:-1] + lengths[:-1] * shard.dtype.itemsize)
    single = np.array_equal(shard.document_indices, np.arange(shard.documents + 1))
    return bool(contiguous and single and lengths.min() >= 0 and pointers[0] >= 0)


def _check_lengths(shard: Shard, findings: Findings) -> None:
    for code, length in (("empty-documents", 0), ("one-token-documents", 1)):
        which = np.flatnonzero(shard.lengths == length)
        findings.add(code, len(which), (_place(shard, n) for n in which[:_EXAMPLES]))


def _runs(shard: Shard) -> Iterator[tuple[int, int]]:
    """Ranges of documents of about `BLOCK_TOKENS`."""
    ends = np.cumsum(shard.lengths, dtype=np.int64)
    first = 0
    while first < shard.documents:
        base = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, base + BLOCK_TOKENS)))
        yield first, stop
        first = stop


def _check_tokens(shard: Shard, first: int, stop: int, vocabulary: Vocabulary, findings: Findings) -> None:
    """Ids and special tokens of documents [first, stop)."""
    lengths = shard.lengths[first:stop].astype(np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    begin = int(shard.pointers[first]) // shard.dtype.itemsize
    tokens = shard.tokens[begin : begin + int(ends[-1])]

    def report(code: str, where: npt.NDArray[np.int64]) -> None:
        shown = where[:_EXAMPLES]
        inside = np.searchsorted(ends, shown, side="right")
        places = [_place(shard, first + n, at - starts[n]) for n, at in zip(inside, shown, strict=True)]
        findings.add(code, len(where), places)

    outside = np.flatnonzero(_outside(tokens, vocabulary.size))
    report("outside-vocabulary", outside)
    table = np.zeros(vocabulary.size, dtype=bool)
    table[list(vocabulary.specials | {vocabulary.eod})] = True
    known = np.where(_outside(tokens, vocabulary.size), 0, tokens) if len(outside) else tokens
    special = np.flatnonzero(table[known])
    if len(outside):
        special = np.setdiff1d(special, outside)
    if not len(special):
        return
    full = lengths > 0
    is_eod = tokens[special] == vocabulary.eod
    at_end, at_start = np.isin(special, ends[full] - 1), np.isin(special, starts[full])
    side_by_side = np.zeros(len(special), dtype=bool)
    side_by_side[1:] = (np.diff(special) == 1) & is_eod[1:] & is_eod[:-1] & ~at_start[1:]
    report("separator-at-end", special[is_eod & at_end])
    report("separator-at-start", special[is_eod & at_start & ~at_end])
    report("separator-inside", special[is_eod & ~at_end & ~at_start])
    report("separator-doubled", special[side_by_side])
    report("special-token", special[~is_eod])


def _outside(tokens: npt.NDArray[Any], size: int) -> npt.NDArray[np.bool_]:
    outside: npt.NDArray[np.bool_] = tokens >= size
    return outside | (tokens < 0) if tokens.dtype.kind == "i" else outside


def _place(shard: Shard, document: int, token: int | None = None) -> str:
    at = "" if token is None else f", token {int(token)}"
    return f"{shard.prefix.name}, document {int(document)}{at}"


def check_against(manifest: Manifest, vocab: int) -> Findings:
    """Whether a model with `vocab` embedding rows can be trained on the corpus."""
    findings = Findings()
    too_small = vocab < manifest.tokenizer.vocab_size
    both = f"model.vocab = {vocab}, tokenizer {manifest.tokenizer.vocab_size}"
    findings.add("vocabulary-too-small", too_small, [both])
    return findings


def render(report: Report, write: Callable[[str], None] = print) -> None:
    """The report for people."""
    write(f"{report.directory}: {report.documents:_} documents, {report.tokens:_} tokens")
    for finding in sorted(report.findings.by_code.values(), key=lambda item: item.severity):
        severity, meaning, remedy = CATALOGUE[finding.code]
        rate = report.rate(finding)
        share = f" ({rate:.3%})" if rate is not None else ""
        write(f"  {severity.upper():7} {finding.code}: {meaning}; {finding.count:_}{share}")
        for example in finding.examples:
            write(f"            at {example}")
        write(f"            remedy: {remedy}")
    if not report.findings.by_code:
        write("  clean")


__all__ = ["CATALOGUE", "Finding", "Findings", "Report", "Vocabulary", "check_against", "render", "validate"]
