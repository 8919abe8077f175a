"""The helper process that probes file systems for the watchdog: `python -m fsdp_pretrain.watchdog.probes.worker`.

Reads requests, a line of JSON each, and forks a child for every one, so that only a child hangs. An answer is a line of
JSON with its ticket; a child that died without one answers with an error. Ends when its input does. No torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from fsdp_pretrain.checkpoint.disk_space import Room, attempts, prunable
from fsdp_pretrain.checkpoint.store import Checkpoint, Store, step_of, verify_files
from fsdp_pretrain.record import journal, lease, mirror_status, state_files
from fsdp_pretrain.record.files import RunDir, seconds_of
from fsdp_pretrain.record.requests import send

_PROBE_BYTES = 64 * 1024
_SAMPLE = 64
_ENTRIES = 40
_KINDS = ("start", "checkpoint", "checkpoint-failed", "checkpoint-missing", "control")


def space(path: str) -> dict[str, Any]:
    """Free space of a file system: the values of `Room`, and as `writing` the bytes of saves in flight there."""
    return {**asdict(Room.of(Path(path))), "writing": sum(attempts(Path(path)).values())}


def checkpoints(directories: list[str], chronicle: str, offset: int) -> dict[str, Any]:
    """What a run's stores hold, and the entries of its journal, the file `chronicle`, from byte `offset` on.

    Returns:
        names: of all checkpoints; problems: of the damaged ones, by name; newest, verified: the newest whole one, and
        the newest verified one, or None; writing: bytes written by every attempt; prunable: what may be deleted of the
        first store to make room; entries, offset: of the journal.
    """
    stores = [Store(Path(directory)) for directory in directories]
    found = sorted((item for store in stores for item in store.scan()), key=lambda item: item.step)
    whole = [item for item in found if item.problem is None]
    proved = [item for item in whole if item.verified]
    writing = {name: size for store in stores for name, size in attempts(store.directory).items()}
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
        "writing": writing,
        "prunable": asdict(prunable(item for item in found if item.path.parent == stores[0].directory)),
        "entries": entries[-_ENTRIES:],
        "offset": offset,
    }


def _describe(item: Checkpoint) -> dict[str, Any]:
    manifest = item.manifest()
    size, count = sum(entry.bytes for entry in manifest.files), len(manifest.files)
    trained = {"step": item.step, "consumed": manifest.consumed, "tokens": manifest.tokens}
    return {**trained, "bytes": size, "files": count, "path": str(item.path)}


def evaluations(evals: str) -> dict[str, Any]:
    """The evaluations in progress.

    Returns:
        claims: the step, tasks, claim token, holder and deadline (seconds) of each.
    """
    claims = []
    for path in sorted(Path(evals).glob("step-*/*/claim.json")):
        held, step = lease.read(path), step_of(path.parent.parent.name)
        if held is None or held.deadline is None or step is None or lease.is_alive(held) is False:
            continue
        facts = held.model_dump(include={"token", "host", "pid", "deadline"})
        claims.append({"step": step, "tasks": path.parent.name, **facts})
    return {"claims": claims}


def results(run: str, newest: int) -> dict[str, Any]:
    """The last results of a run, and the due checkpoints after them. Reads only that many of thousands.

    Returns:
        results: of the `newest` last ones, oldest first: `step`, `limit`, `scores`, `higher_is_better`, `verdicts`;
        waiting: the due checkpoints that are newer than all results: `step`, `seconds` since it was committed,
        `claimed`; given_up: `step` and `reason` of all that were given up; overdue: seconds after which a waiting one
        is (`eval.overdue`).
    """
    from fsdp_pretrain.checkpoint.evaluations import without_results
    from fsdp_pretrain.config.resume_rules import (
        load_recorded,  # imports all of the configuration, in this child only
    )

    place = RunDir(Path(run))
    config = load_recorded(place.config)
    folders = sorted((path for path in place.evals.glob("step-*") if step_of(path.name) is not None), reverse=True)
    paths = itertools.islice((path for folder in folders for path in sorted(folder.glob("*/results.json"))), newest)
    found = [each for path in paths if (each := state_files.view(path, _Results)) is not None]
    waiting, given_up = list[dict[str, Any]](), list[dict[str, Any]]()
    for job in without_results(place, config):
        if job.dropped:
            continue
        if job.given_up:
            given_up.append({"step": job.checkpoint.step, "reason": job.failures[-1].reason})
        elif job.checkpoint.step > max((each.step for each in found), default=-1):
            held = lease.read(job.folder / "claim.json")
            waiting.append(
                {
                    "step": job.checkpoint.step,
                    "seconds": time.time() - (seconds_of(job.committed) or time.time()),
                    "claimed": held is not None and lease.is_alive(held) is not False,
                }
            )
    return {
        "results": [each.model_dump() for each in sorted(found, key=lambda each: each.step)],
        "waiting": waiting,
        "given_up": given_up,
        "overdue": config.eval.overdue.value,
    }


class _Results(state_files.StateFile):
    """What is judged of `results.json`; see `eval.results.Results`."""

    step: int
    limit: int | None = None
    scores: dict[str, dict[str, float | None]]
    higher_is_better: dict[str, dict[str, bool]] = Field(default_factory=dict)
    verdicts: list[dict[str, Any]] = Field(default_factory=list)


def checksum(directories: list[str]) -> dict[str, Any]:
    """Read one file of the newest verified checkpoint back, at low priority.

    Returns:
        name: of the checkpoint, None if there is none; wrong: the errors found.
    """
    os.nice(19)
    found = [item for directory in directories for item in Store(Path(directory)).scan() if item.verified]
    proved = [item for item in found if item.problem is None]
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
        wrong: the first few bad files and what is wrong; count: of all; shards: a sample of paths; device: theirs;
        rate: documents per packed token, None for pairs.
    """
    from data.corpus.manifest import read_manifest  # imports numpy and pydantic, in this child only

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
    tokens = manifest.tokens + manifest.documents * (1 - manifest.carried)
    return {
        "wrong": wrong[:10],
        "count": len(wrong),
        "shards": random.sample(good, min(_SAMPLE, len(good))),
        "device": directory.stat().st_dev if not good else Path(good[0]).stat().st_dev,
        "rate": None if manifest.pairs or not tokens else manifest.documents / tokens,
    }


