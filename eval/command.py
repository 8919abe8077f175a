"""`eval.command`: a shell command per due checkpoint, for evaluations elsewhere (a scheduler, another host). No torch.

The worker that holds the claim first writes down the attempt (`submission.json`). Then it starts this module as a
process of its own session, which marks the attempt as started, exclusively, and runs the command. Both survive the
worker: whoever takes the claim over finds the submission and goes on waiting for the same attempt. A new attempt begins
only after the last is known to have failed or has run out of time, and its results have another path.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from fsdp_pretrain.checkpoint.locations import stores
from fsdp_pretrain.checkpoint.store import CONFIG, directory_name
from fsdp_pretrain.child_process import start_module
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import load_compatible
from fsdp_pretrain.errors import StorageError, UserError
from fsdp_pretrain.record import lease, state_files
from fsdp_pretrain.record.files import RunDir, age, make_directory, now
from fsdp_pretrain.record.lease import this_process
from fsdp_pretrain.record.state_files import DamagedFileError, StateFile
from fsdp_pretrain.units import human_time

from .attempt import EvaluationError, EvaluationLimits, Results

if TYPE_CHECKING:
    from .jobs import Work

_SUBMISSION = "submission.json"
_POLL_SECONDS = 1.0
_SETTLE_SECONDS = 30.0
"""Results that are no JSON may be a copy in progress; after this time without a change they are damaged."""
_END_SECONDS = 10.0
"""For a command to end by itself after SIGTERM."""
_SHARD_BYTES = 5 * 10**9
_TAIL_LINES, _TAIL_CHARACTERS = 5, 600


class Submission(StateFile):
    """`submission.json`: the attempt that stands, from before its command is started until it is concluded.

    Attributes:
        attempt: its id.
        committed: when the checkpoint was committed, see `jobs.Job`.
        command, checkpoint, step, tasks, run: what is run, and what its environment says.
        exported: whether `checkpoint` is a folder in `eval.export`, to be made before and removed afterwards.
        deadline, end: its limits in seconds from the start of the command.
        late: whether the journal says that the deadline has passed.
        time: when this was written.
    """

    attempt: str
    committed: str
    command: str
    checkpoint: str
    step: int
    tasks: list[str]
    run: str
    exported: bool = False
    deadline: float
    end: float
    late: bool = False
    time: str


class Ended(StateFile):
    """`ended.json` of an attempt: how its command ended."""

    code: int
    time: str


def is_submitted(folder: Path) -> bool:
    """Whether an attempt stands in a job's folder."""
    return (folder / _SUBMISSION).exists()


def evaluate_elsewhere(
    run: RunDir, config: Config, work: Work, limit: EvaluationLimits, late: Callable[[str], None]
) -> Results | None:
    """Run `eval.command` for a claimed job, or go on waiting for the attempt that stands; None if the claim was lost.

    The submission stands until `conclude`, which belongs after the publication.

    Args:
        limit: of a new attempt.
        late: called with a text when the deadline has passed.

    Raises:
        EvaluationError: the attempt failed; its command was ended, and nothing of it stands any more.
    """
    folder = work.job.folder
    submission = _standing(work) or _submit(run, config, work, limit)
    if submission is None:
        return None
    attempt = _Attempt(folder, submission)
    try:
        results = attempt.wait(work.claim.still_mine, late)
    except EvaluationError:
        if not work.claim.still_mine():  # another worker judges the attempt now
            return None
        attempt.end()
        conclude(folder, submission.committed)
        raise
    if results is None and not is_submitted(folder):  # the folder was moved aside by a rollback
        _remove_export(submission)
    return results


def conclude(folder: Path, committed: str | None) -> None:
    """Forget the attempt that stands in a job's folder for the checkpoint of that commit time, and its export."""
    submission = state_files.view(folder / _SUBMISSION, Submission)
    if submission is not None and submission.committed == committed:
        _remove_export(submission)
        (folder / _SUBMISSION).unlink(missing_ok=True)


def _standing(work: Work) -> Submission | None:
    """The attempt that stands, if it is of this very checkpoint; that of an abandoned one is ended."""
    folder = work.job.folder
    submission = state_files.view(folder / _SUBMISSION, Submission)
    if submission is None:
        (folder / _SUBMISSION).unlink(missing_ok=True)  # it is damaged
    elif submission.committed != work.job.committed:
        _Attempt(folder, submission).end()
        conclude(folder, submission.committed)
        submission = None
    return submission


def _submit(run: RunDir, config: Config, work: Work, limit: EvaluationLimits) -> Submission | None:
    """Write down a new attempt. Of workers that all believe to hold the claim, one does."""
    job, attempt = work.job, uuid.uuid4().hex[:8]
    path, export = job.checkpoint.path, config.eval.export
    if export is not None:
        name = re.sub(r"[^\w.-]", "_", config.run.name)
        path = export / f"{name}-{directory_name(job.checkpoint.step)}-{attempt}"
    assert config.eval.command is not None
    submission = Submission(
        attempt=attempt,
        committed=job.committed,
        command=config.eval.command,
        checkpoint=str(path.absolute()),
        step=job.checkpoint.step,
        tasks=config.eval.tasks,
        run=str(run.path.absolute()),
        exported=export is not None,
        deadline=limit.deadline,
        end=limit.end,
        time=now(),
    )
    with contextlib.suppress(FileExistsError):
        state_files.create(job.folder / _SUBMISSION, submission)
    return _standing(work) if work.claim.still_mine() else None


