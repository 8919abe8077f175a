"""`fsdp-data prepare`: makes token shards from raw text, in parallel; a repeated command continues after a kill.

Documents are stored without separators. A shard is done when its `.json` exists beside its `.bin` and `.idx`, and the
corpus is done when `manifest.json` exists. A kill loses at most the shards being written. The corpus does not depend on
the number of workers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_pretrain.data.corpus.manifest import CorpusManifest
from fsdp_pretrain.data.corpus.shards import Shard, ShardWriter, token_dtype
from fsdp_pretrain.data.corpus.writing import BLOCK_TOKENS, ShardBlocks, write_corpus
from fsdp_pretrain.data.text.bad_records import BadRecord, BadRecords, passed_over, too_many
from fsdp_pretrain.data.text.files import find_files, missing_numbers, stamp_of
from fsdp_pretrain.data.text.holdout import Holdout
from fsdp_pretrain.data.text.inputs import Document, Unit, plan_shards, read_documents
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.files import replace_file

from .jobs import Job, Task, describe, summed, write_record

_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 256, 1 << 20
_ROUND_TRIPS_PER_SHARD = 32
BAD_RECORDS = "bad_records.jsonl"
"""File of a corpus that lists the bad records that were skipped."""


@dataclass(frozen=True)
class PrepareOptions:
    """Options that determine the content of the shards, and how many bad records may be skipped."""

    text_field: str = "text"
    lines: bool = False
    suffixes: tuple[str, ...] = ()
    only: str | None = None
    """Take only the files of this split from directories, such as `train`."""
    shard_bytes: int | None = None
    max_quarantined: float = 0.001
    answer_field: str | None = None
    """Field of the answer. If given, each record makes two documents: a prompt and its answer."""
    holdout: Holdout | None = None
    """The share of documents to leave out; `split` writes them."""
    max_bad: int = 0
    block_tokens: int | None = None
    """Tokens of a block; None: 4M, and not part of the job's identity."""

    @property
    def pairs(self) -> bool:
        return self.answer_field is not None

    def find(self, inputs: Sequence[str | Path]) -> list[Path]:
        """Find the input files; warns on standard error about gaps in their numbers. Raises DataError."""
        files = find_files(inputs, self.suffixes, self.only)
        for warning in missing_numbers(files):
            print(f"warning: {warning}", file=sys.stderr)
        return files

    def read(self, unit: Unit, bad: BadRecords) -> Iterator[Document]:
        """Read the documents of a unit, also held-out ones; counts good records in `bad`. Raises DataError, OSError."""
        for document in read_documents(
            unit, self.text_field, lines=self.lines, answer_field=self.answer_field, on_bad=bad
        ):
            bad.good += 1
            yield document

    def holds_out(self, document: Document) -> bool:
        return self.holdout is not None and self.holdout.takes(document.text)


