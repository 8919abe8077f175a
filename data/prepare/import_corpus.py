"""`fsdp-data import`: makes corpora from files that were tokenised elsewhere, without tokenising again.

Megatron shards stay where they are and the manifest points to them; other formats are rewritten as new shards without
separators. The user declares which separators the documents carry, and every token is checked against that, see
`fsdp_pretrain.data.validate.checker`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fsdp_pretrain.data.corpus.formats import Format, open_file, token_files
from fsdp_pretrain.data.corpus.manifest import CorpusManifest, Separators, Vocabulary
from fsdp_pretrain.data.corpus.shards import Shard, ShardWriter, file_checksum, token_dtype
from fsdp_pretrain.data.corpus.writing import BLOCK_TOKENS, ShardBlocks, write_corpus
from fsdp_pretrain.data.text.files import stamp_of
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.data.validate.checker import TokenChecker
from fsdp_pretrain.errors import DataError, raising

from .jobs import Job, Task, describe, summed, write_record


@dataclass(frozen=True)
class ImportOptions:
    """Options that determine how files are imported."""

    format: Format | None
    """Format of all files; None: inferred from their names."""
    separators: Separators
    """Separators that the stored documents are declared to carry."""
    copy: bool = False
    """Whether to write new shards instead of pointing to Megatron's (other formats are always rewritten)."""


def ingest(sources: Sequence[Path], tokenizer: Tokenizer, job: Job, options: ImportOptions) -> CorpusManifest:
    """Make a corpus from token files; `tokenizer` is the one that made the tokens. Raises DataError if files cannot be
    read, documents do not carry the declared separators, or the directory holds another job."""
    format_of = {file: kind for source in sources for file, kind in token_files(source, options.format).items()}
    files = list({file.absolute(): None for file in format_of})
    for file in files:
        if re.search("[\ud800-\udfff]", str(file)):
            raise DataError(f"the name of {file} is not UTF-8 and cannot be stored in a manifest", remedy="rename it")
    formats = set(format_of.values())
    if len(formats) > 1:
        raise DataError(f"the sources are of several formats: {', '.join(sorted(formats))}", remedy="import each alone")
    (kind,) = formats
    options = replace(options, format=kind, copy=options.copy or kind != "megatron")
    job.refuse_own(files)
    dtype = token_dtype(tokenizer.vocab_size) if options.copy else _common_dtype(files)
    stamps = [_stamp(file, kind) for file in files]
    tasks = [
        Task(f"shards/{name}", (file, options), stamp[0], (".json", ".bin", ".idx") if options.copy else (".json",))
        for name, file, stamp in zip(_names(files), files, stamps, strict=True)
    ]
    job.claim(_content(files, stamps, tokenizer, options), len(files))
    try:
        job.make(ingest_file, tasks, tokenizer, "import")
    except DataError:
        job.release()
        raise
    return _finish(job.out, job.gather(tasks), tokenizer, options, dtype)


def _finish(
    out: Path, records: list[dict[str, Any]], tokenizer: Tokenizer, options: ImportOptions, dtype: np.dtype[Any]
) -> CorpusManifest:
    """Make a corpus of finished shards; the manifest is written last. Raises DataError."""
    entries = [record["entry"] for record in records if record["entry"]["documents"]]
    if not entries:
        raise DataError("the files hold no documents")
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    statistics = {"imported": options.format, "declared": options.separators, **summed(records), "made": made}
    return write_corpus(out, tokenizer, entries, dtype, statistics, "none" if options.copy else options.separators)


def _common_dtype(files: Sequence[Path]) -> np.dtype[Any]:
    """The dtype of all shards. Raises DataError if they cannot stay in place."""
    dtype = None
    for file in files:
        shard = Shard(file)
        dtype = dtype or shard.dtype
        problem = ""
        if not shard.has_single_sequences:
            problem = f"{file} has documents of several sequences"
        elif shard.listed_bytes != shard.bytes:
            problem = f"{file}.bin holds more than the documents of its index"
        elif shard.dtype != dtype:
            problem = f"{file} is of {shard.dtype.name}, {files[0]} of {dtype.name}"
        if problem:
            raise DataError(problem, remedy="pass --copy to write new shards")
    assert dtype is not None
    return dtype


