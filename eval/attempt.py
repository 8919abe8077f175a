"""One attempt at an evaluation: a separate process with a deadline.

The process evaluates the checkpoint itself, or becomes the shell of `eval.command`. A task is other people's code: it
may hang, or be killed for its memory, without harm to the worker. At the deadline the process saves its stack, and the
worker ends it. It also ends with its worker; then a new attempt begins. Every attempt has its own folder, so results
that come too late change nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsdp_pretrain.checkpoint.evaluations import Job
from fsdp_pretrain.checkpoint.store import Store, step_of
from fsdp_pretrain.config.resume_rules import load_recorded
from fsdp_pretrain.config.sections import EvalSection
from fsdp_pretrain.errors import CheckpointError, ConfigError, StorageError, UserError
from fsdp_pretrain.processes import collect_seldom, die_with_parent, start_module
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir, make_directory, replace_file
from fsdp_pretrain.run.lock import Lease
from fsdp_pretrain.run.state_files import DamagedFileError, StateFile
from fsdp_pretrain.units import human_time

from .results import MERGE, EvaluationError, RefusedError, Results, Verdict

_POLL_SECONDS = 1.0
_DUMP_SECONDS = 5.0
"""Time that a process has to save its stack at the deadline."""
_END_SECONDS = 10.0
"""Time that a process has to end by itself after SIGTERM."""
_TAIL_LINES, _TAIL_CHARACTERS = 5, 600


class AttemptFailure(StateFile):
    """`failure.json` of an attempt without `eval.command`."""

    reason: str = ""  # why it failed
    refused: list[str] | None = None  # cause, effect and remedy, if its tasks cannot be evaluated at all


@dataclass(frozen=True)
class Work:
    """A job that this process has claimed."""

    job: Job
    claim: Lease


@dataclass(frozen=True)
class Evaluated:
    """The results of an attempt, and its folder `place`, which has the sample files."""

    results: Results
    place: Path


def evaluate_job(run: RunDir, work: Work) -> Evaluated | None:
    """Evaluate a claimed job in a new attempt; None if the claim was lost.

    The attempt's folder stays until `drop_attempts`, to be called after the results were published.

    Raises:
        RefusedError: the tasks cannot be evaluated, whatever the checkpoint.
        EvaluationError: the attempt failed.
    """
    job = work.job
    place = job.folder / f"attempt-{uuid.uuid4().hex[:8]}"
    try:
        make_directory(place)
        process = start_module(
            "fsdp_pretrain.eval.attempt",
            *(str(path.absolute()) for path in (run.path, job.checkpoint.path, place)),
            str(os.getpid()),
            environment={name: value for name, value in os.environ.items() if name == "OMP_NUM_THREADS"},
            log=place / "log" if job.section.command is not None else None,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise EvaluationError(f"its process cannot be started: {error}") from None
    try:
        in_time = _wait(process, work)
    finally:
        _end(process)
    if in_time is None:
        return None
    try:
        return Evaluated(_results(process.returncode if in_time else None, job, place), place)
    except (EvaluationError, RefusedError):
        drop_attempts(job.folder)
        raise


def drop_attempts(folder: Path) -> None:
    """Delete the folders of the attempts at a job, except those with a stack or the output of a command."""
    for place in folder.glob("attempt-*"):
        if not any(path.exists() and path.stat().st_size for path in (place / "stack", place / "log")):
            shutil.rmtree(place, ignore_errors=True)


def _wait(process: subprocess.Popen[bytes], work: Work) -> bool | None:
    """Wait for the process. Returns whether it ended before its deadline; None if the claim was lost."""
    until = time.monotonic() + work.job.section.deadline.value + _DUMP_SECONDS
    while process.poll() is None:
        if not work.claim.still_mine():
            return None
        if time.monotonic() > until:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)
    return True if work.claim.still_mine() else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and those it has started in its process group."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + _END_SECONDS
        while time.monotonic() < until:
            process.poll()  # else it would stay in the group as a zombie
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(_END_SECONDS)


def _results(code: int | None, job: Job, place: Path) -> Results:
    """The results of an attempt that ended with this exit code (None: it was ended at its deadline).

    Raises:
        RefusedError: the tasks cannot be evaluated, whatever the checkpoint.
        EvaluationError: there are no results, or they are damaged, or those of another job.
    """
    try:
        results = state_files.read(place / "results.json", Results)
    except (StorageError, DamagedFileError) as error:
        raise EvaluationError(error.cause) from None
    if results is None:
        raise _failure(code, job, place)
    if results.step != job.checkpoint.step:
        raise EvaluationError(f"its results are of step {results.step}, not of {job.checkpoint.step}")
    if results.tasks != job.folder.name:
        raise EvaluationError(f"its results are of the tasks {results.tasks!r}, not of {job.folder.name!r}")
    return results


def _failure(code: int | None, job: Job, place: Path) -> EvaluationError | RefusedError:
    """Why an attempt has no results."""
    failure = state_files.view(place / "failure.json", AttemptFailure)
    if failure is not None and failure.refused is not None:
        return RefusedError(*failure.refused)
    if failure is not None:
        return EvaluationError(failure.reason)
    if code is None:
        took = human_time(job.section.deadline.value)
        where = f"its stack is in {place}" if job.section.command is None else f"its output is in {place}"
        return EvaluationError(f"no results after {took}: it hangs, or eval.deadline is too short for it; {where}")
    how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}" if code else "left no results"
    if job.section.command is None:
        return EvaluationError(f"its process {how}")
    text = (place / "log").read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    tail = "; ".join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:] or "it printed nothing"
    return EvaluationError(f"its command {how}: {tail}")


# ---------------------------------------------------------------- in the attempt's process


def main() -> int:
    """Evaluate a checkpoint as configured in its run, into a folder: `RUN CHECKPOINT PLACE WORKER_PID`."""
    run, path, place = RunDir(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    die_with_parent(int(sys.argv[4]))
    collect_seldom()
    section = load_recorded(run.config).eval
    if section.command is not None:
        facts = {
            "EVAL_CHECKPOINT": str(path),
            "EVAL_STEP": str(step_of(path.name)),
            "EVAL_TASKS": ",".join(section.tasks),
            "EVAL_INCLUDE": "\n".join(map(str, section.include)),
            "EVAL_RESULTS": str(place / "results.json"),
            "EVAL_RUN": str(run.path),
        }
        os.execve("/bin/sh", ["sh", "-c", section.command], {**os.environ, **facts})
    failure = guarded(lambda: _evaluate(path, section, place), place, section.deadline.value)
    if failure is not None:
        state_files.write(place / "failure.json", failure)
    return 0 if failure is None else 1


def _evaluate(path: Path, section: EvalSection, place: Path) -> Results:
    """Evaluate a checkpoint in this process. Raises UserError."""
    from .checkpoints import open_checkpoint, open_merge
    from .evaluation import evaluate  # both import torch

    checkpoint = Store(path.parent).find(step_of(path.name) or 0)
    results = evaluate(open_checkpoint(checkpoint), section, out=place / "results.json")
    if section.merge is None:
        return results
    try:
        merged = open_merge(checkpoint, section.merge)
        return results if merged is None else results.beside(evaluate(merged, section))
    except RefusedError:
        raise
    except (CheckpointError, ConfigError) as error:  # of a parent; the checkpoint itself has its scores
        verdict = Verdict(probe=MERGE, ok=False, text=f"its parents cannot be merged: {error.cause}")
        return results.model_copy(update={"verdicts": [*results.verdicts, verdict]})


def guarded(work: Callable[[], Results], place: Path, deadline: float) -> AttemptFailure | None:
    """Call `work` and write its results into a folder; returns why there are none, or None. Its stack is saved at the
    deadline."""
    with (place / "stack").open("w") as stack:
        faulthandler.dump_traceback_later(deadline, file=stack)
        try:
            replace_file(place / "results.json", work().to_json() + "\n")
            return None
        except RefusedError as error:
            return AttemptFailure(refused=[error.cause, error.effect, error.remedy])
        except UserError as error:
            return AttemptFailure(reason=error.cause)
        except BaseException as error:  # whatever a task or model can raise
            traceback.print_exc()
            return AttemptFailure(reason=f"{type(error).__name__}: {error}")
        finally:
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.exit(main())
