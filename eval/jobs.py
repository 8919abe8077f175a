"""The scheduled job: every due checkpoint evaluated exactly once, by any number of workers, crash-safe. No torch here.

A worker claims a checkpoint by creating `claim.json` exclusively and touches it while it works. A claim whose owner is
dead, or silent for too long, is moved away by an atomic rename, which only one other worker can win. Results are
published by a rename too, and only by the worker whose claim still stands.
"""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fsdp_pretrain.checkpoint.manifest import Manifest
from fsdp_pretrain.checkpoint.store import Checkpoint, directory_name
from fsdp_pretrain.checkpoint.stores import stores
from fsdp_pretrain.child_process import start_module
from fsdp_pretrain.config import Config
from fsdp_pretrain.record import claim as claims
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.claim import BEAT_SECONDS, Claim, is_alive, take_away
from fsdp_pretrain.record.files import RunDir, make_directory, now
from fsdp_pretrain.record.journal import Journal, read

from .attempt import EvaluationError, Limits, RefusedError, Results, apart, limits

_SILENT_SECONDS = 120.0


@dataclass(frozen=True)
class Job:
    """One evaluation: a checkpoint and a task set."""

    checkpoint: Checkpoint
    folder: Path
    committed: str
    """When the checkpoint was committed: tells it from another of the same step, made after a rollback."""

    @property
    def results(self) -> Path:
        """Where its results appear."""
        return self.folder / "results.json"

    @property
    def done(self) -> bool:
        """Whether there are results, of this very checkpoint."""
        results = state_files.view(self.results, Results)  # damaged ones are made again
        return results is not None and results.committed == self.committed


def task_set(tasks: list[str]) -> str:
    """Directory name of a list of tasks."""
    name = "+".join(tasks)
    return name if len(name) <= 100 else f"{name[:80]}+{xxhash.xxh3_64_hexdigest(name.encode())[:8]}"


def is_due(config: Config, manifest: Manifest) -> bool:
    """Whether the run's configuration wants a checkpoint with this manifest evaluated."""
    if config.eval.every is None:
        return False
    if manifest.final:
        return True
    before = manifest.consumed - manifest.batch
    return config.schedule.due(config.eval.every, step=manifest.step, before=before, after=manifest.consumed)


def due_jobs(run: RunDir, config: Config) -> list[Job]:
    """Evaluations that are due and neither done nor given up, oldest first; claimed ones included."""
    jobs = []
    whole = {item.step: item for item in stores(run).scan() if item.problem is None}  # one of each step
    for checkpoint in whole.values():
        if not is_due(config, manifest := checkpoint.manifest()):
            continue
        folder = run.evals / directory_name(checkpoint.step) / task_set(config.eval.tasks)
        job = Job(checkpoint, folder, manifest.committed)
        if not job.done and failures(job) < config.eval.attempts:
            jobs.append(job)
    return jobs


def protected_steps(run: RunDir, config: Config) -> set[int]:
    """Steps whose checkpoints an evaluation is reading or will read next.

    Only the oldest few of those that wait, or evaluations that never come would fill the disk.
    """
    waiting = due_jobs(run, config)
    claimed = {job.checkpoint.step for job in waiting if (job.folder / "claim.json").exists()}
    return claimed | {job.checkpoint.step for job in waiting[: config.checkpoint.keep_last]}


def failures(job: Job) -> int:
    """How often the evaluation was tried and failed."""
    return len(list(job.folder.glob("failed-*.json")))


def note_failure(job: Job, reason: str) -> int:
    """Record a failed try; how many there are now."""
    state_files.write(job.folder / f"failed-{uuid.uuid4().hex[:8]}.json", {"time": now(), "reason": reason})
    return failures(job)


@contextmanager
def claim(job: Job, limit: Limits | None = None) -> Iterator[Work | None]:
    """Hold a job for the duration of the block; None if another worker holds it or it is done.

    Args:
        limit: how long it may take, for others to see.
    """
    make_directory(job.folder)
    path = job.folder / "claim.json"
    _drop_if_stale(path)
    mine = Claim.take(path, **({} if limit is None else {"deadline": limit.deadline}))
    if mine is None:
        yield None
        return
    try:
        gone = not job.checkpoint.path.exists()  # deleted by retention before it was claimed
        yield None if gone or job.done else Work(job, mine)
    finally:
        mine.release()


