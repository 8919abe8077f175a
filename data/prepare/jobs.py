"""Makes a corpus shard by shard, in several processes; the same command continues after a kill.

A shard is done when its `.json` record exists. The result does not depend on the number of processes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from tqdm import tqdm

from fsdp_pretrain.data.corpus.manifest import CorpusManifest, load_json
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.data.text.workers import worker_processes
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.files import replace_file

PLAN = "plan.json"
Make = Callable[..., None]
"""`make(prefix, *arguments, tokenizer)` makes a shard; must be importable by name."""


@dataclass(frozen=True)
class Task:
    """A shard to make.

    Attributes:
        name: path in the directory, without suffix, such as `shards/shard-00001`.
        arguments: further arguments of `make`.
        size: bytes, for the progress bar.
        suffixes: suffixes of the files that exist when the shard is done.
    """

    name: str
    arguments: tuple[Any, ...]
    size: int
    suffixes: tuple[str, ...] = (".json", ".bin", ".idx")


def undone(out: Path, tasks: Sequence[Task]) -> list[Task]:
    """The tasks whose shards are not done."""
    names = _names(out)
    return [task for task in tasks if not all(task.name + suffix in names for suffix in task.suffixes)]


def _names(out: Path) -> set[str]:
    """Names of the files in a directory and in its `shards/`, relative to the directory."""
    files = [*out.iterdir(), *out.glob("shards/*")] if out.exists() else []
    return {str(path.relative_to(out)) for path in files}


def delete(out: Path, names: Iterable[str]) -> None:
    """Delete those files of a job that exist, and `shards/` if it is empty then."""
    for name in names:
        (out / name).unlink(missing_ok=True)
    with suppress(OSError):
        (out / "shards").rmdir()


def claim(out: Path, content: dict[str, Any], shards: int, *, overwrite: bool) -> None:
    """Claim the directory `out` for this job. Raises DataError if it holds anything else.

    Args:
        content: everything that determines the shards, as JSON values.
        shards: number of shards.
        overwrite: whether to discard another job's work.
    """
    job = xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
    names, held = _names(out), _held_job(out)  # in this order: the plan of another part is written first
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
    delete(out, [*results, *sorted(name for name in names if name.endswith(".jsonl") or name.startswith("shards/"))])
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / PLAN, json.dumps({"job": job, "shards": shards}))


def _held_job(out: Path) -> Any:
    """The job in the plan of `out`; None without a plan. Raises DataError if it is damaged."""
    try:
        held = json.loads((out / PLAN).read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot read {out / PLAN}: {error}", remedy="delete it and repeat the command") from None
    return held.get("job") if isinstance(held, dict) else ""


def release(out: Path) -> None:
    """Undo `claim` for a refused job without finished shards, since the corrected command is another job."""
    shards = [name for name in _names(out) if name.startswith("shards/")]
    if not any(name.endswith(".json") for name in shards):
        delete(out, [PLAN, *shards])


def write_record(prefix: Path, record: dict[str, Any]) -> None:
    """Mark a shard done. `record`: its manifest `entry`, `counts`, and further information for people."""
    sealed = {**record, "xxh3": _seal(record)}
    replace_file(prefix.with_name(prefix.name + ".json"), (json.dumps(sealed, indent=1) + "\n").encode())


def _seal(record: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())


def gather(out: Path, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """The records of all shards, which must be done. Deletes files that killed processes left half-written.

    Raises:
        DataError: a record does not match its seal.
    """
    delete(out, [name for name in _names(out) if name.startswith("shards/") and name.endswith(".partial")])
    records = []
    for task in tasks:
        path = out / f"{task.name}.json"
        record = load_json(path)
        if not isinstance(record, dict) or record.pop("xxh3", None) != _seal(record):
            raise DataError(f"{path} is damaged", remedy="delete it and repeat the command")
        records.append(record)
    return records


def summed(done: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The sums of the counts of all shards."""
    totals: Counter[str] = Counter()
    for record in done:
        totals.update(record["counts"])
    return dict(totals)


def describe(manifest: CorpusManifest) -> str:
    """One line about a corpus: documents, tokens, shards."""
    return f"{manifest.documents:_} documents, {manifest.tokens:_} tokens in {len(manifest.shards)} shards"


def make_all(
    make: Make,
    out: Path,
    tasks: Sequence[Task],
    tokenizer: Tokenizer | None,
    workers: int,
    **bar: Any,
) -> None:
    """Make the shards that are not done yet, with a progress bar.

    Args:
        tokenizer: the tokenizer for `make`; None if it needs none.
        workers: most processes; each loads the tokenizer.
        bar: options of tqdm.

    Raises:
        DataError: raised by `make`, or a process was killed.
    """
    (out / "shards").mkdir(parents=True, exist_ok=True)
    todo = undone(out, tasks)
    total, left = (sum(task.size for task in some) for some in (tasks, todo))
    with tqdm(total=total, initial=total - left, unit="B", unit_scale=True, **bar) as shown:
        if min(workers, len(todo)) <= 1:
            for task in todo:
                make(out / task.name, *task.arguments, tokenizer)
                shown.update(task.size)
            return
        given = None if tokenizer is None else (tokenizer.path, tokenizer.eod)
        with worker_processes(min(workers, len(todo)), _start_worker, given) as pool:
            futures = {pool.submit(_work, make, out, task): task.size for task in todo}
            for future in as_completed(futures):
                future.result()
                shown.update(futures[future])


_worker: Tokenizer | None = None


def _start_worker(tokenizer: tuple[Path, int] | None) -> None:
    global _worker
    _worker = None if tokenizer is None else Tokenizer.load(*tokenizer)


def _work(make: Make, out: Path, task: Task) -> None:
    make(out / task.name, *task.arguments, _worker)