def request(run: str, verb: str) -> dict[str, Any]:
    """Leave a request in the inbox of a run: the inbox is on storage too."""
    send(RunDir(Path(run)), verb)
    return {}


def mirror(run: str, segment: int) -> dict[str, Any]:
    """What the uploader of a start reports, see `record.mirror_status`; empty: nothing yet."""
    report = mirror_status.read(RunDir(Path(run)), segment)
    return {} if report is None else report.model_dump()


def account(run: str) -> dict[str, Any]:
    """Goodput of a run, as fields of a `Snapshot`. Reads the whole record."""
    from fsdp_pretrain.record import goodput  # imports numpy, in this child only

    found = goodput.goodput(RunDir(Path(run)))
    if found is None:
        return {}
    kept = goodput.State.STEPS
    lost = {state: seconds for state, seconds in found.states.items() if state != kept and seconds}
    return {"goodput": found.goodput, "badput_seconds": lost}


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each
    for each in (space, checkpoints, evaluations, results, checksum, read, write, corpus, request, mirror, account)
}
"""The available probes."""


@dataclass
class _Child:
    ticket: int
    pid: int
    output: bytes = b""


def serve() -> None:
    """Answer requests until the input ends."""
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    children: dict[int, _Child] = {}
    partial = b""
    while True:
        for key, _ in selector.select():
            chunk = os.read(key.fd, 1 << 16)
            if key.fd != 0:
                child = children[key.fd]
                child.output += chunk
                if not chunk:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    del children[key.fd]
                    killed = json.dumps({"ticket": child.ticket, "error": "it was killed"}) + "\n"
                    print(child.output.decode() if child.output.endswith(b"\n") else killed, end="", flush=True)
            elif not chunk:
                for child in children.values():
                    _kill(child)
                return
            else:
                *lines, partial = (partial + chunk).split(b"\n")
                for line in lines:
                    _take(json.loads(line), selector, children)
        _reap(children)


def _take(asked: dict[str, Any], selector: selectors.BaseSelector, children: dict[int, _Child]) -> None:
    if asked.get("kill"):
        for child in children.values():
            if child.ticket == asked["ticket"]:
                _kill(child)
        print(json.dumps({"ticket": asked["ticket"]}), flush=True)  # the helper itself does not hang
        return
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(0)
        os.close(1)
        _answer(asked, into)
    os.close(into)
    children[out] = _Child(asked["ticket"], pid)
    selector.register(out, selectors.EVENT_READ)


def _answer(asked: dict[str, Any], into: int) -> None:
    """In the child: probe, write the values of a `ProbeAnswer`, exit."""
    start = time.monotonic()
    answer: dict[str, Any] = {"ticket": asked["ticket"]}
    try:
        answer["value"] = PROBES[asked["look"]](**asked["arguments"])
    except BaseException as error:
        answer["error"] = f"{type(error).__name__}: {error}"
        answer["errno"] = error.errno if isinstance(error, OSError) else None
    times = os.times()
    answer.update(seconds=time.monotonic() - start, cpu=times.user + times.system)
    try:
        with os.fdopen(into, "w", encoding="utf-8") as pipe:
            pipe.write(json.dumps(answer) + "\n")
    finally:
        os._exit(0)


def _kill(child: _Child) -> None:
    if child.pid:
        os.kill(child.pid, signal.SIGKILL)


def _reap(children: dict[int, _Child]) -> None:
    """Reap children that ended, without waiting for those that may hang."""
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            for child in children.values():
                child.pid = 0 if child.pid == pid else child.pid  # the pid may be reused from now on


if __name__ == "__main__":
    serve()
