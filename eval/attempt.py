"""One attempt at an evaluation: a process of its own, with a deadline. No torch.

The process evaluates the checkpoint itself, or runs `eval.command`, which may submit it elsewhere. A task is a program
of other people: it may hang, or be killed for its memory, and the worker goes on. At the deadline the process saves its
stack, after three times as long the worker kills it.

The worker that holds the claim first writes the attempt down (`submission.json`); the process marks it as started,
exclusively. A command survives its worker: whoever takes the claim over finds the submission and goes on waiting for
the same attempt. A new one begins only after the last is known to have failed or has run out of time, and its results
have another path. An evaluation in the process itself ends with its worker, and begins again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from fsdp_pretrain.checkpoint.evaluations import Job
from fsdp_pretrain.checkpoint.store import Store, step_of
from fsdp_pretrain.child_process import die_with_parent, start_module
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import load_compatible
from fsdp_pretrain.errors import StorageError, UserError
from fsdp_pretrain.record import lease, state_files
from fsdp_pretrain.record.files import RunDir, age, make_directory, now, replace_file
from fsdp_pretrain.record.lease import Lease, this_process
from fsdp_pretrain.record.state_files import DamagedFileError, StateFile
from fsdp_pretrain.units import human_time

from .results import EvaluationError, RefusedError, Results

_SUBMISSION = "submission.json"
_TIMES_TYPICAL, _TIMES_DEADLINE = 3.0, 3.0
_POLL_SECONDS = 1.0
_SETTLE_SECONDS = 30.0
"""Results that are no JSON may be a copy in progress; after this time without a change they are damaged."""
_END_SECONDS = 10.0
"""For a process to end by itself after SIGTERM."""
_TAIL_LINES, _TAIL_CHARACTERS = 5, 600


@dataclass(frozen=True)
class EvaluationLimits:
    """Seconds until an evaluation's stack is saved and the watchdog raises an alarm, and until it is killed."""

    deadline: float
    end: float


def limits(run: RunDir, tasks: str, least: float) -> EvaluationLimits:
    """Limits from the durations of earlier evaluations of the task set; `least` is `eval.deadline` in seconds."""
    found = [state_files.view(path, Results) for path in run.evals.glob(f"step-*/{tasks}/results.json")]
    took = [results.seconds for results in found if results is not None]
    deadline = max(least, _TIMES_TYPICAL * median(took) if took else 0.0)
    return EvaluationLimits(deadline, _TIMES_DEADLINE * deadline)


class Submission(StateFile):
    """`submission.json`: the attempt that stands, from before its process is started until it is concluded.

    Attributes:
        attempt: its id.
        committed: when the checkpoint was committed, see `Job`.
        command: shell command that evaluates; None: the process evaluates itself, on `device`.
        checkpoint, step, tasks, run: what is evaluated; a command finds them in its environment.
        deadline, end: its limits in seconds from the start of the process.
        time: when this was written.
    """

    attempt: str
    committed: str
    command: str | None
    device: str | None = None
    checkpoint: str
    step: int
    tasks: list[str]
    run: str
    deadline: float
    end: float
    time: str


class Ended(StateFile):
    """`ended.json` of an attempt: how its process ended.

    Attributes:
        code: exit code of the command, negative for a signal; of an evaluation in the process, 0 or 1.
        reason: of an evaluation in the process that failed.
        refused: cause, effect and remedy, if its tasks cannot be evaluated at all.
    """

    code: int
    reason: str = ""
    refused: list[str] | None = None
    time: str


@dataclass(frozen=True)
class Work:
    """A job that this process has claimed."""

    job: Job
    claim: Lease


@dataclass(frozen=True)
class Evaluated:
    """Results, and the folder of their sample files."""

    results: Results
    place: Path


def is_submitted(folder: Path) -> bool:
    """Whether an attempt stands in a job's folder."""
    return (folder / _SUBMISSION).exists()


def attempt_folder(folder: Path, attempt: str) -> Path:
    """Where an attempt of a job has its files. Those of a command stay, so what comes late changes nothing."""
    return folder / f"attempt-{attempt}"


def evaluate_job(
    run: RunDir,
    config: Config,
    work: Work,
    limit: EvaluationLimits,
    late: Callable[[str], None],
    *,
    device: str | None = None,
) -> Evaluated | None:
    """Evaluate a claimed job, or go on waiting for the attempt that stands; None if the claim was lost.

    The submission stands until `conclude`, which belongs after the publication.

    Args:
        limit: of a new attempt.
        late: called with a text when the deadline has passed.
        device: of an evaluation in the process; None: `eval.device`.

    Raises:
        RefusedError: the tasks cannot be evaluated, whatever the checkpoint.
        EvaluationError: the attempt failed; its process was ended, and nothing of it stands any more.
    """
    folder = work.job.folder
    submission = _standing(work) or _submit(run, config, work, limit, device)
    if submission is None:
        return None
    attempt = _Attempt(folder, submission)
    try:
        found = attempt.wait(work.claim.still_mine, late)
    except (EvaluationError, RefusedError):
        if not work.claim.still_mine():  # another worker judges the attempt now
            return None
        attempt.end()
        conclude(folder, submission.committed)
        raise
    if found is None and submission.command is None:
        attempt.end()
    return found


