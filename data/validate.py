"""`fsdp-data validate`: measure what a corpus really holds. No torch; streaming; every finding has a remedy.

The manifest is not believed: files are measured against it, and every token is looked at. Memory: about 100 MB per
worker, and 8 bytes per document plus 8 kB per file in the parent (see `data.meter` and `data.totals`).
"""

from __future__ import annotations

import functools
import multiprocessing
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from fsdp_pretrain.config import Config
from fsdp_pretrain.errors import DataError

from .corpus import Manifest, Separators, ShardEntry, read_manifest
from .findings import EXAMPLES, Example, Findings
from .formats import Format, MegatronFile, TokenFile, detect_format, find_token_files, open_file
from .meter import MEASURED_TOKENS, Measurement, Meter, Vocabulary
from .objectives import Specials
from .report import Report, add_texts
from .shards import file_checksum
from .tokenizer import Tokenizer
from .totals import Totals

_PART_BYTES = 256_000_000
_THIN_BYTES = 16_000_000
_MEASURED_FILES = 8
_POOL_BYTES = 32_000_000
"""Below this, starting processes takes longer than measuring."""


@dataclass(frozen=True)
class _Subject:
    """What is validated, and what it is judged by."""

    files: list[tuple[Path, Format]]
    names: list[str]
    manifest: Manifest | None
    vocabulary: Vocabulary
    separators: Separators
    because: str
    tokenizer: Tokenizer | None
    fingerprint: str | None
    dtype: str | None

    def open(self, path: Path, kind: Format) -> TokenFile:
        """One of its files. Raises DataError."""
        cut: Literal["before", "after"] = "before" if self.separators == "leading" else "after"
        return open_file(path, kind, self.vocabulary.eod, self.tokenizer, self.dtype, cut)


@dataclass(frozen=True)
class _Work:
    """One file, or one of several parts of a big one, as a worker gets it."""

    file: int
    path: Path
    format: Format
    name: str
    part: int
    parts: int
    bytes: int
    entry: ShardEntry | None
    dtype: str | None
    vocabulary: Vocabulary
    separators: Separators
    tokenizer: tuple[Path, int] | None
    checksums: bool


def validate(
    directory: Path,
    *,
    tokenizer: Tokenizer | None = None,
    vocabulary: Vocabulary | None = None,
    separators: Separators | None = None,
    format: Format | None = None,  # noqa: A002
    dtype: str | None = None,
    workers: int = 1,
    checksums: bool = True,
    quiet: bool = False,
) -> Report:
    """Look at every document of a corpus, or of token files without a manifest.

    Args:
        directory: with `manifest.json`; or token files, for which `vocabulary` or `tokenizer` must be given.
        tokenizer: compare the corpus with this tokenizer.
        vocabulary: overrides the manifest's.
        separators: what the documents of a bare directory are meant to carry; None takes what most of them do.
        format: of files without a manifest; None takes it from their names.
        dtype: of `bin` files (default: uint16).
        workers: processes.
        checksums: also read every file once more and compare checksums.
        quiet: no progress bar.

    Raises:
        DataError: the directory holds no shards, nothing says what the ids should be, or `separators` is given for a
            corpus whose manifest declares them.
    """
    findings = Findings()
    if (directory / "manifest.json").exists():
        subject = _declared(directory, tokenizer, vocabulary, separators, checksums, findings)
    else:
        subject = _bare(directory, tokenizer, vocabulary, separators, format, dtype)
    works = list(_split(subject, checksums))
    totals = Totals(subject.names, subject.vocabulary.size)
    totals.findings.merge(findings)
    size = sum(work.bytes for work in works)
    with tqdm(total=size, unit="B", unit_scale=True, desc="validate", disable=True if quiet else None) as bar:
        for work, measured in zip(works, _each(works, workers), strict=True):
            totals.add(work.file, measured)
            bar.update(work.bytes)
    totals.judge(decoded=subject.tokenizer is not None)
    if subject.manifest is not None and subject.manifest.pairs:  # answers are short by nature
        totals.findings.by_code.pop("one-token-documents", None)
    return _report(directory, subject, totals)


