"""`fsdp-data import`: corpora from files tokenised elsewhere, without tokenising again.

Megatron shards stay where they are and the manifest points to them; other formats are rewritten as new shards without
separators. Files in remote storage are fetched one by one while they are worked on. What the documents carry is
declared, and checked on every token: see `data.validate.checker`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import xxhash

from data.corpus.fetched import PAIR, fetched, require_room, scratch_directory
from data.corpus.formats import Format, open_file, token_files
from data.corpus.manifest import CorpusManifest, Separators, Vocabulary
from data.corpus.shards import DTYPES, MAGIC, Shard, ShardWriter, file_checksum, token_dtype
from data.corpus.writing import BLOCK_TOKENS, ShardBlocks, write_corpus
from data.text.files import InputFile, input_file, stamp_of
from data.text.remote_files import at_once, remote_of
from data.text.tokenizer import Tokenizer
from data.validate.checker import TokenChecker
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.remote import Location, Url

from .jobs import Task, claim, describe, gather, make_all, release, summed, write_record
from .outputs import Output, open_output

_COPY = "pass --copy to write new shards"
_HEAD = len(MAGIC) + 8 + 1
"""Bytes of an index up to the code of its dtype."""


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
    sources: Sequence[Location],
    tokenizer: Tokenizer,
    out: Location,
    options: ImportOptions,
    *,
    workers: int,
    overwrite: bool = False,
    scratch: Path | None = None,
    quiet: bool = False,
) -> CorpusManifest:
    """Make the corpus `out`, a directory or a URL, from token files.

    Args:
        tokenizer: the one that made the tokens.
        out: created if absent; continued if it holds the same job, refused if it holds another one.
        overwrite: discard what `out` holds.
        scratch: directory for what is fetched and made; None takes the system's for temporary files.

    Raises:
        DataError: unreadable files, documents that do not carry what was declared, or another job in `out`.
        RemoteError: remote storage failed.
    """
    found = {file: kind for source in sources for file, kind in token_files(source, options.format).items()}
    files = list({file if isinstance(file, Url) else file.absolute(): None for file in found})
    for file in files:
        if re.search("[\ud800-\udfff]", str(file)):
            raise DataError(f"the name of {file} is not UTF-8 and cannot be stored in a manifest", remedy="rename it")
    formats = set(found.values())
    if len(formats) > 1:
        raise DataError(f"the sources are of several formats: {', '.join(sorted(formats))}", remedy="import each alone")
    (kind,) = formats
    options = replace(options, format=kind, copy=options.copy or kind != "megatron")
    _check_places(files, out, options)
    dtype = token_dtype(tokenizer.vocab_size) if options.copy else _common_dtype(files)
    stamps = at_once(lambda file: stamp_of(_data_file(file, kind)), files)
    far = any(isinstance(file, Url) for file in files)
    with scratch_directory(scratch) if far else nullcontext() as room, open_output(out, scratch) as place:
        tasks = [
            Task(f"shards/{name}", (file, options, room), int(stamp[0]))
            for name, file, stamp in zip(_names(files), files, stamps, strict=True)
        ]
        claim(place, _job(files, stamps, tokenizer, options), len(files), overwrite=overwrite)
        names = place.names()
        todo = [
            task for task in tasks if not task.is_done(names, (".json", ".bin", ".idx") if options.copy else (".json",))
        ]
        if room is not None:
            require_room(room, [task.size for task in todo], workers)
        try:
            make_all(ingest_file, place, tasks, todo, tokenizer, workers, desc="import", disable=quiet or None)
        except DataError:
            release(place)
            raise
        return _finish(place, gather(place, tasks), tokenizer, options, dtype)


def _finish(
    place: Output, done: list[dict[str, Any]], tokenizer: Tokenizer, options: ImportOptions, dtype: np.dtype[Any]
) -> CorpusManifest:
    full = [record["entry"] for record in done if record["entry"]["documents"]]
    if not full:
        raise DataError("the files hold no documents")
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    statistics = {"imported": options.format, "declared": options.separators, **summed(done), "made": made}
    with place.making() as directory:
        return write_corpus(
            directory, tokenizer, full, dtype, statistics, "none" if options.copy else options.separators
        )


def _check_places(files: Sequence[Location], out: Location, options: ImportOptions) -> None:
    """Raise DataError if the manifest cannot lie in `out` while the files stay where they are."""
    base = str(out) if isinstance(out, Url) else str(out.absolute())
    inside = [file for file in files if str(file).startswith(f"{base}/")]
    if inside:
        raise DataError(f"{inside[0]} is inside the output directory", remedy="choose another --out")
    scheme = out.scheme if isinstance(out, Url) else None
    elsewhere = [file for file in files if (file.scheme if isinstance(file, Url) else None) != scheme]
    if elsewhere and not options.copy:
        raise DataError(
            f"{elsewhere[0]} and {out} are not in the same storage",
            effect="a corpus is read from one storage, so its manifest cannot point to files in another one",
            remedy="pass --copy to write new shards, or name an --out in the same storage",
        )


def _common_dtype(files: Sequence[Location]) -> np.dtype[Any]:
    """Dtype of all shards, if they can be adopted in place; of those in remote storage the rest is checked when they
    are fetched. Raises DataError."""
    dtypes = at_once(_remote_dtype, [file for file in files if isinstance(file, Url)])
    for file in files:
        if isinstance(file, Path):
            shard = Shard(file)
            _require_adoptable(shard, str(file))
            dtypes.append(shard.dtype)
    for file, dtype in zip(files, dtypes, strict=True):
        if dtype != dtypes[0]:
            raise DataError(f"{file} is of {dtype.name}, {files[0]} of {dtypes[0].name}", remedy=_COPY)
    return dtypes[0]


def _remote_dtype(file: Url) -> np.dtype[Any]:
    remote, name = remote_of(file)
    head = remote.read(f"{name}.idx", 0, _HEAD)
    if not head.startswith(MAGIC) or head[-1] not in DTYPES:
        raise DataError(f"{file}.idx is not a Megatron-Core index of integers", remedy="look for a mistake in the URL")
    return DTYPES[head[-1]]


def _require_adoptable(shard: Shard, source: str) -> None:
    problem = ""
    if not shard.has_single_sequences:
        problem = f"{source} has documents of several sequences"
    elif shard.listed_bytes != shard.bytes:
        problem = f"{source}.bin holds more than the documents of its index"
    if problem:
        raise DataError(problem, remedy=_COPY)


def _job(
    files: Sequence[Location], stamps: list[list[int | str]], tokenizer: Tokenizer, options: ImportOptions
) -> dict[str, Any]:
    """Everything that decides the content of the shards, as JSON values."""
    return {
        "files": [str(file) for file in files],
        "stamps": stamps,
        "tokenizer": tokenizer.fingerprint,
        **asdict(options),
    }


def _data_file(file: Location, kind: Format) -> InputFile:
    """The file that holds the tokens. Raises DataError."""
    name = f"{file}.bin" if kind == "megatron" else str(file)
    try:
        found = input_file(name)
        stamp_of(found)
    except OSError as error:
        raise DataError(f"cannot open {name}: {error.strerror}") from None
    return found


def _names(files: Sequence[Location]) -> list[str]:
    """A shard name for each file: its own if all are unique."""
    own = [PurePath(file.name) for file in files]
    names = [path.stem if path.suffix in (".arrow", ".npy", ".bin") else path.name for path in own]
    return names if len(set(names)) == len(names) else [f"{n:05d}-{name}" for n, name in enumerate(names)]


def ingest_file(
    prefix: Path,
    source: Location,
    options: ImportOptions,
    scratch: Path | None,
    tokenizer: Tokenizer,
) -> None:
    """Check one file, copy it if asked to, and write its `.json` record, which marks it done.

    Args:
        source: file, or prefix of a Megatron pair.
        options: with the format resolved.
        scratch: where it is fetched to; None if all files are local.

    Raises:
        DataError: see `ingest`.
    """
    kind, declared = options.format, options.separators
    assert kind is not None
    checker = TokenChecker("", Vocabulary.of(tokenizer), declared, flat=kind in ("npy", "bin"))
    dtype, digest = token_dtype(tokenizer.vocab_size), xxhash.xxh3_128()
    with ExitStack() as stack:
        here = stack.enter_context(fetched(source, PAIR if kind == "megatron" else ("",), scratch))
        writer = stack.enter_context(ShardWriter(prefix, dtype)) if options.copy else None
        file = open_file(here, kind, tokenizer.eod, dtype=options.dtype, leading=declared == "leading")
        if file.shard and not options.copy:
            _require_adoptable(file.shard, str(source))
        for run in file.runs():
            separators = checker.add(run).separators
            if writer is None:
                digest.update(run.tokens.data)
            elif checker.holds:
                lengths = run.lengths - separators
                kept = run.tokens[run.tokens != tokenizer.eod] if separators.any() else run.tokens
                writer.extend(kept.astype(dtype), lengths[lengths > 0].tolist())
        checker.require(str(source), file, tokenizer)
        entry = writer.finish() if writer else _entry(prefix.name, source, here, checker, digest.hexdigest())
        carried = int(declared != "none" and not options.copy)
        made = Shard(prefix if options.copy else here)
        entry["blocks"] = ShardBlocks.of(made, BLOCK_TOKENS, carried, pairs=False).to_json()
    counts = {"documents": checker.documents, "empty": checker.empty, "unterminated": checker.unterminated}
    write_record(prefix, {"entry": entry, "counts": counts, "source": str(source)})


def _entry(name: str, source: Location, here: Path, checker: TokenChecker, bin_xxh3: str) -> dict[str, Any]:
    """The manifest entry of a shard that stays in place; `here` is where it is now."""
    return {
        "name": name,
        "path": source if isinstance(source, Url) else str(source.parent.resolve() / source.name),
        "documents": checker.documents,
        "tokens": checker.tokens,
        "bytes": here.with_name(here.name + ".bin").stat().st_size,
        "bin_xxh3": bin_xxh3,
        "idx_xxh3": file_checksum(here.with_name(here.name + ".idx")),
    }


def summary(manifest: CorpusManifest, out: Location) -> str:
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
