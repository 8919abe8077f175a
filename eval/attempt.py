"""One try at an evaluation: in a process of its own, with a deadline. No torch here.

Tasks are other people's code: they wait for a network that is not there, or for each other. The worker waits for a
child. At the first limit its stack is kept, at the second it is ended, and the worker goes on with the next try.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any, NoReturn

from pydantic import ConfigDict, Field

from fsdp_pretrain.errors import ConfigError, UserError
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.files import RunDir, make_directory, now
from fsdp_pretrain.record.state_files import StateFile
from fsdp_pretrain.units import human_time

_TIMES_TYPICAL, _TIMES_DEADLINE = 3.0, 3.0
_STACK_SECONDS, _LAST_STACK_SECONDS = 1.0, 5.0
"""For a stack to be written; the last one may be that of a process that has just been continued."""
_END_SECONDS = 10.0
"""For a process that was killed to be gone."""
_PR_SET_PDEATHSIG = 1


class Results(StateFile):
    """`results.json` of an evaluation.

    Attributes:
        step, tokens, checkpoint: what was evaluated.
        committed: when that was committed; None outside a run.
        scores, documents: by task: metrics, and how many documents were used.
        tasks, limit: the task set, and documents per task at most.
        versions, lm_eval: of the tasks, and of lm-eval.
        seconds, time: that it took, and when it was done.
        unigram_bits_per_byte: what a model of token frequencies scores, if that was asked for.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    step: int
    tokens: int
    checkpoint: str = ""
    committed: str | None = None
    tasks: str = ""
    scores: dict[str, dict[str, float]]
    documents: dict[str, int] = Field(default_factory=dict)
    versions: dict[str, Any] = Field(default_factory=dict)
    lm_eval: str = ""
    limit: int | None = None
    seconds: float
    time: str
    unigram_bits_per_byte: float | None = None


class EvaluationError(Exception):
    """The evaluation did not give results; the message says why."""


class RefusedError(ConfigError):
    """The tasks cannot be evaluated as they are asked for, or not here, whatever the checkpoint."""


@dataclass(frozen=True)
class EvaluationLimits:
    """Seconds after which the stack of an evaluation is kept and the watchdog raises an alarm, and it is ended."""

    deadline: float
    end: float


def limits(run: RunDir, tasks: str, least: float) -> EvaluationLimits:
    """From what earlier evaluations of the same task set took; `least` is `eval.deadline` in seconds."""
    found = [state_files.view(path, Results) for path in run.evals.glob(f"step-*/{tasks}/results.json")]
    took = [results.seconds for results in found if results is not None]
    deadline = max(least, _TIMES_TYPICAL * median(took) if took else 0.0)
    return EvaluationLimits(deadline, _TIMES_DEADLINE * deadline)


def apart(work: Callable[[], Results], limit: EvaluationLimits, stacks: Path, late: Callable[[str], None]) -> Results:
    """Do `work` in a forked child; the caller must not have used a device.

    Args:
        stacks: where its stack is added at a limit.
        late: called with a text when the deadline has passed.

    Raises:
        RefusedError: it raised that.
        EvaluationError: it raised anything else, died, or took too long.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with tempfile.TemporaryFile() as dumps, open(os.memfd_create("answer"), "w+b") as answers:  # noqa: PTH123
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            _work(work, answers, dumps, parent)
        child = _Child(pid, dumps, stacks)
        try:
            if not child.ends_within(limit.deadline):
                child.keep_stack()
                late(f"has taken {human_time(limit.deadline)} (pid {pid}); its stack is in {stacks}")
                if not child.ends_within(limit.end - limit.deadline):
                    child.keep_stack(last=True)
                    took = human_time(limit.end)
                    raise EvaluationError(f"ended after {took}: it hangs, or eval.deadline is too short for it")
        finally:
            status = child.end()
        answers.seek(0)
        output = answers.read()
    if status is None:
        raise EvaluationError("its process does not end: it waits for a file system")
    if not output:
        code = os.waitstatus_to_exitcode(status)
        raise EvaluationError(
            f"its process was ended by signal {-code}" if code < 0 else f"its process ended with {code}"
        )
    answer = json.loads(output)
    if "refused" in answer:
        raise RefusedError(**answer["refused"])
    if "failed" in answer:
        raise EvaluationError(answer["failed"])
    return Results.model_validate(answer["value"])


class _Child:
    """The process that evaluates, as the worker sees it."""

    def __init__(self, pid: int, dumps: IO[bytes], stacks: Path) -> None:
        self._pid, self._dumps, self._stacks = pid, dumps, stacks
        self._ended, self._kept = os.pidfd_open(pid), 0

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end, at most this long."""
        return bool(select.select([self._ended], [], [], seconds)[0])

    def keep_stack(self, *, last: bool = False) -> None:
        """Have it write where it stands, at C level; a stopped one too if it is the last time."""
        os.kill(self._pid, signal.SIGUSR2)
        if last:
            os.kill(self._pid, signal.SIGCONT)
        until, before, size = (
            time.monotonic() + (_LAST_STACK_SECONDS if last else _STACK_SECONDS),
            self._kept,
            self._kept,
        )
        while time.monotonic() < until and (size == self._kept or size != before):
            time.sleep(0.05)
            before, size = size, os.fstat(self._dumps.fileno()).st_size
        text = os.pread(self._dumps.fileno(), size - self._kept, self._kept).decode(errors="replace")
        self._kept = size
        with suppress(OSError):
            make_directory(self._stacks.parent)
            with self._stacks.open("a", encoding="utf-8") as file:
                file.write(f"# {now()} pid {self._pid}\n{text or 'no answer: the process is stopped'}\n")

    def end(self) -> int | None:
        """It has ended, or is ended; its wait status, None if it waits for a file system in the kernel."""
        os.kill(self._pid, signal.SIGKILL)
        gone = select.select([self._ended], [], [], _END_SECONDS)[0]
        os.close(self._ended)
        return os.waitpid(self._pid, 0)[1] if gone else None


def _work(work: Callable[[], Results], answers: IO[bytes], dumps: IO[bytes], parent: int) -> NoReturn:
    """In the child: evaluate, answer, end."""
    faulthandler.register(signal.SIGUSR2, file=dumps, all_threads=True, chain=False)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # it never outlives its worker
    if os.getppid() != parent:
        os._exit(1)
    answer: dict[str, Any]
    try:
        answer = {"value": work().model_dump(exclude_unset=True)}
    except KeyboardInterrupt:
        os._exit(130)
    except RefusedError as error:
        answer = {"refused": {"cause": error.cause, "effect": error.effect, "remedy": error.remedy}}
    except UserError as error:
        answer = {"failed": error.cause}
    except BaseException as error:  # anything a task or model can raise must not stop the other evaluations
        traceback.print_exc()
        answer = {"failed": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(answer, default=str).encode())
    for stream in (answers, sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
