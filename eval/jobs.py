"""Scheduled evaluations: each due checkpoint exactly once, by any number of workers, crash-safe. No torch here.

A worker claims a checkpoint by creating `claim.json` exclusively and touches it while it works. A claim whose owner is
dead, or silent for too long, is moved away by an atomic rename, which only one other worker can win. Results are
published by rename too, and only while the worker's claim stands. Their entry in the journal is written after them,
under the same claim; if the worker is killed in between, the next one writes it.
"""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fsdp_pretrain.checkpoint.locations import stores
from fsdp_pretrain.checkpoint.manifest import CheckpointManifest, evaluation_due
from fsdp_pretrain.checkpoint.store import Checkpoint, directory_name
from fsdp_pretrain.child_process import start_module
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.files import RunDir, make_directory, now, seconds_of
from fsdp_pretrain.record.journal import Journal, add, of_kind, read
from fsdp_pretrain.record.lease import Lease, drop_if_stale
from fsdp_pretrain.trackers.follower import catch_up

from . import sample_files
from .attempt import EvaluationError, EvaluationLimits, RefusedError, Results, limits, run_in_child
from .command import conclude, evaluate_elsewhere, is_submitted

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
    claimed = {
        job.checkpoint.step for job in waiting if (job.folder / "claim.json").exists() or is_submitted(job.folder)
    }
    return claimed | {job.checkpoint.step for job in waiting[: config.checkpoint.keep_last]}


@contextmanager
def claim(job: Job, limit: EvaluationLimits | None = None) -> Iterator[Work | None]:
    """Hold a job for the block, with its deadline in the claim; None if another worker holds it or it is done."""
    with _hold(job.folder, **({} if limit is None else {"deadline": limit.deadline})) as mine:
        gone = not job.checkpoint.path.exists()  # deleted by retention before it was claimed
        yield None if mine is None or gone or job.done else Work(job, mine)


@contextmanager
def _hold(folder: Path, **facts: float) -> Iterator[Lease | None]:
    """Hold the claim on a job's folder for the block; None if another worker does."""
    make_directory(folder)
    path = folder / "claim.json"
    drop_if_stale(path, _SILENT_SECONDS)
    mine = Lease.take(path, **facts)
    try:
        yield mine
    finally:
        if mine is not None:
            mine.release()


@dataclass(frozen=True)
class Work:
    """A job that this process has claimed."""

    job: Job
    claim: Lease

    def publish(self, results: Results) -> bool:
        """Write the results, unless the claim was lost; returns whether they were written."""
        if not self.claim.still_mine():
            sample_files.drop(self.job.folder, results.samples.values())
            return False
        state_files.write(self.job.results, {**results.model_dump(exclude_unset=True), "committed": self.job.committed})
        sample_files.drop_others(self.job.folder, results.samples.values())
        return True


def unannounced(run: RunDir) -> list[Path]:
    """Published results without their entry in the journal: the worker is about to write it, or was killed before."""
    entries = of_kind(read(run), "eval")
    found = [(path, state_files.view(path, Results)) for path in sorted(run.evals.glob("step-*/*/results.json"))]
    return [path for path, results in found if results is not None and not _is_announced(path.parent, results, entries)]


def _is_announced(folder: Path, results: Results, entries: list[dict[str, Any]]) -> bool:
    """Whether one of the entries is that of these results. Earlier releases' entries lack the commit time."""
    if results.committed is None:  # not of a scheduled evaluation
        return True
    for entry in entries:
        if entry["step"] != results.step or entry.get("tasks", folder.name) != folder.name:
            continue
        committed = entry.get("committed")
        after = (seconds_of(entry["time"]) or 0.0) >= (seconds_of(results.committed) or 0.0)
        if committed == results.committed or (committed is None and after):
            return True
    return False


