"""Which checkpoints of a run are due for evaluation, and the state of each evaluation.

Workers (`eval/jobs.py`), retention, the watchdog and `status` read the same files, in `RUN/evals/step-N/TASKS/`:
`results.json`, and one `failed-ID.json` for each failed attempt. These files hold the commit time of the checkpoint, so
they do not count for another checkpoint of the same step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import xxhash

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.sections import EvalSection
from fsdp_pretrain.errors import CheckpointError
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir, seconds_of
from fsdp_pretrain.run.state_files import StateFile
from fsdp_pretrain.units import counted, human_time

from .manifest import evaluation_due
from .store import Checkpoint, Store, directory_name

_GROWTH = 4.0
"""Factor by which each pause is longer than the one before."""


class FailedAttempt(StateFile):
    """`failed-ID.json`; `committed` is when the checkpoint was committed."""

    time: str
    reason: str
    committed: str


class _Published(StateFile):
    """The part of `results.json` that is needed here, see `fsdp_pretrain.eval.results.Results`."""

    committed: str | None = None


@dataclass(frozen=True)
class Job:
    """One evaluation: a checkpoint and a task set."""

    checkpoint: Checkpoint
    folder: Path  # directory of its files
    committed: str  # when the checkpoint was committed; distinguishes it from one of the same step after a rollback
    section: EvalSection  # the configuration of the evaluation

    @property
    def results(self) -> Path:
        return self.folder / "results.json"

    @property
    def done(self) -> bool:
        """Whether there are results of this very checkpoint; damaged ones do not count."""
        results = state_files.view(self.results, _Published)
        return results is not None and results.committed == self.committed

    @property
    def failures(self) -> list[FailedAttempt]:
        """Its failed attempts, oldest first."""
        attempts = [
            state_files.view(path, FailedAttempt)
            or FailedAttempt(time="", reason="its record is damaged", committed=self.committed)
            for path in self.folder.glob("failed-*.json")
        ]
        own = (attempt for attempt in attempts if attempt.committed == self.committed)
        return sorted(own, key=lambda attempt: attempt.time)

    @property
    def given_up(self) -> bool:
        """Whether all attempts have failed."""
        return len(self.failures) >= self.section.attempts

    @property
    def pause(self) -> float:
        """Seconds until the next attempt may begin, see `pause_after`."""
        failures = self.failures
        ended = seconds_of(failures[-1].time) if failures else None
        if ended is None:
            return 0.0
        whole, waited = pause_after(self.section, len(failures)), time.time() - ended
        return whole - waited if 0 <= waited < whole else 0.0  # a time in the future is of a clock that was wrong

    def forget_failures(self) -> None:
        """Delete the failed attempts, so that the first one may begin at once. Raises OSError."""
        for path in self.folder.glob("failed-*.json"):
            path.unlink(missing_ok=True)


def pause_after(section: EvalSection, failures: int) -> float:
    """Seconds between the last of so many failed attempts and the next: `eval.retry`, times `_GROWTH` each time."""
    return section.retry.value * _GROWTH ** (failures - 1)


def task_set(tasks: list[str]) -> str:
    """Directory name of a list of tasks."""
    name = "+".join(tasks)
    return name if len(name) <= 100 else f"{name[:80]}+{xxhash.xxh3_64_hexdigest(name.encode())[:8]}"


def without_results(run: RunDir, config: Config) -> list[Job]:
    """Evaluations that are due and not done, oldest first, including those given up."""
    whole = {item.step: item for item in Store(run.checkpoints).scan() if item.problem is None}  # one per step
    jobs = []
    for checkpoint in whole.values():
        try:
            manifest = checkpoint.manifest()
        except CheckpointError:
            if checkpoint.path.exists():
                raise
            continue  # deleted by retention during this look
        if evaluation_due(config, manifest):
            folder = run.evals / directory_name(checkpoint.step) / task_set(config.eval.tasks)
            jobs.append(Job(checkpoint, folder, manifest.committed, config.eval))
    return [job for job in jobs if not job.done]


def due_jobs(run: RunDir, config: Config) -> list[Job]:
    """Evaluations that are due and neither done nor given up, oldest first, including claimed and pausing ones."""
    return [job for job in without_results(run, config) if not job.given_up]


def given_up_jobs(run: RunDir, config: Config) -> list[Job]:
    """Evaluations of which all attempts failed; oldest first."""
    return [job for job in without_results(run, config) if job.given_up]


def failed_evaluations(run: RunDir, config: Config) -> list[tuple[str, bool]]:
    """(sentence, given up) of each evaluation with failed attempts and without results, oldest first."""
    failed = []
    for job in without_results(run, config):
        failures = job.failures
        if not failures:
            continue
        step, count, reason = job.checkpoint.step, len(failures), failures[-1].reason
        ended = f"failed {counted(count, 'time')}"
        if job.given_up:
            ended = f"was given up after {counted(count, 'failed attempt')}"
        place = run.path if run.fetched is None else "RUN"
        next_attempt = f"then: fsdp-eval retry {place} {step}" if job.given_up else f"again in {human_time(job.pause)}"
        failed.append((f"the evaluation of step {step:_} {ended} ({reason}); {next_attempt}", job.given_up))
    return failed
