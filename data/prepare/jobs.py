"""A corpus made shard by shard: claimed by one job, shared out among processes, continued after a kill.

A shard is done when its `.json` record stands beside it; what a job writes is the same for any number of processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
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
    """A shard to make: its path without suffix, the further arguments of `make`, and bytes that will be reported."""

    prefix: Path
    arguments: tuple[Any, ...]
    size: int

    def is_done(self, suffixes: Sequence[str] = (".json", ".bin", ".idx")) -> bool:
        """Whether all its files are there."""
        return all(self.prefix.with_name(self.prefix.name + suffix).exists() for suffix in suffixes)


def claim(out: Path, content: dict[str, Any], shards: int, *, overwrite: bool) -> None:
    """Make `out` this job's directory, or raise DataError if it is something else's.

    Args:
        content: JSON values of everything that decides the shards.
        shards: how many there will be.
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
                f"{out} holds a corpus made from other inputs, another tokenizer or other options",
                remedy="choose another --out, or pass --overwrite to replace it",
            )
        for path in [out / "manifest.json", out / "blocks.npy", *out.glob("shards/*")]:
            path.unlink(missing_ok=True)
    elif out.exists() and any(out.iterdir()):
        raise DataError(f"{out} is not empty and not a corpus", remedy="choose another --out")
    (out / "shards").mkdir(parents=True, exist_ok=True)
    replace_file(plan, json.dumps({"job": job, "shards": shards}).encode())


def release(out: Path) -> None:
    """Undo `claim` for a job that was refused, unless shards were finished: its correction is another job."""
    if not any(out.glob("shards/*.json")):
        for path in [out / "plan.json", *out.glob("shards/*")]:
            path.unlink(missing_ok=True)
        (out / "shards").rmdir()


def write_record(prefix: Path, record: dict[str, Any]) -> None:
    """Mark a shard done: its `entry` of the manifest, `counts`, and what else a person may want to know."""
    replace_file(prefix.with_name(prefix.name + ".json"), (json.dumps(record, indent=1) + "\n").encode())


def gather(out: Path, tasks: Sequence[Task]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The entries of all shards that hold documents, and the sums of the counts; all are done.

    Sweeps what killed processes left half-written.
    """
    for path in (out / "shards").glob("*.partial"):
        path.unlink(missing_ok=True)
    shards = [load_json(task.prefix.with_name(task.prefix.name + ".json")) for task in tasks]
    counts = {key: sum(done["counts"][key] for done in shards) for key in shards[0]["counts"]}
    return [done["entry"] for done in shards if done["entry"]["documents"]], counts


def describe(manifest: CorpusManifest) -> str:
    """What a corpus holds, in one line."""
    return f"{manifest.documents:_} documents, {manifest.tokens:_} tokens in {len(manifest.shards)} shards"


def make_all(
    make: Make, tasks: Sequence[Task], todo: Sequence[Task], tokenizer: Tokenizer, workers: int, **bar: Any
) -> None:
    """Make the shards of `todo`, of which `tasks` are the whole, with a progress bar.

    Args:
        workers: processes at most; each loads the tokenizer again.
        bar: options of tqdm.

    Raises:
        DataError: what `make` raises, or a process was killed.
    """
    total, left = (sum(task.size for task in some) for some in (tasks, todo))
    calls = [(task.prefix, *task.arguments) for task in todo]
    with tqdm(total=total, initial=total - left, unit="B", unit_scale=True, **bar) as shown:
        if min(workers, len(calls)) > 1:
            _make_in_pool(make, calls, tokenizer, min(workers, len(calls)), shown)
        else:
            for call in calls:
                make(*call, tokenizer, shown.update)


def _make_in_pool(make: Make, calls: Sequence[tuple[Any, ...]], tokenizer: Tokenizer, workers: int, bar: Any) -> None:
    context = multiprocessing.get_context("spawn")
    progress = context.Value("q", 0)
    arguments = (tokenizer.path, tokenizer.eod, progress)
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


_worker: tuple[Tokenizer, Any]


def _start_worker(path: Path, eod: int, progress: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    _worker = Tokenizer.load(path, eod), progress


def _work(make: Make, call: tuple[Any, ...]) -> None:
    tokenizer, progress = _worker

    def report(size: int) -> None:
        with progress.get_lock():
            progress.value += size

    make(*call, tokenizer, report)


def default_workers() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