class _Attempt:
    """An attempt as its worker sees it."""

    def __init__(self, folder: Path, submission: Submission) -> None:
        self._folder, self._submission = folder, submission
        self._place = attempt_folder(folder, submission.attempt)
        self._runner: subprocess.Popen[bytes] | None = None

    def wait(self, holds: Callable[[], bool], late: Callable[[str], None]) -> Results | None:
        """Start the command unless it was started, and wait for its results; None once not `holds()`."""
        while holds():
            problem = self._problem()  # before the results: they may be written in between
            if (results := self._results()) is not None:
                return results
            if problem:
                raise EvaluationError(problem)
            if self._runner is None and not self._started_file.exists():
                self._start()
            self._tell_if_late(late)
            self._pause()
        return None

    def end(self) -> None:
        """End the command if it runs on this host, with everything it has started."""
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
        """Export the checkpoint if asked to, and start the runner. Raises EvaluationError."""
        try:
            if self._submission.exported:
                self._export()
            make_directory(self._place)
            with (self._place / "log").open("ab") as log:
                self._runner = start_module(
                    *("eval.command", str(self._folder), self._submission.attempt),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        except UserError as error:
            raise EvaluationError(error.cause) from None
        except OSError as error:
            raise EvaluationError(f"its command cannot be started: {error}") from None

    def _export(self) -> None:
        """Write the folder, unless an earlier worker has, in the precision of an evaluation on `eval.device`."""
        import torch  # only here: it takes seconds

        from fsdp_pretrain.checkpoint.hf import DTYPES, export_checkpoint
        from fsdp_pretrain.parallel.fsdp import compute_dtype

        run, step = RunDir(Path(self._submission.run)), self._submission.step
        out = Path(self._submission.checkpoint)
        if out.exists():
            return
        config = load_compatible(stores(run).find(step).path / CONFIG)
        wanted = compute_dtype(config, torch.device(load_compatible(run.config).eval.device))
        dtype = next(name for name, dtype in DTYPES.items() if dtype is wanted)
        export_checkpoint(run, step, out, dtype=dtype, shard_bytes=_SHARD_BYTES)

    def _problem(self) -> str:
        """Why no results will come, or none in time; empty if they may."""
        runner_ended = self._runner is not None and self._runner.poll() is not None
        started = lease.read(self._started_file)
        if started is None and not self._started_file.exists():
            return f"its command cannot be started: {self._tail()}" if runner_ended else ""
        gone = started is not None and lease.is_alive(started) is False and not self._members()
        ended = state_files.view(self._place / "ended.json", Ended)
        if ended is not None and ended.code:
            how = f"was ended by signal {-ended.code}" if ended.code < 0 else f"ended with {ended.code}"
            return f"its command {how}: {self._tail()}"
        if ended is None and gone:
            return f"its command was killed: {self._tail()}"
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
        if self._submission.late or self._took() <= self._submission.deadline:
            return
        self._submission = self._submission.model_copy(update={"late": True})
        state_files.write(self._folder / _SUBMISSION, self._submission.model_dump())
        late(f"has taken {human_time(self._submission.deadline)}; the output of its command is in {self._place}/log")

    def _took(self) -> float:
        """Seconds since the command was started; 0 if it was not."""
        if not self._started_file.exists():
            return 0.0
        started = lease.read(self._started_file)
        return age(self._submission.time if started is None else started.time)

    def _pause(self) -> None:
        if self._runner is None or self._runner.poll() is not None:
            time.sleep(_POLL_SECONDS)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._runner.wait(_POLL_SECONDS)

    def _members(self) -> list[psutil.Process]:
        """The live processes of the command's session; none if it runs elsewhere."""
        started = lease.read(self._started_file)
        alive = None if started is None else lease.is_alive(started)
        if started is None or alive is None:
            return []
        found = [process for process in psutil.process_iter() if _session(process) == started.pid]
        reused = not alive and any(process.pid == started.pid for process in found)
        return [] if reused else found

    def _tail(self) -> str:
        """The last lines of the command's output."""
        try:
            text = (self._place / "log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return "; ".join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:] or "it printed nothing"


def attempt_folder(folder: Path, attempt: str) -> Path:
    """Where an attempt of a job has its files; they stay, so what comes late changes nothing."""
    return folder / f"attempt-{attempt}"


def _session(process: psutil.Process) -> int | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (psutil.Error, OSError):
        return None


def _remove_export(submission: Submission) -> None:
    if submission.exported:
        out = Path(submission.checkpoint)
        for path in (out, *out.parent.glob(f".{out.name}.writing-*")):
            shutil.rmtree(path, ignore_errors=True)


def main() -> int:
    """Run the command of the attempt that stands in a job's folder, unless that was done: `FOLDER ATTEMPT`."""
    folder, attempt = Path(sys.argv[1]), sys.argv[2]
    submission = state_files.view(folder / _SUBMISSION, Submission)
    if submission is None or submission.attempt != attempt:  # concluded before this process came so far
        return 0
    place = attempt_folder(folder, attempt)
    try:
        facts = {"token": attempt, **this_process(), "time": now(), "purpose": "a command that evaluates"}
        state_files.create(place / "started.json", facts)
    except FileExistsError:  # by another worker's runner
        return 0
    environment = {
        "EVAL_CHECKPOINT": submission.checkpoint,
        "EVAL_STEP": str(submission.step),
        "EVAL_TASKS": ",".join(submission.tasks),
        "EVAL_RESULTS": str((place / "results.json").absolute()),
        "EVAL_RUN": submission.run,
    }
    done = subprocess.run(
        ["/bin/sh", "-c", submission.command], env={**os.environ, **environment}, stdin=subprocess.DEVNULL, check=False
    )
    state_files.create(place / "ended.json", Ended(code=done.returncode, time=now()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
