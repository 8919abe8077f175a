"""Scheduled evaluations: each due checkpoint exactly once, by any number of workers, crash-safe.

A worker claims a checkpoint by creating `claim.json` exclusively, and touches the file while it works. If the owner of
a claim is dead, by the rules of all leases (`run.lock`), another worker moves the claim away by an atomic rename,
which only one can win. Results are published by rename too, and only while the worker holds the claim. Their entry in
the journal is written after them, under the same claim; if the worker is killed in between, the next one writes it.
"""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsdp_pretrain.checkpoint.evaluations import FailedAttempt, Job, due_jobs, given_up_jobs, pause_after
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.processes import start_module
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir, make_directory, now
from fsdp_pretrain.run.journal import Journal, add, of_kind, read
from fsdp_pretrain.run.lock import Lease, drop_if_dead
from fsdp_pretrain.units import human_time
from fsdp_pretrain.views.trackers.follow import catch_up

from . import sample_files
from .attempt import Evaluated, Work, drop_attempts
from .results import EvaluationError, RefusedError, Results

Evaluate = Callable[[Work], Evaluated | None]
"""Evaluates a claimed job, see `attempt.evaluate_job`."""

_NICENESS = 19
"""Of a worker beside training: it takes what the ranks leave."""


def protected_steps(run: RunDir, config: Config) -> set[int]:
    """Steps whose checkpoints are being evaluated, will be next, or were given up and wait for somebody's decision.

    Of the last two kinds only the oldest few: else evaluations that never run would fill the disk.
    """
    given_up = given_up_jobs(run, config)[: config.checkpoint.keep_last]
    return {job.checkpoint.step for job in (*_next(run, config), *given_up)}


def _next(run: RunDir, config: Config) -> list[Job]:
    """Evaluations that run, and the oldest few that wait."""
    waiting = due_jobs(run, config)
    claimed = [job for job in waiting if (job.folder / "claim.json").exists()]
    return [*claimed, *waiting[: config.checkpoint.keep_last]]


def merged_steps(run: RunDir, config: Config) -> set[int]:
    """Steps whose checkpoints `eval.merge` merges in the evaluations that run or are next: a late one has the same.

    Also those that it would merge with the newest: the evaluation that will be due next merges what is left of them.
    """
    if (merge := config.eval.merge) is None or config.eval.every is None:
        return set()
    from fsdp_pretrain.checkpoint.merging import in_range  # imports torch

    there, found = Store(run.checkpoints).scan(), set[int]()
    newest = [checkpoint.step for checkpoint in there if checkpoint.problem is None][-1:]
    due = {*newest, *(job.checkpoint.step for job in _next(run, config))}
    for number in [number for number, checkpoint in enumerate(there, 1) if checkpoint.step in due]:
        with suppress(UserError):  # a damaged one, of which the evaluation tells: those after it may be merged later
            for checkpoint in in_range(there[:number], merge.last, merge.every):
                found.add(checkpoint.step)
    return found


@contextmanager
def claim(job: Job) -> Iterator[Work | None]:
    """Claim a job for the `with` block; yields None if another worker holds it, or if it is no longer due."""
    with _hold(job.folder, deadline=job.section.deadline.value) as lease:
        deleted = not job.checkpoint.path.exists()  # by retention, before it was claimed
        over = job.done or job.given_up or job.pause > 0  # through another worker
        yield None if lease is None or deleted or over else Work(job, lease)


@contextmanager
def _hold(folder: Path, **facts: float) -> Iterator[Lease | None]:
    """Hold the claim on a job's folder, which records `facts`; yields None if another worker holds it."""
    path = folder / "claim.json"
    drop_if_dead(path)
    lease = Lease.take(path, **facts)
    try:
        yield lease
    finally:
        if lease is not None:
            lease.release()


def publish(work: Work, evaluated: Evaluated) -> bool:
    """Write the results of a job, unless the claim was lost; returns whether they were written."""
    job, results = work.job, evaluated.results
    if not work.claim.still_mine():
        return False
    sample_files.move(evaluated.place, job.folder, results.samples.values())
    state_files.write(job.results, {**results.model_dump(exclude_unset=True), "committed": job.committed})
    return True


def unannounced(run: RunDir) -> list[Path]:
    """Files of published results without their entry in the journal, whose worker may have been killed before it."""
    entries = of_kind(read(run), "eval")
    published = [(path, state_files.view(path, Results)) for path in sorted(run.evals.glob("step-*/*/results.json"))]
    return [
        path for path, results in published if results is not None and not _is_announced(path.parent, results, entries)
    ]


