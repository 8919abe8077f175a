"""What the watchdog looks at on storage that may hang: called in threads of `periodic`."""

from __future__ import annotations

import itertools
import os
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field

from fsdp_pretrain.checkpoint.disk_space import Room, attempts, prunable
from fsdp_pretrain.checkpoint.store import Checkpoint, Store, step_of, verify_files
from fsdp_pretrain.run import journal, lock, mirror_status, state_files
from fsdp_pretrain.run.files import RunDir, seconds_of
from fsdp_pretrain.run.requests import send

_PROBE_BYTES = 64 * 1024
_SAMPLE = 64
_ENTRIES = 40
_KINDS = ("start", "checkpoint", "checkpoint-failed", "checkpoint-missing", "control")


def space(path: str) -> dict[str, Any]:
    """Free space of a file system: the values of `Room`, and as `writing` the bytes of saves in flight there."""
    return {**asdict(Room.of(Path(path))), "writing": sum(attempts(Path(path)).values())}


def checkpoints(directory: str, chronicle: str, offset: int) -> dict[str, Any]:
    """What the store of a run holds, and the entries of its journal, the file `chronicle`, from byte `offset` on.

    Returns:
        names: of all checkpoints; problems: of the damaged ones, by name; newest, verified: the newest whole one, and
        the newest verified one, or None; writing: bytes written by every attempt; prunable: what may be deleted of the
        first store to make room; entries, offset: of the journal.
    """
    store = Store(Path(directory))
    found = sorted(store.scan(), key=lambda item: item.step)
    whole = [item for item in found if item.problem is None]
    proved = [item for item in whole if item.verified]
    entries = []
    for entry, behind in journal.entries(Path(chronicle), offset):
        offset = behind
        if entry["kind"] in _KINDS and journal.is_whole(entry):
            entries.append(entry)
    return {
        "names": [item.path.name for item in found],
        # a checkpoint loses its name before it is deleted
        "problems": {item.path.name: item.problem for item in found if item.problem and item.path.is_dir()},
        "newest": _describe(whole[-1]) if whole else None,
        "verified": _describe(proved[-1]) if proved else None,
        "writing": attempts(store.directory),
        "prunable": asdict(prunable(found)),
        "entries": entries[-_ENTRIES:],
        "offset": offset,
    }


def _describe(item: Checkpoint) -> dict[str, Any]:
    manifest = item.manifest()
    size, count = sum(entry.bytes for entry in manifest.files), len(manifest.files)
    trained = {"step": item.step, "consumed": manifest.consumed, "tokens": manifest.tokens}
    return {**trained, "bytes": size, "files": count, "path": str(item.path)}


def results(run: str, newest: int) -> dict[str, Any]:
    """The last results of a run, and the due checkpoints without any. Reads only that many of thousands.

    Returns:
        results: of the `newest` last ones, oldest first: `step`, `scores`, `verdicts`;
        late: the due checkpoints, newer than all results, whose results are late: `step`, `seconds` since it was
        committed, `claimed` by a worker; given_up: `step` and `reason` of all that were given up.
    """
    from fsdp_pretrain.checkpoint.evaluations import without_results
    from fsdp_pretrain.config.resume_rules import load_recorded

    place = RunDir(Path(run))
    config = load_recorded(place.config)
    folders = sorted((path for path in place.evals.glob("step-*") if step_of(path.name) is not None), reverse=True)
    paths = itertools.islice((path for folder in folders for path in sorted(folder.glob("*/results.json"))), newest)
    found = [each for path in paths if (each := state_files.view(path, _Results)) is not None]
    late, given_up = list[dict[str, Any]](), list[dict[str, Any]]()
    for job in without_results(place, config):
        if job.given_up:
            given_up.append({"step": job.checkpoint.step, "reason": job.failures[-1].reason})
        elif job.checkpoint.step > max((each.step for each in found), default=-1):
            held = lock.read(job.folder / "claim.json")
            claimed = held is not None and lock.is_alive(held) is not False
            allowed = config.eval.overdue.value
            if held is not None and claimed:
                allowed += held.deadline or 0.0  # then its worker has ended it
            seconds = time.time() - (seconds_of(job.committed) or time.time())
            if seconds > allowed:
                late.append({"step": job.checkpoint.step, "seconds": seconds, "claimed": claimed})
    return {
        "results": [each.model_dump() for each in sorted(found, key=lambda each: each.step)],
        "late": late,
        "given_up": given_up,
    }


class _Results(state_files.StateFile):
    """What is judged of `results.json`; see `fsdp_pretrain.eval.results.Results`."""

    step: int
    scores: dict[str, dict[str, float | None]]
    verdicts: list[dict[str, Any]] = Field(default_factory=list)


def checksum(directory: str) -> dict[str, Any]:
    """Read one file of the newest verified checkpoint back.

    Returns:
        name: of the checkpoint, None if there is none; wrong: the errors found.
    """
    proved = [item for item in Store(Path(directory)).scan() if item.verified and item.problem is None]
    if not proved:
        return {"name": None, "wrong": []}
    newest = max(proved, key=lambda item: item.step)
    wrong = verify_files(newest.path, random.sample(newest.files(), 1))
    return {"name": newest.path.name, "wrong": wrong if newest.path.is_dir() else []}


def read(paths: list[str]) -> dict[str, Any]:
    """Read 4 KiB at a random place of a random file, from storage rather than from the page cache."""
    path = random.choice(paths)
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(random.randrange(max(1, size - 4096)))
        file.read(4096)
    return {"path": path}


def write(path: str) -> dict[str, Any]:
    """Write a small file into a directory, sync it, remove it."""
    directory = Path(path)
    if not directory.is_dir():
        return {}
    probe = directory / f".probe-{os.uname().nodename}"
    try:
        with probe.open("wb") as file:
            file.write(b"\0" * _PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)
    return {}


def corpus(path: str) -> dict[str, Any]:
    """Whether every shard of a corpus exists with its size.

    Returns:
        wrong: the first few bad files and what is wrong; count: of all; shards: a sample of paths; device: theirs.
    """
    from fsdp_pretrain.data.corpus.manifest import read_manifest  # imports numpy

    directory = Path(path)
    manifest = read_manifest(directory)
    wrong, good = [], []
    for entry in manifest.shards:
        prefix = entry.prefix(directory)
        binary, index = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
        try:
            size = binary.stat().st_size
            if size != entry.bytes:
                wrong.append(f"{binary} has {size} bytes, the manifest says {entry.bytes}")
                continue
            index.stat()
            good.append(str(binary))
        except OSError as error:
            wrong.append(f"{error.filename}: {error.strerror}")
    return {
        "wrong": wrong[:10],
        "count": len(wrong),
        "shards": random.sample(good, min(_SAMPLE, len(good))),
        "device": directory.stat().st_dev if not good else Path(good[0]).stat().st_dev,
    }


def request(run: str, verb: str) -> dict[str, Any]:
    """Leave a request in the inbox of a run: the inbox is on storage too."""
    send(RunDir(Path(run)), verb)
    return {}


def mirror(run: str, segment: int) -> dict[str, Any]:
    """What the uploader of a start reports, see `record.mirror_status`; empty: nothing yet."""
    report = mirror_status.read(RunDir(Path(run)), segment)
    return {} if report is None else report.model_dump()
