"""`fsdp-data split`: writes the held-out documents of any input into one JSONL file.

The other documents need no second copy on disk, since `prepare` and `train-tokenizer` with the same `--holdout` leave
the held-out ones out while reading.

    OUT/heldout.jsonl       one line {"text": ...} (and "answer") per document, without duplicates, ordered by digest
    OUT/split.json          counts; written last
    OUT/bad_records.jsonl   the bad records that were skipped, if any

The file depends only on the set of texts, whatever their order, their files and the number of processes. Its first
lines are a random sample, and equal the file of a smaller share. Parts are made in parallel and merged; a kill loses at
most the parts being written.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp_pretrain.data.corpus.manifest import load_json
from fsdp_pretrain.data.text.bad_records import BadRecords
from fsdp_pretrain.data.text.holdout import text_digest
from fsdp_pretrain.data.text.inputs import Document, Unit, plan_shards
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.files import replace_file, replacing
from fsdp_pretrain.units import human_count

from .jobs import Job, Task, summed, write_record
from .prepare import PrepareOptions, input_stamps, list_bad

HELDOUT, REPORT = "heldout.jsonl", "split.json"
_MOST_PARTS = 128
_DIGEST_LENGTH = 17
"""Bytes of the hexadecimal digest and the space with which each line of a part begins."""


@dataclass(frozen=True)
class SplitReport:
    """The counts of a split: the content of `split.json`."""

    holdout: str  # the requested share, such as `0.1%`
    read: int  # documents in the input, of which `empty` have no text
    empty: int
    bad: int  # records that were skipped
    held_out: int  # held-out documents among `read`, of which `duplicates` repeat another one and are not in the file
    duplicates: int
    characters: int  # characters of the texts in the file


def split(inputs: Sequence[str | Path], job: Job, options: PrepareOptions) -> SplitReport:
    """Write the documents that `options.holdout` holds out.

    Raises:
        DataError: the input is damaged or has too many bad records, the directory holds another job, or no document is
            held out.
        OSError: the input cannot be read, the directory cannot be written, or the storage failed.
    """
    assert options.holdout is not None
    out = job.out
    files = options.find(inputs)
    job.refuse_own(files)
    total = sum(unit.size for shard in plan_shards(files, None, lines=options.lines) for unit in shard)
    parts = plan_shards(files, max(8 << 20, total // _MOST_PARTS), lines=options.lines)
    content = {
        "split": [[asdict(unit) for unit in part] for part in parts],
        "stamps": input_stamps(files, parts),
        "fields": [options.text_field, options.answer_field],
        "lines": options.lines,
        "holdout": options.holdout.bound,
    }
    job.claim(content, len(parts))
    if (out / REPORT).exists() and (out / HELDOUT).exists():
        finished = SplitReport(**load_json(out / REPORT))
        if finished.bad <= options.max_bad:
            return finished
    tasks = [
        Task(f"shards/part-{number:05d}", (units, options), sum(unit.size for unit in units), (".json", ".jsonl"))
        for number, units in enumerate(parts)
    ]
    job.make(make_part, tasks, None, "split")
    records = job.gather(tasks)
    counts = summed(records)
    list_bad(out, records, counts, options.max_bad)
    if not counts["held_out"]:
        raise DataError(
            f"--holdout {options.holdout} holds out none of {counts['read']:_} documents", remedy="use a larger share"
        )
    written, characters = _merge(out, tasks)
    numbers = {**counts, "duplicates": counts["held_out"] - written, "characters": characters}
    report = SplitReport(holdout=str(options.holdout), **numbers)
    replace_file(out / REPORT, json.dumps(asdict(report), indent=1) + "\n")
    job.delete(task.name + suffix for task in tasks for suffix in task.suffixes)
    return report


def make_part(prefix: Path, units: list[Unit], options: PrepareOptions, tokenizer: None) -> None:
    """Write the held-out documents of `units`, sorted, with their digests; then the `.json` with the counts.

    Raises:
        DataError, OSError: see `split`.
    """
    bad, empty = BadRecords(options.max_bad), 0
    lines: list[bytes] = []
    for unit in units:
        for document in options.read(unit, bad):
            if not all(document.texts):
                empty += 1
            elif options.holds_out(document):
                lines.append(_line(document))
    lines.sort()
    replace_file(prefix.with_name(prefix.name + ".jsonl"), b"".join(lines))
    counts = {"read": bad.good, "empty": empty, "bad": bad.count, "held_out": len(lines)}
    write_record(prefix, {"counts": counts, "bad": [asdict(bad_record) for bad_record in bad.first]})


def _line(document: Document) -> bytes:
    content = dict(zip(("text", "answer"), document.texts, strict=False))
    return f"{text_digest(document.text):016x} {json.dumps(content, ensure_ascii=False)}\n".encode()


def _merge(out: Path, tasks: Sequence[Task]) -> tuple[int, int]:
    """Merge the parts into the file, atomically. Returns the numbers of its documents and of their characters."""
    documents, characters = 0, 0
    with replacing(out / HELDOUT) as file, ExitStack() as stack:
        parts = [stack.enter_context((out / f"{task.name}.jsonl").open("rb")) for task in tasks]
        for line in _without_repeats(heapq.merge(*parts)):
            content = line[_DIGEST_LENGTH:]
            file.write(content)
            documents += 1
            characters += sum(map(len, json.loads(content).values()))
    return documents, characters


def _without_repeats(lines: Iterator[bytes]) -> Iterator[bytes]:
    previous = b""
    for line in lines:
        if line != previous:
            yield line
        previous = line


def summary(report: SplitReport, out: Path) -> str:
    """The final message of `split`."""
    kept = f"{report.held_out - report.duplicates:_} documents, {human_count(report.characters)} characters"
    share = f"{report.held_out:_} of {report.read:_} are held out ({report.held_out / report.read:.3%})"
    lines = [f"{out / HELDOUT}: {kept}; {share}"]
    if report.duplicates:
        lines.append(f"  {report.duplicates:_} of them repeat another one")
    if report.empty:
        lines.append(f"  {report.empty:_} empty documents")
    lines.append(f"  leave them out with --holdout {report.holdout}, in `prepare` and `train-tokenizer`")
    return "\n".join(lines)
