"""A corpus made shard by shard: claimed by one job, spread over processes, resumed after a kill.

A shard is done when its `.json` record exists; the result does not depend on the number of processes.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from tqdm import tqdm

from data.corpus.corpus import CorpusManifest, load_json
from data.text.tokenizer import Tokenizer
from fsdp_pretrain.atomic import replace_file
from fsdp_pretrain.errors import DataError

Make = Callable[..., None]
"""`make(prefix, *arguments, tokenizer, report)` makes a shard; `report(bytes)` shows progress. Importable by name."""


@dataclass(frozen=True)
class Task:
    """A shard to make: its path without suffix, the further arguments of `make`, and its bytes for progress."""

    prefix: Path
    arguments: tuple[Any, ...]
    size: int

    def is_done(self, suffixes: Sequence[str] = (".json", ".bin", ".idx")) -> bool:
        return all(self.prefix.with_name(self.prefix.name + suffix).exists() for suffix in suffixes)


def claim(out: Path, content: dict[str, Any], shards: int, *, overwrite: bool) -> None:
    """Make `out` this job's directory. Raises DataError if it holds anything else.

    Args:
        content: everything that decides the shards, as JSON values.
        shards: number of shards.
        overwrite: discard another job's work.
    """
    job = xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
    plan = out / "plan.json"
    if plan.exists():
        held = load_json(plan)
        if isinstance(held, dict) and held.get("job") == job:
            return
        if not overwrite:
            raise DataError(
                f"{out} holds what was made from other inputs, another tokenizer or other options",
                remedy="choose another --out, or pass --overwrite to replace it",
            )
        results = [out / name for name in ("manifest.json", "blocks.npy", "split.json")]
        for path in [*results, *out.glob("*.jsonl"), *out.glob("shards/*")]:
            path.unlink(missing_ok=True)
    elif out.exists() and any(out.iterdir()):
        raise DataError(f"{out} is not empty and not a corpus", remedy="choose another --out")
    (out / "shards").mkdir(parents=True, exist_ok=True)
    replace_file(plan, json.dumps({"job": job, "shards": shards}).encode())


def release(out: Path) -> None:
    """Undo `claim` for a refused job without finished shards: the corrected command is another job."""
    if not any(out.glob("shards/*.json")):
        for path in [out / "plan.json", *out.glob("shards/*")]:
            path.unlink(missing_ok=True)
        (out / "shards").rmdir()


def write_record(prefix: Path, record: dict[str, Any]) -> None:
    """Mark a shard done: its manifest `entry`, `counts`, and further information for people."""
    replace_file(prefix.with_name(prefix.name + ".json"), (json.dumps(record, indent=1) + "\n").encode())


def gather(out: Path, tasks: Sequence[Task]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Manifest entries of all shards with documents, and the summed counts; all shards must be done.

    Deletes what killed processes left half-written.
    """
    for path in (out / "shards").glob("*.partial"):
        path.unlink(missing_ok=True)
    shards = records(tasks)
    counts = summed(shards)
    return [done["entry"] for done in shards if done["entry"]["documents"]], counts


def records(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """What `write_record` wrote of each shard. Raises DataError."""
    return [load_json(task.prefix.with_name(task.prefix.name + ".json")) for task in tasks]


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
    make: Make, tasks: Sequence[Task], todo: Sequence[Task], tokenizer: Tokenizer | None, workers: int, **bar: Any
) -> None:
    """Make the shards of `todo`, which are some of `tasks`, with a progress bar.

    Args:
        tokenizer: for `make`; None if it needs none.
        workers: maximum number of processes; each loads the tokenizer.
        bar: options of tqdm.

    Raises:
        DataError: from `make`, or a process was killed.
    """
    total, left = (sum(task.size for task in some) for some in (tasks, todo))
    calls = [(task.prefix, *task.arguments) for task in todo]
    with tqdm(total=total, initial=total - left, unit="B", unit_scale=True, **bar) as shown:
        if min(workers, len(calls)) > 1:
            _make_in_pool(make, calls, tokenizer, min(workers, len(calls)), shown)
        else:
            for call in calls:
                make(*call, tokenizer, shown.update)


def _make_in_pool(
    make: Make, calls: Sequence[tuple[Any, ...]], tokenizer: Tokenizer | None, workers: int, bar: Any
) -> None:
    context = multiprocessing.get_context("spawn")
    progress = context.Value("q", 0)
    arguments = (None if tokenizer is None else (tokenizer.path, tokenizer.eod), progress)
    pool = ProcessPoolExecutor(workers, context, _start_worker, arguments)
    stop = threading.Event()
    shown = threading.Thread(target=_show, args=(progress, bar, stop), daemon=True)
    shown.start()
    futures: list[Future[None]] = [pool.submit(_work, make, call) for call in calls]
    try:
        for future in as_completed(futures):
            future.result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed (out of memory?)",
            remedy="run the same command again; fewer --workers need less memory",
        ) from None
    finally:
        if any(not future.done() for future in futures):  # an error or Ctrl-C: do not wait for the rest
            for process in list((pool._processes or {}).values()):
                process.kill()
        pool.shutdown(wait=True, cancel_futures=True)
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # handled by the parent
    _worker = None if tokenizer is None else Tokenizer.load(*tokenizer), progress


def _work(make: Make, call: tuple[Any, ...]) -> None:
    tokenizer, progress = _worker

    def report(size: int) -> None:
        with progress.get_lock():
            progress.value += size

    make(*call, tokenizer, report)
