"""`fsdp-data validate`: checks the actual content of a corpus. Every finding has a remedy.

The manifest is not trusted: files are compared with it, and every token is checked. Files are streamed; memory is about
100 MB per worker, and 8 bytes per document in the parent (see `measure` and `totals`).
"""

from __future__ import annotations

import functools
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Set
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
from .contamination import Contaminated, contaminated
from .findings import EXAMPLES, Example, Findings
from .measure import Measurement, measure
from .protected import ProtectedTexts, Protection
from .report import ValidationReport
from .texts import add_texts
from .totals import Hashes, all_findings, quantiles

_MEASURED_FILES = 8
"""Most files in which `_detect_separators` measures the separators."""
_POOL_BYTES = 32_000_000
"""Bytes of token files below which starting processes takes longer than measuring."""


@dataclass(frozen=True)
class _File:
    path: Path
    format: Format
    name: str
    entry: ShardEntry | None = None


@dataclass(frozen=True)
class _Rules:
    """The rules that every file is checked against, as sent to worker processes."""

    vocabulary: Vocabulary
    separators: Separators
    tokenizer: tuple[Path, int] | None  # path and separator of the tokenizer; None without one
    dtype: str | None  # name of the dtype that the manifest declares; None without a manifest
    protected: Path | None = None  # folder of the texts that documents are compared with; None without any

    def open(self, file: _File) -> TokenFile:
        return open_file(file.path, file.format, self.vocabulary.eod, leading=self.separators == "leading")


@dataclass(frozen=True)
class _Subject:
    """The corpus to validate."""

    files: list[_File]
    rules: _Rules
    manifest: CorpusManifest | None
    because: str  # who declared the separators, or how they were measured; for the report
    fingerprint: str | None  # fingerprint of the tokenizer, if one is known


def validate(
    directory: Path,
    *,
    tokenizer: Tokenizer | None = None,
    vocabulary: Vocabulary | None = None,
    separators: Separators | None = None,
    format: Format | None = None,  # noqa: A002
    workers: int = 1,
    held_out: Mapping[str, Hashes] | None = None,
    protection: Protection | None = None,
    excluded: Set[tuple[str, int]] = frozenset(),
    quiet: bool = False,
) -> ValidationReport:
    """Check every document of a corpus, or of token files without a manifest.

    Args:
        directory: a directory with `manifest.json`, or token files; these need `vocabulary` or `tokenizer`.
        vocabulary: overrides the manifest's.
        separators: for files without a manifest, separators that documents should carry; None: those that most carry.
        format: for files without a manifest; None: inferred from their names.
        held_out: hashes of documents that must not be in this corpus, by the name of their corpus.
        protection: texts that must not be in this corpus. Documents are decoded to find them, if a tokenizer is known.
        excluded: (shard, document) of documents that are not trained on and may hold these texts.

    Raises:
        DataError: the directory has no token files, the vocabulary is unknown, or `separators` contradicts the
            manifest.
    """
    findings = Findings()
    if (directory / "manifest.json").exists():
        subject = _with_manifest(directory, tokenizer, vocabulary, separators, findings)
    else:
        subject = _without_manifest(directory, tokenizer, vocabulary, separators, format)
    rules, files = subject.rules, _read_all(subject, protection, workers, quiet=quiet)
    findings.merge(all_findings(files, held_out or {}))
    if subject.manifest is not None and subject.manifest.pairs:  # answers are short by nature
        findings.by_code.pop("one-token-documents", None)
    compared, held = "", list[Contaminated]()
    if protection is not None:
        compared = str(protection) if rules.tokenizer else "nothing: no tokenizer is known to decode it (--tokenizer)"
        held = contaminated({file.name: file.shared for file in files}, protection, sum(f.documents for f in files))
        held = [place for place in held if (place.shard, place.document) not in excluded]
        largest = sorted(held, key=lambda place: -place.share)[:EXAMPLES]
        examples = [Example(place.shard, place.document, note=str(place)) for place in largest]
        findings.add("contaminated-documents", len(held), examples)
    _add_texts(subject, findings)
    return ValidationReport(
        directory=str(directory),
        separators=(rules.separators, subject.because),
        vocabulary=rules.vocabulary,
        fingerprint=subject.fingerprint,
        findings=findings,
        lengths=quantiles(files),
        files=files,
        compared=compared,
        contaminated=held,
    )


