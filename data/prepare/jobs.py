"""A corpus made shard by shard: claimed by one job, spread over processes, resumed after a kill.

A shard is done when its `.json` record exists; the result does not depend on the number of processes. Where the shards
come to lie is a `Output`.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from tqdm import tqdm

from data.corpus.manifest import CorpusManifest
from data.text.tokenizer import Tokenizer
from data.text.workers import worker_processes
from fsdp_pretrain.atomic import replace_file
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.remote import Problem, RemoteError

from .outputs import Output

PLAN = "plan.json"
READINGS = 3
"""Of an object in remote storage, before it counts as damaged: an answer may be wrong once."""

Make = Callable[..., None]
"""`make(prefix, *arguments, tokenizer, report)` makes a shard; `report(bytes)` shows progress. Importable by name."""


@dataclass(frozen=True)
class Task:
    """A shard to make: its name in the place without suffix, the further arguments of `make`, and its bytes for
    progress."""

    name: str
    arguments: tuple[Any, ...]
    size: int

    def is_done(self, names: Collection[str], suffixes: Sequence[str] = (".json", ".bin", ".idx")) -> bool:
        return all(self.name + suffix in names for suffix in suffixes)


Call = tuple[Make, Output, Task]


def claim(out: Output, content: dict[str, Any], shards: int, *, overwrite: bool) -> None:
    """Make `out` this job's place. Raises DataError if it holds anything else.

    Args:
        content: everything that decides the shards, as JSON values.
        shards: number of shards.
        overwrite: discard another job's work.
    """
    job = xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
    names, held = out.names(), _held_job(out)  # in this order: the plan of another part is written first
    if held == job:
        return
    if held is None and names:
        raise DataError(f"{out} is not empty and not a corpus", remedy="choose another --out")
    if held is not None and not overwrite:
        raise DataError(
            f"{out} holds what was made from other inputs, another tokenizer or other options",
            remedy="choose another --out, or pass --overwrite to replace it",
        )
    results = ("manifest.json", "blocks.npy", "checksums.npy", "split.json")
    out.delete([*results, *sorted(name for name in names if name.endswith(".jsonl") or name.startswith("shards/"))])
    out.write(PLAN, json.dumps({"job": job, "shards": shards}).encode())


def _held_job(out: Output) -> Any:
    """What the plan of `out` says; None without one. Raises DataError if it is damaged."""
    try:
        held = _parsed(f"{out}/{PLAN}", out.read([PLAN])[0])
    except FileNotFoundError:
        return None
    except RemoteError as error:
        if error.problem is not Problem.MISSING:
            raise
        return None
    return held.get("job") if isinstance(held, dict) else ""


def release(out: Output) -> None:
    """Undo `claim` for a refused job without finished shards: the corrected command is another job."""
    names = out.names()
    shards = [name for name in names if name.startswith("shards/")]
    if not any(name.endswith(".json") for name in shards):
        out.delete([PLAN, *shards])


def write_record(prefix: Path, record: dict[str, Any]) -> None:
    """Mark a shard done: its manifest `entry`, `counts`, and further information for people."""
    sealed = {**record, "xxh3": _seal(record)}
    replace_file(prefix.with_name(prefix.name + ".json"), (json.dumps(sealed, indent=1) + "\n").encode())


def _seal(record: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())


def gather(out: Output, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """The records of all shards, which must be done. Deletes what killed processes left half-written.

    Raises:
        DataError: a record is damaged.
    """
    out.delete([name for name in out.names() if name.startswith("shards/") and name.endswith(".partial")])
    return records(out, tasks)


def records(out: Output, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """What `write_record` wrote of each shard.

    Raises:
        DataError: a record matches its seal in none of several readings (remote storage may answer wrongly once).
    """
    found = dict[str, dict[str, Any]]()
    names = missing = [f"{task.name}.json" for task in tasks]
    for _ in range(READINGS):
        for name, content in zip(missing, out.read(missing), strict=True):
            with suppress(ValueError, RecursionError, AttributeError):
                record = json.loads(content)
                if record.pop("xxh3", None) == _seal(record):
                    found[name] = record
        missing = [name for name in names if name not in found]
    if missing:
        raise DataError(f"{out}/{missing[0]} is damaged", remedy="delete it and repeat the command")
    return [found[name] for name in names]


def _parsed(name: str, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot read {name}: {error}", remedy="delete it and repeat the command") from None


def summed(done: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The sums of the counts of all shards; those of an earlier version may lack some."""
    totals: Counter[str] = Counter()
    for record in done:
        totals.update(record["counts"])
    return dict(totals)


def describe(manifest: CorpusManifest) -> str:
    """One line on a corpus: documents, tokens, shards."""
    return f"{manifest.documents:_} documents, {manifest.tokens:_} tokens in {len(manifest.shards)} shards"


def make_all(
    make: Make,
    out: Output,
    tasks: Sequence[Task],
    todo: Sequence[Task],
    tokenizer: Tokenizer | None,
    workers: int,
    **bar: Any,
) -> None:
    """Make the shards of `todo`, which are some of `tasks`, with a progress bar.

    Args:
        tokenizer: for `make`; None if it needs none.
        workers: maximum number of processes; each loads the tokenizer.
        bar: options of tqdm.

    Raises:
        DataError: from `make`, or a process was killed.
        StorageError: no room for what is in work.
    """
    out.require_room([task.size for task in todo], workers)
    total, left = (sum(task.size for task in some) for some in (tasks, todo))
    calls: list[Call] = [(make, out, task) for task in todo]
    with tqdm(total=total, initial=total - left, unit="B", unit_scale=True, **bar) as shown:
        if min(workers, len(calls)) > 1:
            _make_in_pool(calls, tokenizer, min(workers, len(calls)), shown)
        else:
            for call in calls:
                _make(*call, tokenizer, shown.update)


def _make(make: Make, out: Output, task: Task, tokenizer: Tokenizer | None, report: Callable[[int], object]) -> None:
    with out.making(task.name) as prefix:
        make(prefix, *task.arguments, tokenizer, report)


def _make_in_pool(calls: Sequence[Call], tokenizer: Tokenizer | None, workers: int, bar: Any) -> None:
    progress = multiprocessing.get_context("spawn").Value("q", 0)
    given = None if tokenizer is None else (tokenizer.path, tokenizer.eod)
    stop = threading.Event()
    shown = threading.Thread(target=_show, args=(progress, bar, stop), daemon=True)
    shown.start()
    try:
        with worker_processes(workers, _start_worker, given, progress) as pool:
            for future in as_completed([pool.submit(_work, call) for call in calls]):
                future.result()
    finally:
        stop.set()
        shown.join()


def _show(progress: Any, bar: Any, stop: threading.Event) -> None:
    shown, ended = 0, False
    while not ended:
        ended = stop.wait(0.2)
        done = progress.value
        bar.update(done - shown)
        shown = done


_worker: tuple[Tokenizer | None, Any]


def _start_worker(tokenizer: tuple[Path, int] | None, progress: Any) -> None:
    global _worker
    _worker = None if tokenizer is None else Tokenizer.load(*tokenizer), progress


def _work(call: Call) -> None:
    tokenizer, progress = _worker

    def report(size: int) -> None:
        with progress.get_lock():
            progress.value += size

    _make(*call, tokenizer, report)
