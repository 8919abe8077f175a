"""Scheduled evaluations: each due checkpoint exactly once, by any number of workers, crash-safe. No torch here.

A worker claims a checkpoint by creating `claim.json` exclusively and touches it while it works. A claim whose owner is
dead, or silent for too long, is moved away by an atomic rename, which only one other worker can win. Results are
published by rename too, and only while the worker's claim stands.
"""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from fsdp_pretrain.checkpoint.locations import stores
from fsdp_pretrain.checkpoint.manifest import CheckpointManifest, evaluation_due
from fsdp_pretrain.checkpoint.store import Checkpoint, directory_name
from fsdp_pretrain.child_process import start_module
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.record import lease as claims
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.files import RunDir, make_directory, now
from fsdp_pretrain.record.journal import Journal, read
from fsdp_pretrain.record.lease import BEAT_SECONDS, Lease, is_alive, take_away

from .attempt import EvaluationError, EvaluationLimits, RefusedError, Results, limits, run_in_child

_SILENT_SECONDS = 120.0


@dataclass(frozen=True)
class Job:
    """One evaluation: a checkpoint and a task set.

    Attributes:
        committed: time of the checkpoint's commit: distinguishes it from one of the same step, made after a rollback.
    """

    checkpoint: Checkpoint
    folder: Path
    committed: str

    @property
    def results(self) -> Path:
        return self.folder / "results.json"

    @property
    def done(self) -> bool:
        """Whether there are results of this very checkpoint; damaged ones are made again."""
        results = state_files.view(self.results, Results)
        return results is not None and results.committed == self.committed

    @property
    def failures(self) -> int:
        """Number of failed attempts."""
        return len(list(self.folder.glob("failed-*.json")))


def task_set(tasks: list[str]) -> str:
    """Directory name of a list of tasks."""
    name = "+".join(tasks)
    return name if len(name) <= 100 else f"{name[:80]}+{xxhash.xxh3_64_hexdigest(name.encode())[:8]}"


def is_due(config: Config, manifest: CheckpointManifest) -> bool:
    """Whether the configuration asks to evaluate a checkpoint with this manifest."""
    return evaluation_due(config, manifest)


def due_jobs(run: RunDir, config: Config) -> list[Job]:
    """Evaluations that are due and neither done nor given up, oldest first, including claimed ones."""
    jobs = []
    whole = {item.step: item for item in stores(run).scan() if item.problem is None}  # one per step
    for checkpoint in whole.values():
        if not is_due(config, manifest := checkpoint.manifest()):
            continue
        folder = run.evals / directory_name(checkpoint.step) / task_set(config.eval.tasks)
        job = Job(checkpoint, folder, manifest.committed)
        if not job.done and job.failures < config.eval.attempts:
            jobs.append(job)
    return jobs


def protected_steps(run: RunDir, config: Config) -> set[int]:
    """Steps whose checkpoints an evaluation is reading or will read next.

    Only the oldest few that wait: evaluations that never run would fill the disk.
    """
    waiting = due_jobs(run, config)
    claimed = {job.checkpoint.step for job in waiting if (job.folder / "claim.json").exists()}
    return claimed | {job.checkpoint.step for job in waiting[: config.checkpoint.keep_last]}


@contextmanager
def claim(job: Job, limit: EvaluationLimits | None = None) -> Iterator[Work | None]:
    """Hold a job for the block, with its deadline in the claim; None if another worker holds it or it is done."""
    make_directory(job.folder)
    path = job.folder / "claim.json"
    _drop_if_stale(path)
    mine = Lease.take(path, **({} if limit is None else {"deadline": limit.deadline}))
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
    claim: Lease

    def publish(self, results: Results) -> bool:
        """Write the results, unless the claim was lost; returns whether they were written."""
        if not self.claim.still_mine():
            return False
        state_files.write(self.job.results, {**results.model_dump(exclude_unset=True), "committed": self.job.committed})
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


def watch_once(run: RunDir, config: Config, evaluate: Callable[[Checkpoint], Results]) -> tuple[int, int]:
    """Evaluate, in forked children, every due checkpoint that no other worker holds; numbers of done and failed ones.

    Raises:
        RefusedError: the tasks cannot be evaluated, whatever the checkpoint. Not an attempt: everything stays due.
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
                ok = _evaluate(run, held, evaluate, journal, config.eval.attempts, limit)
                evaluated, failed = evaluated + ok, failed + (not ok)
                if not ok:
                    tried.discard(jobs[0].folder)  # tried again until `attempts` are used up
    finally:
        journal.close()
    return evaluated, failed


def _evaluate(
    run: RunDir,
    held: Work,
    evaluate: Callable[[Checkpoint], Results],
    journal: Journal,
    attempts: int,
    limit: EvaluationLimits,
) -> bool:
    job, step = held.job, held.job.checkpoint.step
    start = time.perf_counter()
    try:
        results = run_in_child(
            lambda: evaluate(job.checkpoint),
            limit,
            run.path / "watchdog/stacks" / f"evaluation-{step:08d}.txt",
            late=lambda text: journal.write("eval-late", f"the evaluation {text}", step=step),
        )
    except RefusedError as refused:
        if all(entry["text"] != refused.cause for entry in read(run) if entry["kind"] == "eval-refused"):
            journal.write("eval-refused", refused.cause, step=step)  # every later worker would report the same
        raise
    except EvaluationError as failed:
        note = {"time": now(), "reason": str(failed)}
        state_files.write(job.folder / f"failed-{uuid.uuid4().hex[:8]}.json", note)
        count = job.failures
        ending = "given up" if count >= attempts else "will be tried again"
        journal.write("eval-failed", f"attempt {count} of {attempts} ({ending}): {failed}", step=step, failures=count)
        return False
    if held.publish(results):
        rows = results.scores.items()
        pairs = ((task, name, value) for task, row in rows for name, value in row.items() if "stderr" not in name)
        shown = ", ".join(f"{task} {name} {value:.4g}" for task, name, value in pairs)
        text = f"{shown} in {time.perf_counter() - start:.0f}s"
        journal.write("eval", text, step=step, scores=results.scores, tasks=job.folder.name)
        for verdict in (each for each in results.verdicts if each.ok is False):
            journal.write("eval-verdict", f"{verdict.probe}: {verdict.text}", step=step)
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