def _is_announced(folder: Path, results: Results, entries: list[dict[str, Any]]) -> bool:
    """Whether these results are in one of the journal's entries, or need none since no worker published them."""
    own = (results.step, folder.name, results.committed)
    announced = ((entry["step"], entry.get("tasks"), entry.get("committed")) for entry in entries)
    return results.committed is None or own in announced


def _announce(run: RunDir, folder: Path) -> None:
    """Delete the attempts' folders, and add the published results to the journal, once. The caller holds the claim.

    Raises StorageError if the journal cannot be written; then another worker does it.
    """
    results = state_files.view(folder / "results.json", Results)
    if results is None:
        return
    drop_attempts(folder)
    if _is_announced(folder, results, of_kind(read(run), "eval")):
        return
    for subject, text in results.alarms():
        add(run, "eval-verdict", f"{subject}: {text}", step=results.step)
    results.tell_alarms()
    named = [(task, [pair for pair in row.items() if "stderr" not in pair[0]]) for task, row in results.scores.items()]
    shown = ", ".join(f"{task} {pairs[0][0]} {pairs[0][1]:.4g}" for task, pairs in named if pairs)
    add(
        run,
        "eval",
        f"{shown} in {human_time(results.seconds)}",
        step=results.step,
        scores=results.model_dump(include={"scores"})["scores"],
        documents=results.documents,
        tasks=folder.name,
        committed=results.committed,
    )
    catch_up(run)


def drop_dead_claims(run: RunDir) -> bool:
    """Remove the claims of dead workers. Returns whether workers on other hosts hold some that may be dead."""
    claims = run.evals.glob("step-*/*/claim.json")  # also those of evaluated checkpoints, which would look like work
    return None in [drop_if_dead(path) for path in claims]


def watch_once(run: RunDir, config: Config, evaluate: Evaluate) -> tuple[int, int]:
    """Evaluate every due checkpoint that no other worker holds. Returns the numbers of evaluated and failed ones.

    Raises:
        RefusedError: the tasks cannot be evaluated, whatever the checkpoint. All stay due: this is not an attempt.
        StorageError: results are published, but the journal cannot be written.
    """
    drop_dead_claims(run)
    for path in unannounced(run):
        with _hold(path.parent) as lease:
            if lease is not None:
                _announce(run, path.parent)
    journal = Journal(run)
    evaluated = failed = 0
    tried: set[Path] = set()
    try:
        while jobs := [job for job in due_jobs(run, config) if job.folder not in tried and not job.pause]:
            tried.add(jobs[0].folder)
            with claim(jobs[0]) as work:
                ok = None if work is None else _evaluate(run, work, evaluate, journal)
                evaluated, failed = evaluated + (ok is True), failed + (ok is False)
                if ok is False:
                    tried.discard(jobs[0].folder)  # tried again after a pause, until `attempts` are used up
    finally:
        journal.close()
    return evaluated, failed


def _evaluate(run: RunDir, work: Work, evaluate: Evaluate, journal: Journal) -> bool | None:
    """Evaluate a claimed job. Returns whether its results were published; None if the claim was lost."""
    job, step, section = work.job, work.job.checkpoint.step, work.job.section
    try:
        evaluated = evaluate(work)
    except RefusedError as refused:
        if all(entry["text"] != refused.cause for entry in read(run) if entry["kind"] == "eval-refused"):
            journal.write("eval-refused", refused.cause, step=step)  # every later worker would report the same
        raise
    except EvaluationError as failed:
        note = FailedAttempt(time=now(), reason=str(failed), committed=job.committed)
        state_files.write(job.folder / f"failed-{uuid.uuid4().hex[:8]}.json", note)
        count = len(job.failures)
        next_attempt = (
            f"tried again in {human_time(pause_after(section, count))}" if count < section.attempts else "given up"
        )
        text = f"attempt {count} of {section.attempts} ({next_attempt}): {failed}"
        journal.write("eval-failed", text, step=step, failures=count)
        return False
    if evaluated is None or not publish(work, evaluated):
        return None
    _announce(run, job.folder)
    return True


def start_worker(run: RunDir, config: Config) -> subprocess.Popen[bytes]:
    """Start a worker beside training, in its own session, without rank variables, with one thread and low priority."""
    make_directory(run.evals)
    return start_module(
        *("fsdp_pretrain.eval.cli", "watch", str(run.path), "--once", "--wait"),
        nice=_NICENESS,
        environment={"OMP_NUM_THREADS": "1"},
        log=run.evals / "log",
        stdin=subprocess.DEVNULL,
    )