def _content(
    files: Sequence[Path], stamps: list[list[int]], tokenizer: Tokenizer, options: ImportOptions
) -> dict[str, Any]:
    """Everything that determines the content of the shards, as JSON values."""
    return {
        "files": [str(file) for file in files],
        "stamps": stamps,
        "tokenizer": tokenizer.fingerprint,
        **asdict(options),
    }


def _stamp(file: Path, kind: Format) -> list[int]:
    """The `stamp_of` a file, or of both files of a Megatron pair. Raises DataError."""
    names = [f"{file}.bin", f"{file}.idx"] if kind == "megatron" else [str(file)]
    stamps = list[int]()
    for name in names:
        with raising(DataError, f"cannot open {name}"):
            stamps += stamp_of(Path(name))
    return stamps


def _names(files: Sequence[Path]) -> list[str]:
    """A shard name for each file: the file's name if all names are different."""
    names = [path.stem if path.suffix in (".arrow", ".npy") else path.name for path in files]
    return names if len(set(names)) == len(names) else [f"{n:05d}-{name}" for n, name in enumerate(names)]


def ingest_file(prefix: Path, source: Path, options: ImportOptions, tokenizer: Tokenizer) -> None:
    """Check one file, copy it if `options.copy`, and write its `.json` record, which marks it done.

    Args:
        source: a file, or the common path of a Megatron pair without its suffixes.
        options: its `format` must be set.

    Raises:
        DataError: see `ingest`.
    """
    kind, declared = options.format, options.separators
    assert kind is not None
    checker = TokenChecker("", Vocabulary.of(tokenizer), declared, flat=kind == "npy")
    dtype, digest = token_dtype(tokenizer.vocab_size), xxhash.xxh3_128()
    with ShardWriter(prefix, dtype) if options.copy else nullcontext() as writer:
        file = open_file(source, kind, tokenizer.eod, leading=declared == "leading")
        for run in file.runs():
            separators = checker.add(run).separators
            if writer is None:
                digest.update(run.tokens.data)
            elif checker.holds:
                lengths = run.lengths - separators
                kept = run.tokens[run.tokens != tokenizer.eod] if separators.any() else run.tokens
                writer.extend(kept.astype(dtype), lengths[lengths > 0].tolist())
        checker.require(str(source), file, tokenizer)
        entry = writer.finish() if writer else _entry(prefix.name, source, checker, digest.hexdigest())
        separators_per_document = int(declared != "none" and not options.copy)
        shard = Shard(prefix if options.copy else source)
        entry["blocks"] = ShardBlocks.of(shard, BLOCK_TOKENS, separators_per_document, pairs=False).to_json()
    counts = {"documents": checker.documents, "empty": checker.empty, "unterminated": checker.unterminated}
    write_record(prefix, {"entry": entry, "counts": counts, "source": str(source)})


def _entry(name: str, source: Path, checker: TokenChecker, bin_xxh3: str) -> dict[str, Any]:
    """The manifest entry of a shard that stays in place."""
    return {
        "name": name,
        "path": str(source.parent.resolve() / source.name),
        "documents": checker.documents,
        "tokens": checker.tokens,
        "bytes": source.with_name(source.name + ".bin").stat().st_size,
        "bin_xxh3": bin_xxh3,
        "idx_xxh3": file_checksum(source.with_name(source.name + ".idx")),
    }


def summary(manifest: CorpusManifest, out: Path) -> str:
    """The final message of `import`."""
    statistics = manifest.statistics
    where = "in place" if any(entry.path for entry in manifest.shards) else "copied"
    separators = f"all documents match the declared separators: {statistics['declared']}"
    lines = [f"{out}: {describe(manifest)} ({where}); {separators}"]
    if statistics["empty"]:
        lines.append(f"  {statistics['empty']:_} empty documents, which training leaves out")
    if unterminated := statistics["unterminated"]:
        lines.append(f"  {unterminated:_} files begin or end inside a document, which is kept as a separate document")
    return "\n".join(lines)