def _announce(run: RunDir, folder: Path) -> None:
    """End what the published results conclude, and add them to the journal, once. The caller holds the claim.

    Raises StorageError if the journal cannot be written; then another worker does it.
    """
    results = state_files.view(folder / "results.json", Results)
    if results is None:
        return
    conclude(folder, results.committed)
    if _is_announced(folder, results, of_kind(read(run), "eval")):
        return
    for verdict in (each for each in results.verdicts if each.ok is False):
        add(run, "eval-verdict", f"{verdict.probe}: {verdict.text}", step=results.step)
    rows = results.scores.items()
    pairs = ((task, name, value) for task, row in rows for name, value in row.items() if "stderr" not in name)
    shown = ", ".join(f"{task} {name} {value:.4g}" for task, name, value in pairs)
    add(
        run,
        "eval",
        f"{shown} in {results.seconds:.0f}s",
        step=results.step,
        scores=results.scores,
        tasks=folder.name,
        committed=results.committed,
    )
    catch_up(run)


def watch_once(run: RunDir, config: Config, evaluate: Callable[..., Results] | None = None) -> tuple[int, int]:
    """Evaluate every due checkpoint that no other worker holds; numbers of done and failed ones.

    Args:
        evaluate: takes a checkpoint and, as `keep`, the folder for sample files; runs in forked children. None:
            `eval.command` evaluates.

    Raises:
        RefusedError: the tasks cannot be evaluated, whatever the checkpoint. Not an attempt: everything stays due.
        StorageError: results are published, but the journal cannot be written.
    """
    for path in run.evals.glob("step-*/*/claim.json"):  # also of what is done: it would look like work
        drop_if_stale(path, _SILENT_SECONDS)
    for path in unannounced(run):
        with _hold(path.parent) as mine:
            if mine is not None:
                _announce(run, path.parent)
    journal = Journal(run)
    evaluated = failed = 0
    tried: set[Path] = set()
    try:
        while jobs := [job for job in due_jobs(run, config) if job.folder not in tried]:
            tried.add(jobs[0].folder)
            limit = limits(run, jobs[0].folder.name, config.eval.deadline.value)
            with claim(jobs[0], limit) as held:
                ok = None if held is None else _evaluate(run, config, held, evaluate, journal, limit)
                evaluated, failed = evaluated + (ok is True), failed + (ok is False)
                if ok is False:
                    tried.discard(jobs[0].folder)  # tried again until `attempts` are used up
    finally:
        journal.close()
    return evaluated, failed


def _evaluate(
    run: RunDir,
    config: Config,
    held: Work,
    evaluate: Callable[..., Results] | None,
    journal: Journal,
    limit: EvaluationLimits,
) -> bool | None:
    """Whether results of a claimed job were published; None if the claim was lost."""
    job, step = held.job, held.job.checkpoint.step

    def late(text: str) -> None:
        journal.write("eval-late", f"the evaluation {text}", step=step)

    try:
        results: Results | None
        if evaluate is None:
            results = evaluate_elsewhere(run, config, held, limit, late)
        else:
            stacks = run.path / "watchdog/stacks" / f"evaluation-{step:08d}.txt"
            results = run_in_child(lambda: evaluate(job.checkpoint, keep=job.folder), limit, stacks, late)
    except RefusedError as refused:
        if all(entry["text"] != refused.cause for entry in read(run) if entry["kind"] == "eval-refused"):
            journal.write("eval-refused", refused.cause, step=step)  # every later worker would report the same
        raise
    except EvaluationError as failed:
        note = {"time": now(), "reason": str(failed)}
        state_files.write(job.folder / f"failed-{uuid.uuid4().hex[:8]}.json", note)
        count, attempts = job.failures, config.eval.attempts
        ending = "given up" if count >= attempts else "will be tried again"
        journal.write("eval-failed", f"attempt {count} of {attempts} ({ending}): {failed}", step=step, failures=count)
        return False
    if results is None or not held.publish(results):
        return None
    _announce(run, job.folder)
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
