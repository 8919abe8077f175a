"""A corpus made shard by shard: claimed by one job, spread over processes, resumed after a kill.

A shard is done when its `.json` record exists; the result does not depend on the number of processes.
"""

from __future__ import annotations

import functools
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
"""`make(prefix, *arguments, tokenizer)` makes a shard. Importable by name."""


@dataclass(frozen=True)
class Task:
    """A shard to make.

    Attributes:
        name: in the directory, without suffix: `shards/shard-00001`.
        arguments: the further ones of `make`.
        size: bytes, for progress.
        suffixes: of the files that are there when it is done.
    """

    name: str
    arguments: tuple[Any, ...]
    size: int
    suffixes: tuple[str, ...] = (".json", ".bin", ".idx")


@dataclass(frozen=True)
class Job:
    """What is made shard by shard in a directory.

    Attributes:
        out: created if absent; continued if it holds the same job, refused if it holds another one.
        workers: maximum number of processes; each loads the tokenizer.
        overwrite: discard another job's work in `out`.
        quiet: no progress bar.
    """

    out: Path
    workers: int = 1
    overwrite: bool = False
    quiet: bool = False

    def claim(self, content: dict[str, Any], shards: int) -> None:
        """Make the directory this job's place. Raises DataError if it holds anything else.

        Args:
            content: everything that decides the shards, as JSON values.
            shards: number of shards.
        """
        out, job = self.out, xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
        names, held = self._names(), self._held()  # in this order: the plan of another part is written first
        if held == job:
            return
        if held is None and names:
            raise DataError(f"{out} is not empty and not a corpus", remedy="choose another --out")
        if held is not None and not self.overwrite:
            raise DataError(
                f"{out} holds what was made from other inputs, another tokenizer or other options",
                remedy="choose another --out, or pass --overwrite to replace it",
            )
        results = ("manifest.json", "blocks.npy", "checksums.npy", "split.json")
        old = sorted(name for name in names if name.endswith(".jsonl") or name.startswith("shards/"))
        self.delete([*results, *old])
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / PLAN, json.dumps({"job": job, "shards": shards}))

    def release(self) -> None:
        """Undo `claim` for a refused job without finished shards: the corrected command is another job."""
        shards = [name for name in self._names() if name.startswith("shards/")]
        if not any(name.endswith(".json") for name in shards):
            self.delete([PLAN, *shards])

    def make(self, make: Make, tasks: Sequence[Task], tokenizer: Tokenizer | None, title: str) -> None:
        """Make the shards that are not done yet, with a progress bar.

        Args:
            tokenizer: for `make`; None if it needs none.
            title: of the bar.

        Raises:
            DataError: from `make`, or a process was killed.
        """
        (self.out / "shards").mkdir(parents=True, exist_ok=True)
        todo = self.undone(tasks)
        total, left = (sum(task.size for task in some) for some in (tasks, todo))
        bar = {"desc": title, "unit": "B", "unit_scale": True, "disable": self.quiet or None}
        with tqdm(total=total, initial=total - left, **bar) as shown:
            if min(self.workers, len(todo)) <= 1:
                for task in todo:
                    make(self.out / task.name, *task.arguments, tokenizer)
                    shown.update(task.size)
                return
            given = None if tokenizer is None else (tokenizer.path, tokenizer.eod)
            with worker_processes(min(self.workers, len(todo))) as pool:
                futures = {pool.submit(_work, make, self.out, task, given): task.size for task in todo}
                for future in as_completed(futures):
                    future.result()
                    shown.update(futures[future])

    def undone(self, tasks: Sequence[Task]) -> list[Task]:
        """Those that are still to be made."""
        names = self._names()
        return [task for task in tasks if not all(task.name + suffix in names for suffix in task.suffixes)]

    def gather(self, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """What `write_record` wrote of each shard; all must be done. Deletes what killed processes left half-written.

        Raises:
            DataError: a record does not match its seal.
        """
        self.delete([name for name in self._names() if name.startswith("shards/") and name.endswith(".partial")])
        found = []
        for task in tasks:
            path = self.out / f"{task.name}.json"
            record = load_json(path)
            if not isinstance(record, dict) or record.pop("xxh3", None) != _seal(record):
                raise DataError(f"{path} is damaged", remedy="delete it and repeat the command")
            found.append(record)
        return found

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, as far as they are there, and `shards/` if nothing is left in it."""
        for name in names:
            (self.out / name).unlink(missing_ok=True)
        with suppress(OSError):
            (self.out / "shards").rmdir()

    def _names(self) -> set[str]:
        """Of the files in the directory and in its `shards/`."""
        found = [*self.out.iterdir(), *self.out.glob("shards/*")] if self.out.exists() else []
        return {str(path.relative_to(self.out)) for path in found}

    def _held(self) -> Any:
        """The job that the directory's plan names; None without one. Raises DataError if it is damaged."""
        path = self.out / PLAN
        try:
            held = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise DataError(f"cannot read {path}: {error}", remedy="delete it and repeat the command") from None
        return held.get("job") if isinstance(held, dict) else ""


def _work(make: Make, out: Path, task: Task, tokenizer: tuple[Path, int] | None) -> None:
    make(out / task.name, *task.arguments, None if tokenizer is None else _load(*tokenizer))


@functools.lru_cache(maxsize=1)
def _load(path: Path, eod: int) -> Tokenizer:
    return Tokenizer.load(path, eod)


def write_record(prefix: Path, record: dict[str, Any]) -> None:
    """Mark a shard done: its manifest `entry`, `counts`, and further information for people."""
    sealed = {**record, "xxh3": _seal(record)}
    replace_file(prefix.with_name(prefix.name + ".json"), (json.dumps(sealed, indent=1) + "\n").encode())


def _seal(record: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())


def summed(done: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The sums of the counts of all shards."""
    totals: Counter[str] = Counter()
    for record in done:
        totals.update(record["counts"])
    return dict(totals)


def describe(manifest: CorpusManifest) -> str:
    """One line on a corpus: documents, tokens, shards."""
    return f"{manifest.documents:_} documents, {manifest.tokens:_} tokens in {len(manifest.shards)} shards"