@dataclass(frozen=True)
class Work:
    """A job that this process has claimed."""

    job: Job
    claim: Claim

    def publish(self, content: dict[str, Any]) -> bool:
        """Write the results, unless the claim was lost meanwhile. Whether they were written."""
        if not self.claim.still_mine():
            return False
        state_files.write(self.job.results, {**content, "committed": self.job.committed})
        return True


def _drop_if_stale(path: Path) -> None:
    held = claims.read(path)
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:
        return
    if held is None and age < BEAT_SECONDS:  # being written this moment
        return
    if held is None or is_alive(held) is False or age >= _SILENT_SECONDS:
        take_away(path, held)


def watch_once(run: RunDir, config: Config, evaluate: Any) -> tuple[int, int]:
    """Evaluate every due checkpoint that no other worker holds, until none is left.

    Args:
        evaluate: function of (checkpoint) that gives the contents of `results.json`; called in a forked child.

    Returns:
        (evaluated, failed).

    Raises:
        RefusedError: the tasks cannot be evaluated, whatever the checkpoint. That is no attempt: everything stays due.
    """
    journal = Journal(run)
    evaluated = failed = 0
    tried: set[Path] = set()
    try:
        while jobs := [job for job in due_jobs(run, config) if job.folder not in tried]:
            tried.add(jobs[0].folder)
            limit = limits(run, jobs[0].folder.name, config.eval.deadline.value)
            with claim(jobs[0], limit) as held:
                if held is None:
                    continue
                stacks = run.path / "watchdog/stacks" / f"evaluation-{jobs[0].checkpoint.step:08d}.txt"
                ok = _evaluate(run, held, evaluate, journal, config.eval.attempts, limit, stacks)
                evaluated, failed = evaluated + ok, failed + (not ok)
                if not ok:
                    tried.discard(jobs[0].folder)  # tried again until `attempts` are used up
    finally:
        journal.close()
    return evaluated, failed


def _evaluate(
    run: RunDir, held: Work, evaluate: Any, journal: Journal, attempts: int, limit: Limits, stacks: Path
) -> bool:
    job, step = held.job, held.job.checkpoint.step
    start = time.perf_counter()
    try:
        content = apart(
            lambda: evaluate(job.checkpoint),
            limit,
            stacks,
            late=lambda text: journal.write("eval-late", f"the evaluation {text}", step=step),
        )
    except RefusedError as refused:
        if all(entry["text"] != refused.cause for entry in read(run) if entry["kind"] == "eval-refused"):
            journal.write("eval-refused", refused.cause, step=step)  # every worker from now on would say the same
        raise
    except EvaluationError as failed:
        reason = str(failed)
        count = note_failure(job, reason)
        ending = "given up" if count >= attempts else "will be tried again"
        journal.write("eval-failed", f"attempt {count} of {attempts} ({ending}): {reason}", step=step, failures=count)
        return False
    if held.publish(content):
        table = content["scores"]
        shown = ", ".join(
            f"{task} {name} {value:.4g}"
            for task, row in table.items()
            for name, value in row.items()
            if "stderr" not in name
        )
        journal.write(
            "eval",
            f"{shown} in {time.perf_counter() - start:.0f}s",
            step=step,
            scores=table,
            tasks=job.folder.name,
        )
    return True


def start_worker(run: RunDir, config: Config) -> subprocess.Popen[bytes]:
    """Start `fsdp-eval watch RUN --once` beside training: own session, no rank variables, few threads, low priority."""
    threads = {"OMP_NUM_THREADS": str(config.eval.threads)}
    make_directory(run.evals)
    with (run.evals / "log").open("ab") as log:
        return start_module(
            *("eval.cli", "watch", str(run.path), "--once"),
            nice=19,
            environment=threads,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
