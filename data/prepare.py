"""`fsdp-data prepare`: raw text to token shards, in parallel, resumable, the same shards for any number of workers.

Documents are stored without separators. A shard is done when its `.json` stands beside its `.bin` and `.idx`; the
corpus is done when `manifest.json` exists. Killing it at any moment loses at most the shards being written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tqdm import tqdm

from fsdp_pretrain.atomic import replace_file
from fsdp_pretrain.errors import DataError

from .corpus import Manifest, write_corpus
from .files import find_files
from .inputs import Document, Unit, plan_shards, read_documents
from .jobs import claim, is_done, make_all, read_records
from .shards import ShardWriter, token_dtype
from .tokenizer import Progress, Tokenizer

_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 256, 1 << 20
_ROUND_TRIPS_PER_SHARD = 32


@dataclass(frozen=True)
class Options:
    """What decides the content of the shards."""

    text_field: str = "text"
    lines: bool = False
    suffixes: tuple[str, ...] = ()
    shard_bytes: int | None = None
    max_quarantined: float = 0.001
    answer_field: str | None = None
    """The records are prompts with answers: two documents each."""


def prepare(
    inputs: Sequence[str],
    tokenizer: Tokenizer,
    out: Path,
    options: Options,
    *,
    workers: int,
    part: tuple[int, int] = (1, 1),
    overwrite: bool = False,
    quiet: bool = False,
) -> Manifest | None:
    """Tokenise `inputs` into the corpus directory `out`.

    Args:
        inputs: files and directories.
        tokenizer: whose `encode` fills the shards.
        out: created if absent; continued if it holds the same job, refused if it holds another.
        options: see `Options`.
        workers: processes.
        part: (i, n), 1-based: make only every n-th shard, for job arrays; whoever sees all shards done finishes.
        overwrite: discard what `out` holds.
        quiet: no progress bar.

    Returns:
        The manifest, or None if shards of other parts are still missing.

    Raises:
        DataError: unreadable input, another job in `out`, or too many documents that contain special tokens.
        OSError: the input may not be read, `out` not be written, or the storage failed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes, not threads, share the work
    files = find_files(inputs, options.suffixes)
    shards = plan_shards(files, options.shard_bytes, lines=options.lines)
    if not shards:
        raise DataError(f"the input holds no text: {len(files)} files, all of them empty")
    job = _job_digest(shards, tokenizer, options)
    folder = out / "shards"
    claim(out, job, len(shards), overwrite=overwrite)
    names = [f"shard-{number:05d}" for number in range(len(shards))]
    mine = [n for n in range(len(shards)) if n % part[1] == part[0] - 1]
    todo = [n for n in mine if not is_done(folder / names[n])]
    total = sum(unit.size for n in mine for unit in shards[n])
    done = total - sum(unit.size for n in todo for unit in shards[n])
    tasks = [(folder / names[n], shards[n], options) for n in todo]
    bar = tqdm(total=total, initial=done, unit="B", unit_scale=True, desc="prepare", disable=True if quiet else None)
    with bar:
        make_all(make_shard, tasks, tokenizer, workers, bar)
    if not all(is_done(folder / name) for name in names):
        return None
    return _finish(out, tokenizer, [folder / name for name in names], options)