def conclude(folder: Path, committed: str | None) -> None:
    """Forget the attempt that stands in a job's folder for the checkpoint of that commit time."""
    submission = state_files.view(folder / _SUBMISSION, Submission)
    if submission is not None and submission.committed == committed:
        place = attempt_folder(folder, submission.attempt)
        if submission.command is None and not _has_stack(place):
            shutil.rmtree(place, ignore_errors=True)
        (folder / _SUBMISSION).unlink(missing_ok=True)


def _has_stack(place: Path) -> bool:
    stack = place / "stack"
    return stack.exists() and stack.stat().st_size > 0


def _standing(work: Work) -> Submission | None:
    """The attempt that stands, if it is a command's for this very checkpoint; any other is ended."""
    folder = work.job.folder
    submission = state_files.view(folder / _SUBMISSION, Submission)
    if submission is None:
        (folder / _SUBMISSION).unlink(missing_ok=True)  # it is damaged
    elif submission.committed != work.job.committed or submission.command is None:
        _Attempt(folder, submission).end()
        conclude(folder, submission.committed)
        submission = None
    return submission


def _submit(run: RunDir, config: Config, work: Work, limit: EvaluationLimits, device: str | None) -> Submission | None:
    """Write down a new attempt. Of workers that all believe to hold the claim, one does."""
    job = work.job
    submission = Submission(
        attempt=uuid.uuid4().hex[:8],
        committed=job.committed,
        command=config.eval.command,
        device=device,
        checkpoint=str(job.checkpoint.path.absolute()),
        step=job.checkpoint.step,
        tasks=config.eval.tasks,
        run=str(run.path.absolute()),
        deadline=limit.deadline,
        end=limit.end,
        time=now(),
    )
    with contextlib.suppress(FileExistsError):
        state_files.create(job.folder / _SUBMISSION, submission)
    return state_files.view(job.folder / _SUBMISSION, Submission) if work.claim.still_mine() else None


