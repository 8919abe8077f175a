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
from typing import Any, NoReturn

from pydantic import ConfigDict, Field

from fsdp_pretrain.errors import ConfigError, UserError
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.files import RunDir, make_directory, now
from fsdp_pretrain.record.state_files import StateFile
from fsdp_pretrain.units import human_time

_TIMES_TYPICAL, _TIMES_DEADLINE = 3.0, 3.0
_LAST_WORDS = 1.0
"""Seconds for a stack to be written."""
_END_SECONDS = 10.0
"""For a process that was killed to be gone."""
_PR_SET_PDEATHSIG = 1


class Results(StateFile):
    """`results.json` of an evaluation.

    Attributes:
        step, tokens: of the checkpoint.
        committed: when that was committed; None outside a run.
        scores: by task and metric.
        documents: that were used, by task.
        seconds: that it took.
        time: when it was done.
        unigram_bits_per_byte: what a model of token frequencies scores, if that was asked for.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    step: int
    tokens: int
    committed: str | None = None
    scores: dict[str, dict[str, float]]
    documents: dict[str, int] = Field(default_factory=dict)
    seconds: float
    time: str
    unigram_bits_per_byte: float | None = None


class EvaluationError(Exception):
    """The evaluation did not give results; the message says why."""


class RefusedError(ConfigError):
    """The tasks cannot be evaluated as they are asked for, or not here, whatever the checkpoint."""


@dataclass(frozen=True)
class Limits:
    """Seconds that an evaluation may take.

    Attributes:
        deadline: then its stack is kept, and the watchdog tells of it.
        end: then it is ended.
    """

    deadline: float
    end: float


def limits(run: RunDir, tasks: str, least: float) -> Limits:
    """From what earlier evaluations of the same tasks took.

    Args:
        run: its results.
        tasks: name of the task set.
        least: `eval.deadline`, seconds.
    """
    found = [state_files.view(path, Results) for path in run.evals.glob(f"step-*/{tasks}/results.json")]
    took = [results.seconds for results in found if results is not None]
    deadline = max(least, _TIMES_TYPICAL * median(took) if took else 0.0)
    return Limits(deadline, _TIMES_DEADLINE * deadline)


def apart(work: Callable[[], dict[str, Any]], limit: Limits, stacks: Path, late: Callable[[str], None]) -> Any:
    """Do `work` in a forked child; what it returned, through JSON.

    Args:
        work: the evaluation. The caller must not have used a device.
        limit: how long it may take.
        stacks: where its stack is added at a limit.
        late: called with a text when the deadline has passed.

    Raises:
        RefusedError: it raised that.
        EvaluationError: it raised anything else, died, or took too long.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with tempfile.TemporaryFile() as dumps:
        out, into = os.pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            _work(work, into, dumps, parent)
        os.close(into)
        child = _Child(pid, out, dumps, stacks)
        try:
            said = child.wait(limit.deadline)
            if said is None:
                child.keep_stack()
                late(f"has taken {human_time(limit.deadline)} (pid {pid}); its stack is in {stacks}")
                said = child.wait(limit.end - limit.deadline)
            if said is None:
                child.keep_stack(last=True)
                raise EvaluationError(
                    f"ended after {human_time(limit.end)}: it hangs, or eval.deadline is too short for it"
                )
        finally:
            status = child.end()
    if status is None:
        raise EvaluationError("its process does not end: it waits for a file system")
    if not said:
        code = os.waitstatus_to_exitcode(status)
        raise EvaluationError(
            f"its process was ended by signal {-code}" if code < 0 else f"its process ended with {code}"
        )
    answer = json.loads(said)
    if "refused" in answer:
        raise RefusedError(**answer["refused"])
    if "failed" in answer:
        raise EvaluationError(answer["failed"])
    return answer["value"]


class _Child:
    """The process that evaluates, as the worker sees it."""

    def __init__(self, pid: int, out: int, dumps: Any, stacks: Path) -> None:
        self._pid, self._out, self._dumps, self._stacks = pid, out, dumps, stacks
        self._ended = os.pidfd_open(pid)
        self._said, self._kept = b"", 0

    def wait(self, seconds: float) -> bytes | None:
        """All that it said when it has ended; None if that takes longer."""
        until = time.monotonic() + seconds
        while ready := select.select([self._out, self._ended], [], [], max(0.0, until - time.monotonic()))[0]:
            chunk = os.read(self._out, 1 << 16) if self._out in ready else b""
            if not chunk:
                return self._said
            self._said += chunk
        return None

    def keep_stack(self, *, last: bool = False) -> None:
        """Have it write where it stands, at C level; a stopped one too if it is the last time."""
        os.kill(self._pid, signal.SIGUSR2)
        if last:
            os.kill(self._pid, signal.SIGCONT)
        until, before, size = time.monotonic() + _LAST_WORDS, self._kept, self._kept
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
        for descriptor in (self._out, self._ended):
            os.close(descriptor)
        return os.waitpid(self._pid, 0)[1] if gone else None


def _work(work: Callable[[], dict[str, Any]], into: int, dumps: Any, parent: int) -> NoReturn:
    """In the child: evaluate, answer, end."""
    faulthandler.register(signal.SIGUSR2, file=dumps, all_threads=True, chain=False)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # it never outlives its worker
    if os.getppid() != parent:
        os._exit(1)
    answer: dict[str, Any]
    try:
        answer = {"value": work()}
    except KeyboardInterrupt:
        os._exit(130)
    except RefusedError as error:
        answer = {"refused": {"cause": error.cause, "effect": error.effect, "remedy": error.remedy}}
    except UserError as error:
        answer = {"failed": error.cause}
    except BaseException as error:  # anything a task or model can raise must not stop the other evaluations
        traceback.print_exc()
        answer = {"failed": f"{type(error).__name__}: {error}"}
    rest = memoryview(json.dumps(answer, default=str).encode())
    while rest:
        rest = rest[os.write(into, rest) :]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