def _job_digest(shards: list[list[Unit]], tokenizer: Tokenizer, options: Options) -> str:
    stamps = {unit.path: os.stat(unit.path) for shard in shards for unit in shard}  # noqa: PTH116
    content = {
        "shards": [[asdict(unit) for unit in shard] for shard in shards],
        "stamps": {path: [stamp.st_size, stamp.st_mtime_ns] for path, stamp in stamps.items()},
        "tokenizer": tokenizer.fingerprint,
        "text_field": options.text_field,
        "lines": options.lines,
        **({"answer_field": options.answer_field} if options.answer_field is not None else {}),
    }
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def make_shard(prefix: Path, units: list[Unit], options: Options, tokenizer: Tokenizer, report: Any) -> None:
    """Tokenise `units` into one shard and write its `.json`, which marks it done.

    Args:
        prefix: path of the shard without suffix.
        report: called with the number of text bytes finished, for progress.

    Raises:
        DataError, OSError: see `prepare`.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    special = np.zeros(tokenizer.vocab_size, dtype=bool)
    special[list(tokenizer.specials)] = True
    counts = dict.fromkeys(
        (
            "read",
            "empty",
            "repaired",
            "characters",
            "utf8_bytes",
            "quarantined",
            "round_trips",
            "round_trips_exact",
        ),
        0,
    )
    quarantined: list[dict[str, Any]] = []
    sources: list[dict[str, Any]] = []
    with ShardWriter(prefix, dtype) as writer:
        for unit in units:
            sources.append(
                {
                    "path": unit.path,
                    "start": unit.start,
                    "stop": unit.stop,
                    "first_document": writer.documents,
                }
            )
            shown = _Shown(report, unit.size)
            for batch in _batches(unit, options):
                for document, encoded in _encoded(batch, tokenizer, shown.add):
                    counts["read"] += 1
                    counts["repaired"] += document.repaired
                    tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded])
                    if not all(encoded):
                        counts["empty"] += 1
                        continue
                    if special[tokens].any():
                        counts["quarantined"] += 1
                        found = sorted({tokenizer.specials[int(i)] for i in tokens[special[tokens]]})
                        quarantined.append(
                            {"path": unit.path, "start": unit.start, "line": document.line, "specials": found}
                        )
                        continue
                    if counts["round_trips"] < _ROUND_TRIPS_PER_SHARD:
                        counts["round_trips"] += 1
                        counts["round_trips_exact"] += tuple(map(tokenizer.decode, encoded)) == document.texts
                    counts["characters"] += sum(map(len, document.texts))
                    counts["utf8_bytes"] += sum(len(text.encode("utf-8")) for text in document.texts)
                    for ids in encoded:
                        writer.append(np.asarray(ids, dtype=dtype))
            shown.finish()
        if counts["quarantined"] > max(1, options.max_quarantined * counts["read"]):
            first = quarantined[0]
            raise DataError(
                f"{counts['quarantined']} of {counts['read']} documents contain special tokens in their text, "
                f"first in {first['path']} (line {first['line'] + 1} from byte {first['start']}): "
                f"{', '.join(first['specials'])}",
                effect="a separator inside a document would cut it in two for the model",
                remedy="clean the input, or use a tokenizer that treats these strings as text",
            )
        entry = writer.finish()
    record = {"entry": entry, "counts": counts, "sources": sources, "quarantined": quarantined}
    replace_file(prefix.with_name(prefix.name + ".json"), (json.dumps(record, indent=1) + "\n").encode())


class _Shown:
    """Progress within a unit by the characters encoded, a few less than its bytes.

    Args:
        report: called with what was finished.
        size: bytes of text of the unit, some of them estimated.
    """

    def __init__(self, report: Callable[[int], Any], size: int) -> None:
        self._report, self._left = report, size

    def add(self, characters: int) -> None:
        """So much more is done."""
        step = min(characters, self._left)
        self._left -= step
        self._report(step)

    def finish(self) -> None:
        """All of it is done."""
        self.add(self._left)


def _encoded(
    batch: list[Document], tokenizer: Tokenizer, progress: Progress
) -> Iterator[tuple[Document, list[list[int]]]]:
    """Each document with the ids of its texts."""
    encoded = iter(tokenizer.encode([text for document in batch for text in document.texts], progress))
    for document in batch:
        yield document, [next(encoded) for _ in document.texts]


def _batches(unit: Unit, options: Options) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in read_documents(unit, options.text_field, lines=options.lines, answer_field=options.answer_field):
        batch.append(document)
        characters += sum(map(len, document.texts))
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _finish(out: Path, tokenizer: Tokenizer, prefixes: list[Path], options: Options) -> Manifest:
    """All shards are there: write the manifest."""
    records = read_records(out, [prefix.name for prefix in prefixes])
    counts = {key: sum(record["counts"][key] for record in records) for key in records[0]["counts"]}
    full = [record["entry"] for record in records if record["entry"]["documents"]]
    if not full:
        raise DataError(f"the input holds no text: {counts['read']} documents, all of them empty or quarantined")
    statistics = {
        **counts,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "text_field": options.text_field,
    }
    dtype, pairs = token_dtype(tokenizer.vocab_size), options.answer_field is not None
    return write_corpus(out, tokenizer, full, dtype, statistics, pairs=pairs)


def summary(manifest: Manifest, out: Path) -> str:
    """What `prepare` tells a person at its end."""
    numbers = manifest.statistics
    lines = [
        f"{out}: {manifest.documents:_} documents, {manifest.tokens:_} tokens in {len(manifest.shards)} shards, "
        f"{numbers['utf8_bytes'] / max(1, manifest.tokens):.2f} bytes per token"
    ]
    if numbers["empty"]:
        lines.append(f"  {numbers['empty']:_} empty documents left out")
    if numbers["repaired"]:
        lines.append(f"  {numbers['repaired']:_} documents had invalid UTF-8, replaced by U+FFFD")
    if numbers["quarantined"]:
        lines.append(
            f"  {numbers['quarantined']:_} documents left out because they contain special tokens (see shards/*.json)"
        )
    exact, tried = numbers["round_trips_exact"], numbers["round_trips"]
    if exact < tried:
        lines.append(
            f"  {tried - exact} of {tried} sampled documents do not decode to their text (a normalising tokenizer)"
        )
    return "\n".join(lines)
