"""One attempt at an evaluation, in its own process and with a deadline. No torch here.

Tasks are third-party code: they may wait for a network that is not there, or deadlock. The worker waits for a child. At
the first limit it saves the child's stack, at the second it kills it and goes on to the next attempt.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import math
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from fsdp_pretrain.errors import ConfigError, UserError
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.files import RunDir, make_directory, now
from fsdp_pretrain.record.state_files import StateFile
from fsdp_pretrain.units import human_time

_TIMES_TYPICAL, _TIMES_DEADLINE = 3.0, 3.0
_STACK_SECONDS, _LAST_STACK_SECONDS = 1.0, 5.0
"""For a stack to be written; the last one may be that of a process that has just been continued."""
_END_SECONDS = 10.0
"""For a killed process to end."""
_PR_SET_PDEATHSIG = 1
Z95 = 1.959963984540054
"""Standard errors on either side of the mean of a normal distribution that hold 95% of it."""


class Verdict(BaseModel):
    """What a probe concludes, beside its scores.

    Attributes:
        probe: its name.
        ok: False raises an alarm; None: not to be decided yet, or not for this model.
        text: one sentence with its numbers.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    probe: str
    ok: bool | None
    text: str


class ConfidenceInterval(BaseModel):
    """A 95% confidence interval.

    Attributes:
        method: `normal`: value ± 1.96 standard errors; `log`: the same of the logarithm; `fieller`: of a ratio; of
            shares `wilson`, and of their differences `agresti-min` (paired) or `newcombe`: see `eval.intervals`.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    low: float
    high: float
    method: Literal["normal", "log", "fieller", "wilson", "agresti-min", "newcombe"] = "normal"

    @classmethod
    def normal(cls, value: float, stderr: float) -> ConfidenceInterval:
        return cls(low=value - Z95 * stderr, high=value + Z95 * stderr, method="normal")

    def __str__(self) -> str:
        return f"[{self.low:.4f}, {self.high:.4f}]" + (f" ({self.method})" if self.method != "normal" else "")


Score = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None),
]
"""A number; NaN if the model gave none, which JSON writes as null."""


class Results(StateFile):
    """`results.json` of an evaluation.

    Attributes:
        step, tokens, checkpoint: what was evaluated.
        committed: when the checkpoint was committed; None outside a run.
        scores, documents: by task: metrics, and number of documents used.
        tasks, limit: the task set, and maximum documents per task (below 1: the share of them).
        intervals: by task and metric, where the values of its documents are known to make up the score; for other
            scores, take `ConfidenceInterval.normal` of their standard error.
        num_fewshot: by task.
        gen_kwargs: options of generating answers, by task that generates.
        samples: by task, name of the file beside this one with a line per document, see `eval.sample_files`.
        higher_is_better: by task and metric, where known.
        verdicts: of the probes among the tasks.
        versions, lm_eval: of the tasks, and of lm-eval.
        seconds, time: duration, and time of completion.
        unigram_bits_per_byte: score of a model of token frequencies, if requested.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    step: int
    tokens: int
    checkpoint: str = ""
    committed: str | None = None
    tasks: str = ""
    scores: dict[str, dict[str, Score]]
    documents: dict[str, int] = Field(default_factory=dict)
    higher_is_better: dict[str, dict[str, bool]] = Field(default_factory=dict)
    verdicts: list[Verdict] = Field(default_factory=list)
    intervals: dict[str, dict[str, ConfidenceInterval]] = Field(default_factory=dict)
    num_fewshot: dict[str, int] = Field(default_factory=dict)
    gen_kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    samples: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, Any] = Field(default_factory=dict)
    lm_eval: str = ""
    limit: int | float | None = None
    seconds: float
    time: str
    unigram_bits_per_byte: float | None = None

    def metrics(self) -> Iterator[tuple[str, str, float, float | None, ConfidenceInterval | None]]:
        """(task, metric, score, standard error, interval) of all scores; None where unknown."""
        for task, row in self.scores.items():
            for metric, value in row.items():
                if metric.endswith("_stderr"):
                    continue
                stderr = row.get(f"{metric}_stderr")
                interval = self.intervals.get(task, {}).get(metric)
                if interval is None and stderr is not None:
                    interval = ConfidenceInterval.normal(value, stderr)
                yield task, metric, value, stderr, interval

    def alarms(self) -> Iterator[tuple[str, str]]:
        """(probe or task, sentence) of what a person must know: bad verdicts, and scores that are no finite number."""
        yield from ((verdict.probe, verdict.text) for verdict in self.verdicts if verdict.ok is False)
        for task, metric, value, *_ in self.metrics():
            if not math.isfinite(value):
                yield task, f"{metric} is no finite number"


class EvaluationError(Exception):
    """The evaluation gave no results; the message says why."""


class RefusedError(ConfigError):
    """The tasks cannot be evaluated as configured, or not here, whatever the checkpoint."""


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


def run_in_child(
    work: Callable[[], Results], limit: EvaluationLimits, stacks: Path, late: Callable[[str], None]
) -> Results:
    """Run `work` in a forked child; the caller must not have used a device.

    Args:
        stacks: file to which its stack is appended at a limit.
        late: called with a text when the deadline has passed.

    Raises:
        RefusedError: raised by `work`.
        EvaluationError: `work` raised anything else, died, or took too long.
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
        raise EvaluationError("its process cannot be killed: it is blocked in the kernel, as on a file system")
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
    """The evaluating process, as seen by the worker."""

    def __init__(self, pid: int, dumps: IO[bytes], stacks: Path) -> None:
        self._pid, self._dumps, self._stacks = pid, dumps, stacks
        self._ended, self._kept = os.pidfd_open(pid), 0

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end, at most this long; whether it ended."""
        return bool(select.select([self._ended], [], [], seconds)[0])

    def keep_stack(self, *, last: bool = False) -> None:
        """Have faulthandler write its stack; if `last`, also that of a stopped process, by continuing it."""
        os.kill(self._pid, signal.SIGUSR2)
        if last:
            os.kill(self._pid, signal.SIGCONT)
        until = time.monotonic() + (_LAST_STACK_SECONDS if last else _STACK_SECONDS)
        before = size = self._kept
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
        """Kill it if it still runs; its wait status, None if it is stuck in the kernel, waiting for a file system."""
        os.kill(self._pid, signal.SIGKILL)
        gone = select.select([self._ended], [], [], _END_SECONDS)[0]
        os.close(self._ended)
        return os.waitpid(self._pid, 0)[1] if gone else None


def _work(work: Callable[[], Results], answers: IO[bytes], dumps: IO[bytes], parent: int) -> NoReturn:
    """In the child: evaluate, answer, exit."""
    faulthandler.register(signal.SIGUSR2, file=dumps, all_threads=True, chain=False)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # never outlive the worker
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