class _Attempt:
    """An attempt as its worker sees it."""

    def __init__(self, folder: Path, submission: Submission) -> None:
        self._folder, self._submission = folder, submission
        self._place = attempt_folder(folder, submission.attempt)
        self._process: subprocess.Popen[bytes] | None = None
        self._late = False
        self._what = "its process" if submission.command is None else "its command"

    def wait(self, holds: Callable[[], bool], late: Callable[[str], None]) -> Evaluated | None:
        """Start the process unless it was started, and wait for its results; None once not `holds()`."""
        while holds():
            problem = self._problem()  # before the results: they may be written in between
            if (results := self._results()) is not None:
                return Evaluated(results, self._place)
            if problem:
                raise EvaluationError(problem)
            if self._process is None and not self._started_file.exists():
                self._start()
            self._tell_if_late(late)
            self._pause()
        return None

    def end(self) -> None:
        """End the process if it runs on this host, with everything it has started."""
        members = self._members()
        for signal in (psutil.Process.terminate, psutil.Process.kill):
            for process in members:
                with contextlib.suppress(psutil.Error):
                    signal(process)
            _, members = psutil.wait_procs(members, timeout=_END_SECONDS)

    @property
    def _started_file(self) -> Path:
        return self._place / "started.json"

    def _start(self) -> None:
        """Start the process. An evaluation in it writes to the worker's outputs. Raises EvaluationError."""
        output = None if self._submission.command is None else subprocess.DEVNULL
        try:
            make_directory(self._place)
            self._process = start_module(
                *("eval.attempt", str(self._folder), self._submission.attempt, str(os.getpid())),
                environment={name: value for name, value in os.environ.items() if name == "OMP_NUM_THREADS"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        except OSError as error:
            raise EvaluationError(f"{self._what} cannot be started: {error}") from None

    def _problem(self) -> str:
        """Why no results will come, or none in time; empty if they may. Raises RefusedError."""
        code = None if self._process is None else self._process.poll()
        started = lease.read(self._started_file)
        if started is None and not self._started_file.exists():
            return "" if code is None else f"{self._what} cannot be started{self._tail()}"
        gone = started is not None and lease.is_alive(started) is False and not self._members()
        ended = state_files.view(self._place / "ended.json", Ended)
        if ended is not None and ended.refused is not None:
            raise RefusedError(*ended.refused)
        if ended is not None and ended.code:
            how = f"was ended by signal {-ended.code}" if ended.code < 0 else f"ended with {ended.code}"
            return ended.reason or f"{self._what} {how}{self._tail()}"
        if ended is None and gone:
            return f"{self._what} was killed{self._tail()}"
        if self._took() > self._submission.end:
            took = human_time(self._submission.end)
            return f"given up after {took} without results: it hangs, or eval.deadline is too short for it"
        return ""

    def _results(self) -> Results | None:
        """The results, if they are there. Raises EvaluationError if they are damaged, or of something else."""
        path = self._place / "results.json"
        try:
            results = state_files.read(path, Results)
        except StorageError:
            return None
        except DamagedFileError as error:
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _SETTLE_SECONDS:
                    raise EvaluationError(error.cause) from None
            return None
        if results is None:
            return None
        if results.step != self._submission.step:
            raise EvaluationError(f"its results are of step {results.step}, not of {self._submission.step}")
        if results.tasks != self._folder.name:
            raise EvaluationError(f"its results are of the tasks {results.tasks!r}, not of {self._folder.name!r}")
        return results

    def _tell_if_late(self, late: Callable[[str], None]) -> None:
        if self._late or self._took() <= self._submission.deadline:
            return
        self._late = True
        where = "its stack is in stack" if self._submission.command is None else "the output of its command is in log"
        late(f"has taken {human_time(self._submission.deadline)}; {where} of {self._place}")

    def _took(self) -> float:
        """Seconds since the process was started; 0 if it was not."""
        if not self._started_file.exists():
            return 0.0
        started = lease.read(self._started_file)
        return age(self._submission.time if started is None else started.time)

    def _pause(self) -> None:
        if self._process is None or self._process.poll() is not None:
            time.sleep(_POLL_SECONDS)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_POLL_SECONDS)

    def _members(self) -> list[psutil.Process]:
        """The live processes of the process's session; none if it runs elsewhere."""
        started = lease.read(self._started_file)
        alive = None if started is None else lease.is_alive(started)
        if started is None or alive is None:
            return []
        found = [process for process in psutil.process_iter() if _session(process) == started.pid]
        reused = not alive and any(process.pid == started.pid for process in found)
        return [] if reused else found

    def _tail(self) -> str:
        """The last lines of a command's output, for the end of a sentence."""
        if self._submission.command is None:
            return ""
        try:
            text = (self._place / "log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return ": " + ("; ".join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:] or "it printed nothing")


def _session(process: psutil.Process) -> int | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (psutil.Error, OSError):
        return None


# ---------------------------------------------------------------- in the process


def main() -> int:
    """Evaluate for the attempt that stands in a job's folder, unless that was done: `FOLDER ATTEMPT WORKER`."""
    folder, attempt, worker = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    submission = state_files.view(folder / _SUBMISSION, Submission)
    if submission is None or submission.attempt != attempt:  # concluded before this process came so far
        return 0
    place = attempt_folder(folder, attempt)
    try:
        facts = {"token": attempt, **this_process(), "time": now(), "purpose": "an evaluation"}
        state_files.create(place / "started.json", facts)
    except FileExistsError:  # by another worker's process
        return 0
    if submission.command is None:
        die_with_parent(worker)
        ended = guarded(lambda: _evaluate(submission, place), place, submission.deadline)
    else:
        ended = Ended(code=_run_command(submission.command, submission, place), time=now())
    state_files.create(place / "ended.json", ended)
    return 0


def _run_command(command: str, submission: Submission, place: Path) -> int:
    """The exit code of `eval.command`."""
    environment = {
        "EVAL_CHECKPOINT": submission.checkpoint,
        "EVAL_STEP": str(submission.step),
        "EVAL_TASKS": ",".join(submission.tasks),
        "EVAL_RESULTS": str((place / "results.json").absolute()),
        "EVAL_RUN": submission.run,
    }
    with (place / "log").open("ab") as log:
        line, told = ["/bin/sh", "-c", command], {**os.environ, **environment}
        done = subprocess.run(line, env=told, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
    return done.returncode


def _evaluate(submission: Submission, place: Path) -> Results:
    """Evaluate the checkpoint here, as the run's configuration says. Raises UserError."""
    from .checkpoints import open_checkpoint
    from .evaluation import evaluate  # both import torch

    section = load_compatible(RunDir(Path(submission.run)).config).eval
    if submission.device is not None:
        section = section.model_copy(update={"device": submission.device})
    path = Path(submission.checkpoint)
    checkpoint = Store(path.parent).find(step_of(path.name) or 0)
    return evaluate(open_checkpoint(checkpoint), section, out=place / "results.json")


def guarded(work: Callable[[], Results], place: Path, deadline: float) -> Ended:
    """Write the results of `work` into a folder, or say why there are none. Its stack is saved at each deadline."""
    with (place / "stack").open("w") as stack:
        faulthandler.dump_traceback_later(deadline, repeat=True, file=stack)
        try:
            replace_file(place / "results.json", work().to_json() + "\n")
            return Ended(code=0, time=now())
        except RefusedError as error:
            return Ended(code=1, refused=[error.cause, error.effect, error.remedy], time=now())
        except UserError as error:
            return Ended(code=1, reason=error.cause, time=now())
        except BaseException as error:  # whatever a task or model can raise
            traceback.print_exc()
            return Ended(code=1, reason=f"{type(error).__name__}: {error}", time=now())
        finally:
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.exit(main())