def _declared(
    directory: Path,
    tokenizer: Tokenizer | None,
    vocabulary: Vocabulary | None,
    separators: Separators | None,
    checksums: bool,
    findings: Findings,
) -> _Subject:
    """A corpus with a manifest."""
    manifest = read_manifest(directory)
    if separators not in (None, manifest.separators):
        raise DataError(
            f"the manifest of {directory} declares separators `{manifest.separators}`, not `{separators}`",
            remedy="leave --separators out; validate judges by the manifest and reports what differs",
        )
    entry, held = manifest.tokenizer, _compare(directory, manifest, tokenizer, checksums, findings)
    stored = held if held is not None and held.fingerprint == entry.fingerprint else entry
    return _Subject(
        files=[(shard.prefix(directory), "megatron") for shard in manifest.shards],
        names=[shard.name for shard in manifest.shards],
        manifest=manifest,
        vocabulary=vocabulary or Vocabulary(stored.vocab_size, stored.eod, frozenset(stored.specials)),
        separators=manifest.separators,
        because="declared by the manifest",
        tokenizer=held,
        fingerprint=entry.fingerprint,
        dtype=manifest.dtype,
    )


def _bare(
    directory: Path,
    tokenizer: Tokenizer | None,
    vocabulary: Vocabulary | None,
    separators: Separators | None,
    format: Format | None,  # noqa: A002
    dtype: str | None,
) -> _Subject:
    """A directory of token files without a manifest."""
    files = [(path, format or detect_format(path)) for path in find_token_files(directory, format)]
    if vocabulary is None and tokenizer is not None:
        vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.eod, frozenset(tokenizer.specials))
    if vocabulary is None:
        raise DataError(
            f"{directory} has no manifest, so nothing says what its ids mean",
            remedy="pass --tokenizer T, or --vocab-size N and --eod ID",
        )
    subject = _Subject(
        files=files,
        names=[str(path.relative_to(directory if directory.is_dir() else directory.parent)) for path, _ in files],
        manifest=None,
        vocabulary=vocabulary,
        separators=separators or "none",
        because="declared",
        tokenizer=tokenizer,
        fingerprint=tokenizer.fingerprint if tokenizer else None,
        dtype=dtype,
    )
    if separators is not None:
        return subject
    judged, because = _measured_separators(subject)
    return replace(subject, separators=judged, because=because)


def _compare(
    directory: Path, manifest: Manifest, tokenizer: Tokenizer | None, checksums: bool, findings: Findings
) -> Tokenizer | None:
    """The manifest against the files beside it and the tokenizer asked for; the tokenizer of the corpus, if any."""
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
    try:
        if checksums and file_checksum(directory / "blocks.npy") != manifest.blocks_xxh3:
            findings.note("checksum", "blocks.npy", "not the block table that the manifest names")
    except OSError as error:
        _unreadable(findings, "blocks.npy", error)
    try:
        stored = Tokenizer.load(directory / entry.file, eod=entry.eod)
        if stored.fingerprint != entry.fingerprint:
            findings.note("tokenizer", entry.file, "not the tokenizer the manifest names")
            stored = None
        elif (stored.vocab_size, stored.specials) != (entry.vocab_size, entry.specials):
            findings.note("manifest-mismatch", "manifest.json", f"vocabulary or special tokens are not of {entry.file}")
    except (DataError, OSError) as error:
        _unreadable(findings, entry.file, error)
    if tokenizer is not None and tokenizer.fingerprint != entry.fingerprint:
        both = f"manifest {entry.fingerprint[:12]}, {tokenizer.path} {tokenizer.fingerprint[:12]}"
        findings.note("tokenizer", "manifest.json", both)
        return stored
    return stored or tokenizer


