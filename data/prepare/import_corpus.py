"""`fsdp-data import`: corpora from files tokenised elsewhere, without tokenising again.

Megatron shards stay where they are and the manifest points to them; other formats are rewritten as new shards without
separators. What the documents carry is declared, and checked on every token: see `data.validate.checker`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data.corpus.corpus import BLOCK_TOKENS, CorpusManifest, Separators, ShardBlocks, Vocabulary, write_corpus
from data.corpus.formats import Format, detect_format, find_token_files, open_file
from data.corpus.shards import Shard, ShardWriter, file_checksum, token_dtype
from data.text.tokenizer import Tokenizer
from data.validate.checker import TokenChecker
from fsdp_pretrain.errors import DataError

from .jobs import Task, claim, describe, gather, make_all, release, write_record


@dataclass(frozen=True)
class ImportOptions:
    """Options that decide how files are adopted."""

    format: Format | None
    """Of all files; None: by their names."""
    separators: Separators
    """What stored documents are declared to carry."""
    copy: bool = False
    """Write new shards instead of pointing to Megatron's (other formats are always rewritten)."""
    dtype: str | None = None
    """NumPy name of the tokens' type in `bin` files."""


def ingest(
    sources: Sequence[Path],
    tokenizer: Tokenizer,
    out: Path,
    options: ImportOptions,
    *,
    workers: int,
    overwrite: bool = False,
    quiet: bool = False,
) -> CorpusManifest:
    """Make the corpus directory `out` from token files.

    Args:
        tokenizer: the one that made the tokens.
        out: created if absent; continued if it holds the same job, refused if it holds another one.
        overwrite: discard what `out` holds.

    Raises:
        DataError: unreadable files, documents that do not carry what was declared, or another job in `out`.
    """
    files = list({file.absolute(): None for source in sources for file in find_token_files(source, options.format)})
    formats = {options.format or detect_format(file) for file in files}
    for file in files:
        if re.search("[\ud800-\udfff]", str(file)):
            raise DataError(f"the name of {file} is not UTF-8 and cannot be stored in a manifest", remedy="rename it")
    if "text" in formats:
        raise DataError(f"{files[0]} holds text, not tokens", remedy="make a corpus of it with `fsdp-data prepare`")
    if len(formats) > 1:
        raise DataError(f"the sources are of several formats: {', '.join(sorted(formats))}", remedy="import each alone")
    (kind,) = formats
    options = replace(options, format=kind, copy=options.copy or kind != "megatron")
    inside = [file for file in files if out.absolute() in file.parents]
    if inside:
        raise DataError(f"{inside[0]} is inside the output directory", remedy="choose another --out")
    dtype = token_dtype(tokenizer.vocab_size) if options.copy else _common_dtype(files)
    sizes = [_stat(file, kind).st_size for file in files]
    claim(out, _job(files, tokenizer, options), len(files), overwrite=overwrite)
    tasks = [
        Task(out / "shards" / name, (file, options, size), size)
        for name, file, size in zip(_names(files), files, sizes, strict=True)
    ]
    todo = [task for task in tasks if not task.is_done((".json", ".bin", ".idx") if options.copy else (".json",))]
    try:
        make_all(ingest_file, tasks, todo, tokenizer, workers, desc="import", disable=quiet or None)
    except DataError:
        release(out)
        raise
    full, counts = gather(out, tasks)
    if not full:
        raise DataError("the files hold no documents")
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    statistics = {"imported": kind, "declared": options.separators, **counts, "made": made}
    return write_corpus(out, tokenizer, full, dtype, statistics, "none" if options.copy else options.separators)


def _common_dtype(prefixes: Sequence[Path]) -> np.dtype[Any]:
    """Dtype of all shards, if they can be adopted in place. Raises DataError."""
    first: Shard | None = None
    for prefix in prefixes:
        shard = Shard(prefix)
        problem = ""
        if not shard.has_single_sequences:
            problem = f"{prefix} has documents of several sequences"
        elif int(shard.lengths.sum(dtype=np.int64)) * shard.dtype.itemsize != _stat(prefix, "megatron").st_size:
            problem = f"{prefix}.bin holds more than the documents of its index"
        elif first is not None and shard.dtype != first.dtype:
            problem = f"{prefix} is of {shard.dtype.name}, {first.prefix} of {first.dtype.name}"
        if problem:
            raise DataError(problem, remedy="pass --copy to write new shards")
        first = first or shard
    assert first is not None
    return first.dtype