def prepare(
    inputs: Sequence[str | Path],
    tokenizer: Tokenizer,
    job: Job,
    options: PrepareOptions,
    part: tuple[int, int] = (1, 1),
) -> CorpusManifest | None:
    """Tokenise `inputs` into a corpus.

    Args:
        part: (i, n), i from 1 to n: make only every n-th shard, from the i-th on, for job arrays. The part that
            finishes last writes the manifest.

    Returns:
        The manifest, or None if shards of other parts are still missing.

    Raises:
        DataError: the input is damaged, has too many bad records or too many documents with special tokens in their
            text, or the directory holds another job.
        OSError: the input cannot be read, the directory cannot be written, or the storage failed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes, not threads, share the work
    files = options.find(inputs)
    job.refuse_own(files)
    shards = plan_shards(files, options.shard_bytes, lines=options.lines)
    if not shards:
        raise DataError(f"the input holds no text: {len(files)} files, all of them empty")
    stamps = input_stamps(files, shards)
    tasks = [
        Task(f"shards/shard-{number:05d}", (units, options), sum(unit.size for unit in units))
        for number, units in enumerate(shards)
    ]
    job.claim(_content(shards, stamps, tokenizer, options), len(shards))
    job.make(make_shard, tasks[part[0] - 1 :: part[1]], tokenizer, "prepare")
    if job.undone(tasks):
        return None
    _require_unchanged(stamps, input_stamps(find_files(inputs, options.suffixes, options.only), shards))
    return _finish(job.out, job.gather(tasks), tokenizer, options)


def _finish(out: Path, records: list[dict[str, Any]], tokenizer: Tokenizer, options: PrepareOptions) -> CorpusManifest:
    """Make a corpus of finished shards; the manifest is written last. Raises DataError."""
    counts = summed(records)
    list_bad(out, records, counts, options.max_bad)
    entries = [record["entry"] for record in records if record["entry"]["documents"]]
    if not entries:
        raise DataError(
            f"the input holds no text: {counts['read']} documents, all of them empty, quarantined or held out"
        )
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    statistics = {**counts, "made": made, "text_field": options.text_field}
    if options.holdout is not None:
        statistics["holdout"] = str(options.holdout)
    dtype, block_tokens = token_dtype(tokenizer.vocab_size), options.block_tokens or BLOCK_TOKENS
    return write_corpus(out, tokenizer, entries, dtype, statistics, pairs=options.pairs, block_tokens=block_tokens)


def list_bad(out: Path, records: Sequence[dict[str, Any]], counts: dict[str, int], limit: int) -> None:
    """Write the bad records of all shards to a file and show the first ones. Raises DataError if more than `limit`."""
    if not counts["bad"]:
        return
    bad_records = [bad_record for shard in records for bad_record in shard.get("bad", [])]
    replace_file(out / BAD_RECORDS, "".join(json.dumps(bad_record) + "\n" for bad_record in bad_records))
    first = [str(BadRecord(**bad_record)) for bad_record in bad_records[:5]]
    if counts["bad"] > limit:
        raise too_many(counts["bad"], counts["read"] + counts["bad"], limit, first)
    print(passed_over(counts["bad"], first, str(out / BAD_RECORDS)), file=sys.stderr)


Stamps = dict[str, list[int]]


def input_stamps(files: Iterable[Path], shards: Iterable[Iterable[Unit]]) -> Stamps:
    """The `stamp_of` each input file that is read: a job continues only with the same input. Raises OSError."""
    input_paths = {unit.path for shard in shards for unit in shard}
    return {str(file): stamp_of(file) for file in files if str(file) in input_paths}


def _require_unchanged(before: Stamps, now: Stamps) -> None:
    """Raise DataError if an input changed while it was read."""
    for path, stamp in before.items():
        if now.get(path) != stamp:
            raise DataError(
                f"{path} changed while it was read: it was {_stamp_text(stamp)} and is {_stamp_text(now.get(path))}",
                effect="the shards may hold parts of both, so no manifest was written",
                remedy="when nobody writes to the input any more, repeat the command with --overwrite",
            )


def _stamp_text(stamp: list[int] | None) -> str:
    return f"{stamp[0]:_} bytes of time {stamp[1]}" if stamp else "gone"


def _content(shards: list[list[Unit]], stamps: Stamps, tokenizer: Tokenizer, options: PrepareOptions) -> dict[str, Any]:
    """Everything that determines the content of the shards, as JSON values."""
    return {
        "shards": [[asdict(unit) for unit in shard] for shard in shards],
        "stamps": stamps,
        "tokenizer": tokenizer.fingerprint,
        "text_field": options.text_field,
        "lines": options.lines,
        **({"answer_field": options.answer_field} if options.answer_field is not None else {}),
        **({"holdout": options.holdout.bound} if options.holdout is not None else {}),
        **({"block_tokens": options.block_tokens} if options.block_tokens is not None else {}),
    }


@dataclass
class _Counts:
    """Numbers of records and documents by what became of them, and the `characters` and `utf8_bytes` of stored text."""

    read: int = 0
    bad: int = 0
    held_out: int = 0
    empty: int = 0
    repaired: int = 0
    characters: int = 0
    utf8_bytes: int = 0
    quarantined: int = 0
    round_trips: int = 0  # this and the next: documents whose tokens were decoded, and those that gave their text again
    round_trips_exact: int = 0

    def add(self, document: Document, encoded: list[list[int]], tokenizer: Tokenizer) -> None:
        """Count a stored document. For the first few, compare the decoded tokens with the text."""
        if self.round_trips < _ROUND_TRIPS_PER_SHARD:
            self.round_trips += 1
            self.round_trips_exact += tuple(map(tokenizer.decode, encoded)) == document.texts
        self.characters += sum(map(len, document.texts))
        self.utf8_bytes += sum(len(text.encode("utf-8")) for text in document.texts)


def make_shard(prefix: Path, units: list[Unit], options: PrepareOptions, tokenizer: Tokenizer) -> None:
    """Tokenise `units` into the shard at `prefix` and write its `.json`, which marks it done.

    Raises:
        DataError, OSError: see `prepare`.
    """
    dtype, counts = token_dtype(tokenizer.vocab_size), _Counts()
    is_special = np.zeros(tokenizer.vocab_size, dtype=bool)
    is_special[list(tokenizer.specials)] = True
    quarantined: list[dict[str, Any]] = []
    sources: list[dict[str, Any]] = []
    bad, not_held_out = BadRecords(options.max_bad), 0
    with ShardWriter(prefix, dtype) as writer:
        for unit in units:
            unit_start = {"path": unit.path, "start": unit.start}
            sources.append({**unit_start, "stop": unit.stop, "first_document": writer.documents})
            for document, encoded in _encoded(unit, options, tokenizer, bad):
                not_held_out += 1
                counts.repaired += document.repaired
                tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded])
                if not all(encoded):
                    counts.empty += 1
                elif is_special[tokens].any():
                    specials = sorted({tokenizer.specials[int(i)] for i in tokens[is_special[tokens]]})
                    quarantined.append({**unit_start, "line": document.line, "specials": specials})
                else:
                    counts.add(document, encoded, tokenizer)
                    for ids in encoded:
                        writer.append(np.asarray(ids, dtype=dtype))
        counts.read, counts.bad, counts.held_out = bad.good, bad.count, bad.good - not_held_out
        counts.quarantined = len(quarantined)
        if counts.quarantined > max(1, options.max_quarantined * not_held_out):
            first = quarantined[0]
            raise DataError(
                f"{counts.quarantined} of {not_held_out} documents contain special tokens in their text, "
                f"first in {first['path']} (line {first['line'] + 1} from byte {first['start']}): "
                f"{', '.join(first['specials'])}",
                effect="a separator inside a document would cut it in two for the model",
                remedy="clean the input, or use a tokenizer that treats these strings as text",
            )
        entry = writer.finish()
    blocks = ShardBlocks.of(Shard(prefix), options.block_tokens or BLOCK_TOKENS, 0, pairs=options.pairs)
    entry["blocks"] = blocks.to_json()
    record = {"entry": entry, "counts": asdict(counts), "sources": sources, "quarantined": quarantined}
    write_record(prefix, {**record, "bad": [asdict(bad_record) for bad_record in bad.first]})


def _encoded(
    unit: Unit, options: PrepareOptions, tokenizer: Tokenizer, bad: BadRecords
) -> Iterator[tuple[Document, list[list[int]]]]:
    """The documents that are not held out, each with the ids of its texts."""
    for batch in _batches(unit, options, bad):
        ids_of_texts = iter(tokenizer.encode([text for document in batch for text in document.texts]))
        for document in batch:
            yield document, [next(ids_of_texts) for _ in document.texts]


def _batches(unit: Unit, options: PrepareOptions, bad: BadRecords) -> Iterator[list[Document]]:
    """The documents that are not held out, in batches for the tokenizer."""
    batch: list[Document] = []
    characters = 0
    for document in options.read(unit, bad):
        if options.holds_out(document):
            continue
        batch.append(document)
        characters += sum(map(len, document.texts))
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def summary(manifest: CorpusManifest, out: Path) -> str:
    """The final message of `prepare`."""
    numbers = manifest.statistics
    ratio = numbers["utf8_bytes"] / max(1, manifest.tokens)
    lines = [f"{out}: {describe(manifest)}, {ratio:.2f} bytes per token"]
    if numbers["held_out"]:
        lines.append(f"  {numbers['held_out']:_} documents held out ({numbers['holdout']})")
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