def _measured_separators(subject: _Subject) -> tuple[Separators, str]:
    """What most documents carry, by the first run of up to 8 files."""
    documents = ends = starts = 0
    files, eod = subject.files, subject.vocabulary.eod
    for path, format_ in files[:: max(1, len(files) // _MEASURED_FILES)][:_MEASURED_FILES]:
        try:
            file = subject.open(path, format_)
            if isinstance(file, MegatronFile) and _index_problem(file):
                continue
            run = next(file.runs(MEASURED_TOKENS), None)
        except (DataError, OSError):
            continue  # found again, and named, when the file is measured
        if run is None or not len(run.tokens):
            continue
        stops = np.cumsum(run.lengths)[run.lengths > 0]
        documents += len(stops)
        ends += int((run.tokens[stops - 1] == eod).sum())
        starts += int((run.tokens[stops - run.lengths[run.lengths > 0]] == eod).sum())
    found: Separators = "trailing" if 2 * ends > documents else "leading" if 2 * starts > documents else "none"
    return found, f"measured: of {documents:_} documents {ends:_} end and {starts:_} begin with one"


def _split(subject: _Subject, checksums: bool) -> Iterator[_Work]:
    """The work; files beyond 256 MB in several parts, so that one file occupies all workers."""
    manifest, tokenizer = subject.manifest, subject.tokenizer
    for number, ((path, format_), name) in enumerate(zip(subject.files, subject.names, strict=True)):
        data = path.with_name(path.name + ".bin") if format_ == "megatron" else path
        size = data.stat().st_size if data.exists() else 0
        parts = max(1, -(-size // _PART_BYTES)) if format_ == "megatron" else 1
        for part in range(parts):
            yield _Work(
                *(number, path, format_, name, part, parts, size // parts),
                entry=manifest.shards[number] if manifest else None,
                dtype=manifest.dtype if manifest else subject.dtype,
                vocabulary=subject.vocabulary,
                separators=subject.separators,
                tokenizer=(tokenizer.path, tokenizer.eod) if tokenizer else None,
                checksums=checksums,
            )


def _each(works: list[_Work], workers: int) -> Iterator[Measurement]:
    """Measurements in the order of the works, so that reports do not depend on timing; few wait at a time."""
    if workers <= 1 or len(works) == 1 or sum(work.bytes for work in works) < _POOL_BYTES:
        yield from map(_measure, works)
        return
    with ProcessPoolExecutor(min(workers, len(works)), multiprocessing.get_context("spawn")) as pool:
        waiting: deque[Future[Measurement]] = deque()
        for work in works:
            waiting.append(pool.submit(_measure, work))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _measure(work: _Work) -> Measurement:
    """Everything about one part of a file; what concerns the whole file is reported with its first part."""
    result = Measurement()
    tokenizer = _tokenizer(*work.tokenizer) if work.tokenizer else None
    file = _open(work, tokenizer, result.findings)
    if file is None:
        return result if work.part == 0 else Measurement()
    thin, flat = work.bytes > _THIN_BYTES, work.format in ("npy", "bin")
    meter = Meter(work.name, work.vocabulary, work.separators, tokenizer, thin=thin, flat=flat)
    if work.part == 0:
        meter.result.findings.merge(result.findings)
    begin, stop = (work.bytes * k for k in (work.part, work.part + 1))
    offset = 0
    try:
        for run in file.runs(MEASURED_TOKENS):
            if work.part == work.parts - 1 or offset < stop:
                if offset >= begin:
                    meter.add(run)
            else:
                break
            offset += run.tokens.nbytes
    except (DataError, OSError) as error:  # what stands before the damage is measured
        _unreadable(meter.result.findings, work.name, error)
    return meter.finish()


def _unreadable(findings: Findings, name: str, error: DataError | OSError) -> None:
    findings.note("unreadable", name, error.cause if isinstance(error, DataError) else error.strerror or str(error))


@functools.lru_cache(maxsize=2)
def _tokenizer(path: Path, eod: int) -> Tokenizer:
    return Tokenizer.load(path, eod)


def _open(work: _Work, tokenizer: Tokenizer | None, findings: Findings) -> TokenFile | None:
    """The file, once it is what its manifest says and can be walked; findings otherwise."""
    try:
        cut: Literal["before", "after"] = "before" if work.separators == "leading" else "after"
        file = open_file(work.path, work.format, work.vocabulary.eod, tokenizer, work.dtype, cut)
        return _checked(file, work, findings) if isinstance(file, MegatronFile) else file
    except (DataError, OSError) as error:
        _unreadable(findings, work.name, error)
        return None


def _checked(file: MegatronFile, work: _Work, findings: Findings) -> MegatronFile | None:
    """The shard compared with its manifest entry; None if its index cannot be followed."""
    shard = file.shard
    if work.entry is not None and work.part == 0:
        wrong = _differences(work.entry, work.dtype, file)
        findings.add("manifest-mismatch", len(wrong), [Example(work.name, note=note) for note in wrong])
        if work.checksums:
            for suffix, expected in ((".bin", work.entry.bin_xxh3), (".idx", work.entry.idx_xxh3)):
                if file_checksum(shard.prefix.with_name(shard.prefix.name + suffix)) != expected:
                    findings.note("checksum", work.name + suffix, "")
    problem = _index_problem(file)
    if problem:
        findings.note("index", work.name, problem)
        return None
    beyond = _bin_bytes(file) - int(shard.lengths.sum(dtype=np.int64)) * shard.dtype.itemsize
    if beyond and work.entry is None:  # against a manifest, the sizes were compared
        findings.note("index", work.name, f"{beyond} bytes of .bin belong to no document")
    return file


def _bin_bytes(file: MegatronFile) -> int:
    prefix = file.shard.prefix
    return prefix.with_name(prefix.name + ".bin").stat().st_size


def _differences(entry: ShardEntry, dtype: str | None, file: MegatronFile) -> list[str]:
    shard = file.shard
    held = {
        "documents": shard.documents,
        "tokens": int(shard.lengths.sum(dtype=np.int64)),
        "bytes": _bin_bytes(file),
        "dtype": shard.dtype.name,
    }
    said = {"documents": entry.documents, "tokens": entry.tokens, "bytes": entry.bytes, "dtype": dtype}
    return [f"{key}: {held[key]}, the manifest says {said[key]}" for key in said if held[key] != said[key]]


def _index_problem(file: MegatronFile) -> str:
    """Why documents do not lie one behind the other from the start of the file, one sequence each; empty if they do."""
    shard, lengths = file.shard, file.shard.lengths.astype(np.int64)
    if not shard.documents:
        return ""
    if int(lengths.min()) < 0:
        return "a document has a negative length"
    if not np.array_equal(shard.document_indices, np.arange(shard.documents + 1)):
        return "documents of several sequences"
    ends = np.cumsum(lengths) * shard.dtype.itemsize
    wrong = np.flatnonzero(shard.pointers != ends - lengths * shard.dtype.itemsize)
    return f"document {wrong[0]} does not begin where the one before it ends" if len(wrong) else ""


def _report(directory: Path, subject: _Subject, totals: Totals) -> Report:
    """Put the report together and decode what its examples point at."""
    tokenizer = subject.tokenizer
    report = Report(
        directory=str(directory),
        documents=totals.documents,
        tokens=totals.tokens,
        separators=(subject.separators, subject.because),
        vocabulary=subject.vocabulary,
        fingerprint=subject.fingerprint,
        findings=totals.findings,
        lengths=totals.lengths(),
        entropy_bits=totals.entropy(),
        specials={
            number: {"text": tokenizer.specials.get(number, "") if tokenizer else "", **places}
            for number, places in totals.specials().items()
        },
        files=totals.files,
    )
    if tokenizer is not None:
        opened = next((entry for entry in totals.files if entry["tokens"]), None)
        boundaries = [Example(opened["name"], n, 0) for n in range(1, EXAMPLES + 1)] if opened else []
        examples = [e for finding in totals.findings.by_code.values() for e in finding.examples] + boundaries
        wanted = {example.file for example in examples if example.document is not None}
        files = zip(subject.names, subject.files, strict=True)
        add_texts(examples, {name: subject.open(*file) for name, file in files if name in wanted}, tokenizer)
        report.boundaries = [example.text for example in boundaries if example.text is not None]
    return report


def check_against(report: Report, run: Config) -> Findings:
    """Whether a run can train on the validated corpus together with its other sources.

    Args:
        report: of the corpus.
        run: configuration; its `model.vocab` must hold the vocabulary and the objective's special tokens, and its
            sources must share the tokenizer.
    """
    findings, size, objective = Findings(), report.vocabulary.size, run.data.objective
    needed = size if objective.kind == "causal" else max(size, Specials.behind(objective, size).eop + 1)
    if run.model.vocab < needed:
        note = f"model.vocab = {run.model.vocab}, tokenizer {size}"
        note += f", with the objective's special tokens {needed}" if needed > size else ""
        findings.note("vocabulary-too-small", "", note)
    for source in run.data.sources:
        try:
            entry = read_manifest(Path(source.path)).tokenizer
        except DataError as error:
            findings.note("unreadable", source.name, error.cause)
            continue
        held: tuple[object, object] = (report.fingerprint, entry.fingerprint)
        if report.fingerprint is None:
            held = ((report.vocabulary.size, report.vocabulary.eod), (entry.vocab_size, entry.eod))
        if held[0] != held[1]:
            findings.note("tokenizer", "", f"source {source.name} of the run ({source.path}) was made with another")
    return findings


__all__ = ["Separators", "Vocabulary", "check_against", "validate"]
