"""`fsdp-data validate`: measure what a corpus really holds. Streaming; every finding has a remedy.

The manifest is not trusted: files are measured against it, and every token is checked. Memory: about 100 MB per
worker, and 8 bytes per document in the parent (see `measure` and `totals`).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from fsdp_pretrain.data.corpus.corpus import CHECKSUMS
from fsdp_pretrain.data.corpus.formats import MEASURED_TOKENS, Format, Run, TokenFile, open_file, token_files
from fsdp_pretrain.data.corpus.manifest import CorpusManifest, Separators, ShardEntry, Vocabulary, read_manifest
from fsdp_pretrain.data.corpus.shards import Shard, file_checksum
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.data.text.workers import worker_processes
from fsdp_pretrain.errors import DataError

from .checker import TokenChecker
from .findings import Findings
from .measure import Measurement, measure
from .report import ValidationReport
from .texts import add_texts
from .totals import Hashes, all_findings, quantiles

_MEASURED_FILES = 8
_POOL_BYTES = 32_000_000
"""Below this, starting processes takes longer than measuring."""


@dataclass(frozen=True)
class _File:
    path: Path
    format: Format
    name: str
    entry: ShardEntry | None = None


@dataclass(frozen=True)
class _Rules:
    """What every file is checked against, as sent to worker processes."""

    vocabulary: Vocabulary
    separators: Separators
    tokenizer: tuple[Path, int] | None
    dtype: str | None
    """That the manifest declares."""

    def open(self, file: _File) -> TokenFile:
        return open_file(file.path, file.format, self.vocabulary.eod, leading=self.separators == "leading")


@dataclass(frozen=True)
class _Subject:
    """What is validated."""

    files: list[_File]
    rules: _Rules
    manifest: CorpusManifest | None
    because: str
    fingerprint: str | None


def validate(
    directory: Path,
    *,
    tokenizer: Tokenizer | None = None,
    vocabulary: Vocabulary | None = None,
    separators: Separators | None = None,
    format: Format | None = None,  # noqa: A002
    workers: int = 1,
    held_out: Mapping[str, Hashes] | None = None,
    quiet: bool = False,
) -> ValidationReport:
    """Check every document of a corpus, or of token files without a manifest.

    Args:
        directory: with `manifest.json`; or token files, for which `vocabulary` or `tokenizer` must be given.
        vocabulary: overrides the manifest's.
        separators: what documents of files without a manifest should carry; None takes what most of them do.
        format: of files without a manifest; None takes it from their names.
        held_out: hashes of documents that should not be here, by the name of their corpus.

    Raises:
        DataError: the directory holds no shards, nothing says what the ids should be, or `separators` is given for a
            corpus whose manifest declares them.
    """
    findings = Findings()
    if (directory / "manifest.json").exists():
        subject = _declared(directory, tokenizer, vocabulary, separators, findings)
    else:
        subject = _bare(directory, tokenizer, vocabulary, separators, format)
    sizes, files = [_size(file) for file in subject.files], list[Measurement]()
    each = _each(subject.rules, subject.files, workers if sum(sizes) > _POOL_BYTES else 1)
    with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="validate", disable=quiet or None) as bar:
        for size, measured in zip(sizes, each, strict=True):
            files.append(measured)
            bar.update(size)
    findings.merge(all_findings(files, held_out or {}))
    if subject.manifest is not None and subject.manifest.pairs:  # answers are short by nature
        findings.by_code.pop("one-token-documents", None)
    _add_texts(subject, findings)
    rules = subject.rules
    return ValidationReport(
        directory=str(directory),
        separators=(rules.separators, subject.because),
        vocabulary=rules.vocabulary,
        fingerprint=subject.fingerprint,
        findings=findings,
        lengths=quantiles(files),
        files=files,
    )


def _declared(
    directory: Path,
    tokenizer: Tokenizer | None,
    vocabulary: Vocabulary | None,
    separators: Separators | None,
    findings: Findings,
) -> _Subject:
    """A corpus with a manifest."""
    manifest = read_manifest(directory)
    if separators not in (None, manifest.separators):
        raise DataError(
            f"the manifest of {directory} declares separators `{manifest.separators}`, not `{separators}`",
            remedy="leave --separators out; validate judges by the manifest and reports what differs",
        )
    entry, held = manifest.tokenizer, _compare(directory, manifest, tokenizer, findings)
    stored = held if held is not None and held.fingerprint == entry.fingerprint else entry
    ids = vocabulary or Vocabulary.of(stored)
    rules = _Rules(ids, manifest.separators, _named(held), manifest.dtype)
    files = [_File(shard.prefix(directory), "megatron", shard.name, shard) for shard in manifest.shards]
    return _Subject(files, rules, manifest, "declared by the manifest", entry.fingerprint)


def _bare(
    directory: Path,
    tokenizer: Tokenizer | None,
    vocabulary: Vocabulary | None,
    separators: Separators | None,
    format: Format | None,  # noqa: A002
) -> _Subject:
    """A directory of token files without a manifest."""
    found = token_files(directory, format)
    files = [
        _File(path, kind, path.name if path.name == directory.name else str(path).removeprefix(f"{directory}/"))
        for path, kind in found.items()
    ]
    if vocabulary is None and tokenizer is not None:
        vocabulary = Vocabulary.of(tokenizer)
    if vocabulary is None:
        raise DataError(
            f"{directory} has no manifest that defines its ids",
            remedy="pass --tokenizer T, or --vocab-size N and --eod ID",
        )
    rules, because = _Rules(vocabulary, separators or "none", _named(tokenizer), None), "declared"
    if separators is None:
        rules, because = _detect_separators(rules, files)
    return _Subject(files, rules, None, because, tokenizer.fingerprint if tokenizer else None)


def _compare(
    directory: Path, manifest: CorpusManifest, tokenizer: Tokenizer | None, findings: Findings
) -> Tokenizer | None:
    """Compare the manifest with its files and the given tokenizer; returns the tokenizer of the corpus, if any."""
    entry, stored = manifest.tokenizer, None
    for what in ("documents", "tokens"):
        listed = sum(getattr(shard, what) for shard in manifest.shards)
        if listed != getattr(manifest, what):
            note = f"{getattr(manifest, what)} {what} in all, but its shards have {listed}"
            findings.note("manifest-mismatch", "manifest.json", note)
    for shard in manifest.shards:
        if manifest.pairs and shard.documents % 2:
            note = f"{shard.documents} documents, but prompts and answers come in pairs"
            findings.note("manifest-mismatch", shard.name, note)
    for name, expected in (("blocks.npy", manifest.blocks_xxh3), (CHECKSUMS, manifest.checksums_xxh3)):
        try:
            if file_checksum(directory / name) != expected:
                findings.note("checksum", name, "not the table that the manifest names")
        except OSError as error:
            findings.unreadable(name, error)
    try:
        stored = Tokenizer.load(directory / entry.file, eod=entry.eod)
        if stored.fingerprint != entry.fingerprint:
            findings.note("tokenizer", entry.file, "not the tokenizer the manifest names")
            stored = None
        elif (stored.vocab_size, stored.specials) != (entry.vocab_size, entry.specials):
            findings.note("manifest-mismatch", "manifest.json", f"vocabulary or special tokens are not of {entry.file}")
    except (DataError, OSError) as error:
        findings.unreadable(entry.file, error)
    if tokenizer is not None and tokenizer.fingerprint != entry.fingerprint:
        both = f"manifest {entry.fingerprint[:12]}, {tokenizer.path} {tokenizer.fingerprint[:12]}"
        findings.note("tokenizer", "manifest.json", both)
        return stored
    return stored or tokenizer


def _detect_separators(rules: _Rules, files: list[_File]) -> tuple[_Rules, str]:
    """The rules with what most documents carry, by the first run of up to 8 files, and how that was measured."""
    checker = TokenChecker("", rules.vocabulary, "none", flat=False)
    for source in files[:: max(1, len(files) // _MEASURED_FILES)][:_MEASURED_FILES]:
        try:
            file = rules.open(source)
            if file.shard and file.shard.index_problem():
                continue
            run = next(file.runs(MEASURED_TOKENS), None)
            if run is not None:
                checker.add(run)
        except (DataError, OSError):
            continue  # reported when the file is measured
    documents, end, begin = checker.documents - checker.empty, checker.ending, checker.beginning
    found: Separators = "trailing" if 2 * end > documents else "leading" if 2 * begin > documents else "none"
    because = f"measured: of {documents:_} documents {end:_} end and {begin:_} begin with one"
    return replace(rules, separators=found), because


def _size(file: _File) -> int:
    """Bytes of the file with the tokens, 0 if it is absent."""
    path = Path(f"{file.path}.bin") if file.format == "megatron" else file.path
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _each(rules: _Rules, files: list[_File], workers: int) -> Iterator[Measurement]:
    """Measurements in the order of the files, so that reports do not depend on timing; the queue is bounded."""
    if min(workers, len(files)) <= 1:
        yield from (_measure(rules, file) for file in files)
        return
    with worker_processes(min(workers, len(files))) as pool:
        waiting: deque[Future[Measurement]] = deque()
        for file in files:
            waiting.append(pool.submit(_measure, rules, file))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _measure(rules: _Rules, file: _File) -> Measurement:
    """Measure a file; of one that is damaged, what precedes the damage."""
    checker = TokenChecker(file.name, rules.vocabulary, rules.separators, flat=file.format == "npy")
    return measure(file.name, _runs(rules, file, checker.findings), checker, _load(rules.tokenizer))


def _runs(rules: _Rules, file: _File, findings: Findings) -> Iterator[Run]:
    """The runs of a file, if it can be read in order. Raises DataError, OSError."""
    opened = rules.open(file)
    if _is_readable(opened.shard, file, rules, findings):
        yield from opened.runs(MEASURED_TOKENS)


def _named(tokenizer: Tokenizer | None) -> tuple[Path, int] | None:
    return (tokenizer.path, tokenizer.eod) if tokenizer is not None else None


@functools.lru_cache(maxsize=2)
def _load(tokenizer: tuple[Path, int] | None) -> Tokenizer | None:
    return Tokenizer.load(*tokenizer) if tokenizer is not None else None


def _is_readable(shard: Shard | None, file: _File, rules: _Rules, findings: Findings) -> bool:
    """Whether a file can be read in order; what is wrong with the index of a shard is noted."""
    if shard is None:
        return True
    if file.entry is not None:
        _compare_shard(shard, file, file.entry, rules, findings)
    if problem := shard.index_problem():
        findings.note("index", file.name, problem)
        return False
    beyond = shard.bytes - shard.listed_bytes
    if beyond and file.entry is None:  # against a manifest, the sizes were compared
        findings.note("index", file.name, f"{beyond} bytes of .bin belong to no document")
    return True


def _compare_shard(shard: Shard, file: _File, entry: ShardEntry, rules: _Rules, findings: Findings) -> None:
    tokens = shard.listed_bytes // shard.dtype.itemsize
    for what, held, said in (
        ("documents", shard.documents, entry.documents),
        ("tokens", tokens, entry.tokens),
        ("bytes", shard.bytes, entry.bytes),
        ("dtype", shard.dtype.name, rules.dtype),
    ):
        if held != said:
            findings.note("manifest-mismatch", file.name, f"{what}: {held}, the manifest says {said}")
    for path, expected in ((shard.path, entry.bin_xxh3), (shard.index_path, entry.idx_xxh3)):
        if file_checksum(path) != expected:
            findings.note("checksum", file.name + path.suffix, "")


def _add_texts(subject: _Subject, findings: Findings) -> None:
    """Decode the text around the examples, if there is a tokenizer."""
    if (tokenizer := _load(subject.rules.tokenizer)) is None:
        return
    examples = [example for finding in findings.by_code.values() for example in finding.examples]
    wanted = {example.file for example in examples if example.document is not None}
    for file in subject.files:
        if file.name in wanted:
            add_texts(examples, file.name, subject.rules.open(file), tokenizer)
