"""Makes a corpus shard by shard, in several processes; the same command continues after a kill.

A shard is done when its `.json` record exists. The result does not depend on the number of processes.
"""

from __future__ import annotations

import functools
import json
import socket
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
from fsdp_pretrain.data.corpus.shards import is_being_written
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.data.text.workers import worker_processes
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.files import replace_file
from fsdp_pretrain.units import counted

PLAN = "plan.json"
_RESULTS = ("manifest.json", "blocks.npy", "checksums.npy", "split.json", "heldout.jsonl", "bad_records.jsonl")
"""The files of a job beside its shards and its plan. All others are the user's."""
Make = Callable[..., None]
"""`make(prefix, *arguments, tokenizer)` makes a shard; must be importable by name, for worker processes."""


@dataclass(frozen=True)
class Task:
    """A shard to make."""

    name: str  # path in the directory, without suffix, such as `shards/shard-00001`
    arguments: tuple[Any, ...]  # further arguments of `make`
    size: int  # input bytes, for the progress bar
    suffixes: tuple[str, ...] = (".json", ".bin", ".idx")  # suffixes of the files that exist when the shard is done


@dataclass(frozen=True)
class Job:
    """Makes the shards of one corpus in a directory."""

    out: Path  # the directory: created if absent, continued if it holds the same job, refused if it holds another one
    workers: int = 1  # maximum number of processes; each loads the tokenizer
    overwrite: bool = False  # whether to discard another job's work in `out`
    quiet: bool = False  # whether to show no progress bar

    def claim(self, content: dict[str, Any], shards: int) -> None:
        """Claim the directory for this job. Raises DataError if it holds anything else.

        Args:
            content: everything that determines the shards, as JSON values.
            shards: number of shards.
        """
        out, job = self.out, xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
        # Files first, plan second: a process that makes another part of this job writes the plan before its shards.
        names, claimed_by = self._file_names(), self._claimed_by()
        if claimed_by == job:
            return
        if claimed_by is None and names:
            raise DataError(f"{out} is not empty and not a corpus", remedy="choose another --out")
        if claimed_by is not None and not self.overwrite:
            raise DataError(
                f"{out} holds what was made from other inputs, another tokenizer or other options",
                remedy="choose another --out, or pass --overwrite to replace it",
            )
        if claimed_by is not None:  # else another part may just have made `shards/`
            self.delete([*_RESULTS, *sorted(name for name in names if name.startswith("shards/"))])
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / PLAN, json.dumps({"job": job, "shards": shards}))

    def refuse_own(self, files: Iterable[Path]) -> None:
        """Raise DataError if an input is inside the directory, where `claim` may delete it."""
        out = self.out.resolve()
        for file in files:
            if file.resolve().is_relative_to(out):
                raise DataError(
                    f"{file} is inside the output directory",
                    effect="nothing was made: --overwrite may delete it",
                    remedy="choose another --out",
                )

    def release(self) -> None:
        """Undo `claim` for a refused job without finished shards, since the corrected command is another job."""
        shards = [name for name in self._file_names() if name.startswith("shards/")]
        if not any(name.endswith(".json") for name in shards):
            self.delete([PLAN, *shards])

    def make(self, make: Make, tasks: Sequence[Task], tokenizer: Tokenizer | None, title: str) -> None:
        """Make the shards that are not done yet, with a progress bar.

        Args:
            tokenizer: last argument of `make`; None if it needs none.
            title: title of the progress bar.

        Raises:
            DataError: raised by `make`, or a process was killed.
        """
        here = f".{socket.gethostname()}."
        for name in self._left_behind():  # they may fill the disk; those of other hosts may be alive
            if here in name:
                (self.out / name).unlink(missing_ok=True)
        (self.out / "shards").mkdir(parents=True, exist_ok=True)
        todo = self.undone(tasks)
        total, remaining = (sum(task.size for task in group) for group in (tasks, todo))
        bar_options = {"desc": title, "unit": "B", "unit_scale": True, "disable": self.quiet or None}
        with tqdm(total=total, initial=total - remaining, **bar_options) as bar:
            if min(self.workers, len(todo)) <= 1:
                for task in todo:
                    make(self.out / task.name, *task.arguments, tokenizer)
                    bar.update(task.size)
                return
            path_and_eod = None if tokenizer is None else (tokenizer.path, tokenizer.eod)
            with worker_processes(min(self.workers, len(todo))) as pool:
                futures = {pool.submit(_make_one, make, self.out, task, path_and_eod): task.size for task in todo}
                for future in as_completed(futures):
                    future.result()
                    bar.update(futures[future])

    def undone(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks whose shards are not done."""
        names = self._file_names()
        return [task for task in tasks if not all(task.name + suffix in names for suffix in task.suffixes)]

    def gather(self, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """The records of all shards, which must be done. Deletes files that killed processes left half-written. Raises
        DataError if a record does not match its checksum, or its shard is of another size."""
        self.delete(self._left_behind())
        records = []
        for task in tasks:
            path = self.out / f"{task.name}.json"
            record = load_json(path)
            if not isinstance(record, dict) or record.pop("xxh3", None) != _checksum(record):
                raise DataError(f"{path} is damaged", remedy="delete it and repeat the command")
            if ".bin" in task.suffixes:
                shard = self.out / f"{task.name}.bin"
                if (size := shard.stat().st_size) != record["entry"]["bytes"]:
                    cause = f"{shard} has {size:_} bytes, not the {record['entry']['bytes']:_} that were written"
                    raise DataError(cause, remedy=f"delete {path} and repeat the command: it makes the shard again")
            records.append(record)
        return records

    def _left_behind(self) -> list[str]:
        """Names of half-written files in `shards/` of which no process of this host knows."""
        partial = [name for name in self._file_names() if name.startswith("shards/") and name.endswith(".partial")]
        return [name for name in partial if not is_being_written(self.out / name)]

    def delete(self, names: Iterable[str]) -> None:
        """Delete those files that exist, and `shards/` if it is empty then. `names`: paths in the directory."""
        for name in names:
            (self.out / name).unlink(missing_ok=True)
        with suppress(OSError):
            (self.out / "shards").rmdir()

    def _file_names(self) -> set[str]:
        """Names of the files in the directory and in its `shards/`, relative to the directory; without a plan that is
        just being written, here or by another part."""
        paths = [*self.out.iterdir(), *self.out.glob("shards/*")] if self.out.exists() else []
        return {str(path.relative_to(self.out)) for path in paths if not path.name.startswith(f".{PLAN}.")}

    def _claimed_by(self) -> Any:
        """The job in the directory's plan; None without a plan. Raises DataError if the plan is damaged."""
        path = self.out / PLAN
        try:
            plan = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            remedy = "choose another --out, or delete this directory if it holds nothing else"
            raise DataError(f"cannot read {path}: {error}", remedy=remedy) from None
        return plan.get("job") if isinstance(plan, dict) else ""


def _make_one(make: Make, out: Path, task: Task, path_and_eod: tuple[Path, int] | None) -> None:
    """Make one shard in a worker process; the tokenizer is given as its path and its separator."""
    make(out / task.name, *task.arguments, None if path_and_eod is None else _load_tokenizer(*path_and_eod))


@functools.lru_cache(maxsize=1)
def _load_tokenizer(path: Path, eod: int) -> Tokenizer:
    return Tokenizer.load(path, eod)


def write_record(prefix: Path, record: dict[str, Any]) -> None:
    """Mark a shard done. `record`: its manifest `entry`, its `counts`, and further information for people."""
    sealed = {**record, "xxh3": _checksum(record)}
    replace_file(prefix.with_name(prefix.name + ".json"), (json.dumps(sealed, indent=1) + "\n").encode())


def _checksum(record: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())


def summed(records: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The `counts` of all shards, added up."""
    totals: Counter[str] = Counter()
    for record in records:
        totals.update(record["counts"])
    return dict(totals)


def describe(manifest: CorpusManifest) -> str:
    """The size of a corpus in one line: documents, tokens, shards."""
    return f"{manifest.documents:_} documents, {manifest.tokens:_} tokens in {counted(len(manifest.shards), 'shard')}"
