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
from pathlib import Path
from typing import Any

from fsdp_pretrain.atomic import replace_file
from fsdp_pretrain.errors import DataError

from .corpus import load_json
from .tokenizer import Tokenizer

Make = Callable[..., None]
"""`make(*task, tokenizer, report)` makes one shard; `report(n)` adds to the progress shown. Importable by name."""


def claim(out: Path, job: str, shards: int, *, overwrite: bool) -> None:
    """Make `out` this job's directory, or raise DataError if it is something else's.

    Args:
        out: created if absent.
        job: digest of everything that decides the content.
        shards: how many there will be.
        overwrite: discard another job's work.
    """
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


def is_done(prefix: Path, suffixes: Sequence[str] = (".json", ".bin", ".idx")) -> bool:
    """Whether all files of a shard are there."""
    return all(prefix.with_name(prefix.name + suffix).exists() for suffix in suffixes)


def read_records(out: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """The `.json` records of all shards, done by now; sweeps what killed processes left half-written."""
    for path in (out / "shards").glob("*.partial"):
        path.unlink(missing_ok=True)
    return [load_json(out / "shards" / f"{name}.json") for name in names]


def make_all(make: Make, tasks: Sequence[tuple[Any, ...]], tokenizer: Tokenizer, workers: int, bar: Any) -> None:
    """Make shards; one process makes them here, several in a pool whose progress a thread shows.

    Args:
        make: see `Make`.
        tasks: its first arguments, shard by shard.
        tokenizer: loaded again in every process.
        workers: processes at most.
        bar: tqdm.

    Raises:
        DataError: what `make` raises, or a process was killed.
    """
    if min(workers, len(tasks)) <= 1:
        for task in tasks:
            make(*task, tokenizer, bar.update)
        return
    context = multiprocessing.get_context("spawn")
    progress = context.Value("q", 0)
    arguments = (tokenizer.path, tokenizer.eod, progress)
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _start_worker, arguments)
    stop = threading.Event()
    shown = threading.Thread(target=_show, args=(progress, bar, stop), daemon=True)
    shown.start()
    futures: list[Future[None]] = [pool.submit(_work, make, task) for task in tasks]
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


def _work(make: Make, task: tuple[Any, ...]) -> None:
    tokenizer, progress = _worker

    def report(size: int) -> None:
        with progress.get_lock():
            progress.value += size

    make(*task, tokenizer, report)


def default_workers() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