def _read_all(subject: _Subject, protection: Protection | None, workers: int, *, quiet: bool) -> list[Measurement]:
    """Measure all files of a subject, with a progress bar."""
    rules, sizes, files = subject.rules, [_size(file) for file in subject.files], list[Measurement]()
    with tempfile.TemporaryDirectory() as folder:
        if protection is not None and len(protection.texts.hashes):
            protection.texts.save(Path(folder))
            rules = replace(rules, protected=Path(folder))
        measurements = _measure_all(rules, subject.files, workers if sum(sizes) > _POOL_BYTES else 1)
        with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="validate", disable=quiet or None) as bar:
            for size, measured in zip(sizes, measurements, strict=True):
                files.append(measured)
                bar.update(size)
    return files


def _with_manifest(
    directory: Path,
    tokenizer: Tokenizer | None,
    vocabulary: Vocabulary | None,
    separators: Separators | None,
    findings: Findings,
) -> _Subject:
    """The subject for a corpus with a manifest; notes where the manifest and its files differ."""
    manifest = read_manifest(directory)
    if separators not in (None, manifest.separators):
        raise DataError(
            f"the manifest of {directory} declares separators `{manifest.separators}`, not `{separators}`",
            remedy="leave --separators out; validate judges by the manifest and reports what differs",
        )
    entry, loaded = manifest.tokenizer, _check_manifest(directory, manifest, tokenizer, findings)
    source = loaded if loaded is not None and loaded.fingerprint == entry.fingerprint else entry
    rules = _Rules(vocabulary or Vocabulary.of(source), manifest.separators, _path_and_eod(loaded), manifest.dtype)
    files = [_File(shard.prefix(directory), "megatron", shard.name, shard) for shard in manifest.shards]
    return _Subject(files, rules, manifest, "declared by the manifest", entry.fingerprint)


def _without_manifest(
    directory: Path,
    tokenizer: Tokenizer | None,
    vocabulary: Vocabulary | None,
    separators: Separators | None,
    format: Format | None,  # noqa: A002
) -> _Subject:
    """The subject for a directory of token files without a manifest. Raises DataError."""
    format_of = token_files(directory, format)
    files = [
        _File(path, kind, path.name if path.name == directory.name else str(path).removeprefix(f"{directory}/"))
        for path, kind in format_of.items()
    ]
    if vocabulary is None and tokenizer is not None:
        vocabulary = Vocabulary.of(tokenizer)
    if vocabulary is None:
        raise DataError(
            f"{directory} has no manifest that defines its ids",
            remedy="pass --tokenizer T, or --vocab-size N and --eod ID",
        )
    rules, because = _Rules(vocabulary, separators or "none", _path_and_eod(tokenizer), None), "declared"
    if separators is None:
        rules, because = _detect_separators(rules, files)
    return _Subject(files, rules, None, because, tokenizer.fingerprint if tokenizer else None)


def _check_manifest(
    directory: Path, manifest: CorpusManifest, tokenizer: Tokenizer | None, findings: Findings
) -> Tokenizer | None:
    """Compare the manifest with its files and the given tokenizer. Returns the tokenizer of the corpus, if any."""
    entry, stored = manifest.tokenizer, None
    for quantity in ("documents", "tokens"):
        in_shards = sum(getattr(shard, quantity) for shard in manifest.shards)
        if in_shards != getattr(manifest, quantity):
            note = f"{getattr(manifest, quantity)} {quantity} in all, but its shards have {in_shards}"
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
        fingerprints = f"manifest {entry.fingerprint[:12]}, {tokenizer.path} {tokenizer.fingerprint[:12]}"
        findings.note("tokenizer", "manifest.json", fingerprints)
        return stored
    return stored or tokenizer