def _job(files: list[Path], tokenizer: Tokenizer, options: ImportOptions) -> dict[str, Any]:
    """Everything that decides the content of the shards, as JSON values."""
    assert options.format is not None
    stamps = [_stat(file, options.format) for file in files]
    return {
        "files": [str(file) for file in files],
        "stamps": [[stamp.st_size, stamp.st_mtime_ns] for stamp in stamps],
        "tokenizer": tokenizer.fingerprint,
        **asdict(options),
    }


def _stat(file: Path, kind: Format) -> os.stat_result:
    """Of the file that holds the tokens. Raises DataError."""
    path = file.with_name(file.name + ".bin") if kind == "megatron" else file
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"cannot open {path}: {error.strerror}") from None


def _names(files: list[Path]) -> list[str]:
    """A shard name for each file: its own if all are unique."""
    names = [file.stem if file.suffix in (".arrow", ".npy", ".bin") else file.name for file in files]
    return names if len(set(names)) == len(names) else [f"{n:05d}-{name}" for n, name in enumerate(names)]


def ingest_file(
    prefix: Path, source: Path, options: ImportOptions, size: int, tokenizer: Tokenizer, report: Any
) -> None:
    """Check one file, copy it if asked to, and write its `.json` record, which marks it done.

    Args:
        source: file, or prefix of a Megatron pair.
        options: with the format resolved.
        size: bytes of the file, for progress.

    Raises:
        DataError: see `ingest`.
    """
    kind, declared = options.format, options.separators
    assert kind is not None
    file = open_file(source, kind, tokenizer.eod, dtype=options.dtype, leading=declared == "leading")
    checker = TokenChecker("", Vocabulary.of(tokenizer), declared, flat=kind in ("npy", "bin"))
    dtype, digest, shown = token_dtype(tokenizer.vocab_size), xxhash.xxh3_128(), 0
    with ShardWriter(prefix, dtype) if options.copy else nullcontext() as writer:
        for run in file.runs():
            separators = checker.add(run).separators
            if writer is None:
                digest.update(run.tokens.data)
            elif checker.holds:
                lengths = run.lengths - separators
                kept = run.tokens[run.tokens != tokenizer.eod] if separators.any() else run.tokens
                writer.extend(kept.astype(dtype), lengths[lengths > 0].tolist())
            step = min(run.tokens.nbytes, size - shown)
            report(step)
            shown += step
        checker.require(str(source), file, tokenizer)
        entry = writer.finish() if writer else _entry(prefix.name, source, checker, digest.hexdigest())
    carried = int(declared != "none" and not options.copy)
    entry["blocks"] = ShardBlocks.of(
        Shard(prefix if options.copy else source), BLOCK_TOKENS, carried, pairs=False
    ).to_json()
    report(size - shown)
    counts = {"documents": checker.documents, "empty": checker.empty, "unterminated": checker.unterminated}
    write_record(prefix, {"entry": entry, "counts": counts, "source": str(source)})


def _entry(name: str, source: Path, checker: TokenChecker, bin_xxh3: str) -> dict[str, Any]:
    """The manifest entry of a shard that stays in place."""
    return {
        "name": name,
        "path": str(source.parent.resolve() / source.name),
        "documents": checker.documents,
        "tokens": checker.tokens,
        "bytes": _stat(source, "megatron").st_size,
        "bin_xxh3": bin_xxh3,
        "idx_xxh3": file_checksum(source.with_name(source.name + ".idx")),
    }


def summary(manifest: CorpusManifest, out: Path) -> str:
    """The final message of `import`."""
    numbers = manifest.statistics
    where = "in place" if any(entry.path for entry in manifest.shards) else "copied"
    carried = f"all documents match the declared separators: {numbers['declared']}"
    lines = [f"{out}: {describe(manifest)} ({where}); {carried}"]
    if numbers["empty"]:
        lines.append(f"  {numbers['empty']:_} empty documents, which training leaves out")
    if numbers["unterminated"]:
        lines.append(
            f"  {numbers['unterminated']:_} files begin or end inside a document, which is kept as a separate document"
        )
    return "\n".join(lines)
