"""A corpus made shard by shard: claimed by one job, spread over processes, resumed after a kill.

A shard is done when its `.json` record exists; the result does not depend on the number of processes. Where the shards
come to lie is a `Output`.
"""

from __future__ import annotations

import json
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
_READINGS = 3
"""Of a record, before it counts as damaged."""

Make = Callable[..., None]
"""`make(prefix, *arguments, tokenizer)` makes a shard. Importable by name."""


@dataclass(frozen=True)
class Task:
    """A shard to make: its name in the place without suffix, the further arguments of `make`, and its bytes for
    progress."""

    name: str
    arguments: tuple[Any, ...]
    size: int

    def is_done(self, names: Collection[str], suffixes: Sequence[str] = (".json", ".bin", ".idx")) -> bool:
        return all(self.name + suffix in names for suffix in suffixes)


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
    """What `write_record` wrote of each shard; all must be done. Deletes what killed processes left half-written.

    Raises:
        DataError: a record matches its seal in none of several readings (remote storage may answer wrongly once).
    """
    out.delete([name for name in out.names() if name.startswith("shards/") and name.endswith(".partial")])
    found = dict[str, dict[str, Any]]()
    names = missing = [f"{task.name}.json" for task in tasks]
    for _ in range(_READINGS):
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
    with tqdm(total=total, initial=total - left, unit="B", unit_scale=True, **bar) as shown:
        if min(workers, len(todo)) <= 1:
            for task in todo:
                _make(make, out, task, tokenizer)
                shown.update(task.size)
            return
        given = None if tokenizer is None else (tokenizer.path, tokenizer.eod)
        with worker_processes(min(workers, len(todo)), _start_worker, given) as pool:
            futures = {pool.submit(_work, make, out, task): task.size for task in todo}
            for future in as_completed(futures):
                future.result()
                shown.update(futures[future])


def _make(make: Make, out: Output, task: Task, tokenizer: Tokenizer | None) -> None:
    with out.making(task.name) as prefix:
        make(prefix, *task.arguments, tokenizer)


_worker: Tokenizer | None = None


def _start_worker(tokenizer: tuple[Path, int] | None) -> None:
    global _worker
    _worker = None if tokenizer is None else Tokenizer.load(*tokenizer)


def _work(make: Make, out: Output, task: Task) -> None:
    _make(make, out, task, _worker)