def _detect_separators(rules: _Rules, files: list[_File]) -> tuple[_Rules, str]:
    """Measure which separators most documents carry, in the first run of up to 8 files.

    Returns:
        The rules with these separators, and the measured numbers as text.
    """
    checker = TokenChecker("", rules.vocabulary, "none", flat=False)
    for file in files[:: max(1, len(files) // _MEASURED_FILES)][:_MEASURED_FILES]:
        try:
            opened = rules.open(file)
            if opened.shard and opened.shard.index_problem():
                continue
            run = next(opened.runs(MEASURED_TOKENS), None)
            if run is not None:
                checker.add(run)
        except (DataError, OSError):
            continue  # reported when the file is measured
    documents, end, begin = checker.documents - checker.empty, checker.ending, checker.beginning
    detected: Separators = "trailing" if 2 * end > documents else "leading" if 2 * begin > documents else "none"
    because = f"measured: of {documents:_} documents {end:_} end and {begin:_} begin with one"
    return replace(rules, separators=detected), because


def _size(file: _File) -> int:
    """Bytes of the file that holds the tokens; 0 if it does not exist."""
    path = Path(f"{file.path}.bin") if file.format == "megatron" else file.path
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _measure_all(rules: _Rules, files: list[_File], workers: int) -> Iterator[Measurement]:
    """Measure the files. Yields in their order, so that reports do not depend on timing; the queue is bounded."""
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
    """Measure a file, or the part of it before its first damage."""
    checker = TokenChecker(file.name, rules.vocabulary, rules.separators, flat=file.format == "npy")
    protected, runs = _open_protected(rules.protected), _runs(rules, file, checker.findings)
    return measure(file.name, runs, checker, _load_tokenizer(rules.tokenizer), protected)


def _runs(rules: _Rules, file: _File, findings: Findings) -> Iterator[Run]:
    """The runs of a file; none if its index is damaged. Raises DataError, OSError."""
    opened = rules.open(file)
    if _is_readable(opened.shard, file, rules, findings):
        yield from opened.runs(MEASURED_TOKENS)


def _path_and_eod(tokenizer: Tokenizer | None) -> tuple[Path, int] | None:
    return (tokenizer.path, tokenizer.eod) if tokenizer is not None else None


@functools.lru_cache(maxsize=2)
def _load_tokenizer(path_and_eod: tuple[Path, int] | None) -> Tokenizer | None:
    return Tokenizer.load(*path_and_eod) if path_and_eod is not None else None


@functools.lru_cache(maxsize=1)
def _open_protected(folder: Path | None) -> ProtectedTexts | None:
    return ProtectedTexts.open(folder) if folder is not None else None


def _is_readable(shard: Shard | None, file: _File, rules: _Rules, findings: Findings) -> bool:
    """Whether the index of a file allows reading it in order. Notes what is wrong with a shard."""
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
    """Compare a shard with its entry in the manifest; differences become findings."""
    tokens = shard.listed_bytes // shard.dtype.itemsize
    for field, actual, declared in (
        ("documents", shard.documents, entry.documents),
        ("tokens", tokens, entry.tokens),
        ("bytes", shard.bytes, entry.bytes),
        ("dtype", shard.dtype.name, rules.dtype),
    ):
        if actual != declared:
            findings.note("manifest-mismatch", file.name, f"{field}: {actual}, the manifest says {declared}")
    for path, expected in ((shard.path, entry.bin_xxh3), (shard.index_path, entry.idx_xxh3)):
        if file_checksum(path) != expected:
            findings.note("checksum", file.name + path.suffix, "")


def _add_texts(subject: _Subject, findings: Findings) -> None:
    """Add the text around the examples of findings, if a tokenizer is known."""
    if (tokenizer := _load_tokenizer(subject.rules.tokenizer)) is None:
        return
    examples = [example for finding in findings.by_code.values() for example in finding.examples]
    files_with_examples = {example.file for example in examples if example.document is not None}
    for file in subject.files:
        if file.name in files_with_examples:
            add_texts(examples, file.name, subject.rules.open(file), tokenizer)
