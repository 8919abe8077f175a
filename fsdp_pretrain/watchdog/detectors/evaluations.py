"""Watches evaluations, which run beside training in workers anywhere: late or failed ones, and their results, which are
verdicts of probes and scores.

Every look is judged as a whole, so a restart loses nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pydantic import Field

from fsdp_pretrain.checkpoint.evaluations import without_results
from fsdp_pretrain.checkpoint.store import step_of
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import load_recorded
from fsdp_pretrain.run import lock, state_files
from fsdp_pretrain.run.files import RunDir, seconds_of
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .base import Detector
from .periodic import PeriodicProbe

_RESULTS = 24
"""Number of newest results to read each time, of possibly thousands."""


class _Verdict(state_files.StateFile):
    probe: str
    ok: bool | None
    text: str


class _Results(state_files.StateFile):
    """The judged part of `results.json`; see `fsdp_pretrain.eval.results.Results`."""

    step: int
    scores: dict[str, dict[str, float | None]]
    verdicts: list[_Verdict] = Field(default_factory=list)


@dataclass(frozen=True)
class _Late:
    """A due checkpoint whose results are late: seconds since it was committed or an attempt failed, and whether a
    worker has claimed it."""

    step: int
    seconds: float
    claimed: bool


@dataclass(frozen=True)
class _GivenUp:
    step: int
    reason: str


@dataclass(frozen=True)
class _Evaluations:
    """The last results, oldest first; late jobs for newer checkpoints than all results; all jobs that were given up."""

    results: list[_Results]
    late: list[_Late]
    given_up: list[_GivenUp]


def _look(run: RunDir) -> _Evaluations:
    config = load_recorded(run.config)
    folders = sorted((path for path in run.evals.glob("step-*") if step_of(path.name) is not None), reverse=True)
    paths = itertools.islice((path for folder in folders for path in sorted(folder.glob("*/results.json"))), _RESULTS)
    results = [result for path in paths if (result := state_files.view(path, _Results)) is not None]
    late, given_up = list[_Late](), list[_GivenUp]()
    for job in without_results(run, config):
        if job.given_up:
            given_up.append(_GivenUp(job.checkpoint.step, job.failures[-1].reason))
        elif job.checkpoint.step > max((result.step for result in results), default=-1) and not job.pause:
            held = lock.read(job.folder / "claim.json")
            claimed = held is not None and lock.is_alive(held) is not False
            allowed = config.eval.overdue.value
            if held is not None and claimed:
                allowed += held.deadline or 0.0  # by then its worker has ended it
            since = [job.committed, *(failure.time for failure in job.failures)][-1]
            seconds = time.time() - (seconds_of(since) or time.time())
            if seconds > allowed:
                late.append(_Late(job.checkpoint.step, seconds, claimed))
    return _Evaluations(sorted(results, key=lambda result: result.step), late, given_up)


def evaluates(config: Config) -> bool:
    """Whether a run has evaluations to watch."""
    return config.eval.every is not None or bool(config.eval.loss_on)


class EvaluationDetector(Detector):
    """Alarms `evaluation-overdue`, `evaluation-given-up`, `evaluation-verdict/PROBE` and
    `evaluation-score/TASK/METRIC`."""

    def __init__(self, alarms: AlarmSink, run: RunDir) -> None:
        super().__init__(alarms)
        self._probe, self._run = PeriodicProbe(partial(_look, run)), run.path

    def tick(self, now: float) -> None:
        """Start a look when it is due, and judge the answer of an earlier one."""
        if (evaluations := self._probe.result(now)) is not None:
            self._judge_late(evaluations.late)
            self._judge_given_up(evaluations.given_up)
            self._judge_verdicts(evaluations.results)
            self._judge_scores(evaluations.results)

    def _judge_late(self, late: Sequence[_Late]) -> None:
        if not late:
            self.resolve("evaluation-overdue", "no checkpoint waits any more, or a worker has it")
            return
        longest = max(job.seconds for job in late)
        self.open(
            "evaluation-overdue",
            Severity.WARN,
            f"no scores of step {_steps(late)}: {_who(late)} for {human_time(longest)}",
            "training is not affected; a mistake in the data or the model would not be seen in the scores",
            f"see evals/log and the journal (eval-failed, eval-refused), then run: fsdp-eval watch {self._run} --once",
            facts={"steps": [job.step for job in late], "seconds": longest},
        )

    def _judge_given_up(self, given_up: Sequence[_GivenUp]) -> None:
        if not given_up:
            self.resolve("evaluation-given-up", "somebody has decided, or there are results")
            return
        self.open(
            "evaluation-given-up",
            Severity.WARN,
            f"no scores of step {_steps(given_up)}: all eval.attempts failed: {given_up[-1].reason}",
            "training is not affected; a mistake in the data or the model would not be seen in the scores. The oldest "
            "checkpoint.keep_last of them are not deleted",
            f"see evals/log; mend the cause, then: fsdp-eval retry {self._run}, and if no worker runs: fsdp-eval watch "
            f"{self._run} --once",
            facts={"steps": [job.step for job in given_up]},
        )

    def _judge_verdicts(self, results: Sequence[_Results]) -> None:
        """Judge the newest decisive verdict of every probe."""
        newest: dict[str, tuple[int, _Verdict]] = {}
        for result in results:
            newest |= {verdict.probe: (result.step, verdict) for verdict in result.verdicts if verdict.ok is not None}
        bad = {f"evaluation-verdict/{probe}": item for probe, item in newest.items() if not item[1].ok}
        for key, (step, verdict) in bad.items():
            severity = Severity.CRIT
            effect = "what is trained now teaches the model the wrong thing; tokens are being wasted"
            remedy = (
                f"read a batch: fsdp-pretrain where {self._run} --step {step} --text; measure the corpora: fsdp-data "
                "validate; then go back with fsdp-pretrain rollback"
            )
            if verdict.probe == "merge":  # see `fsdp_pretrain.eval.results.MERGE`
                severity = Severity.WARN
                effect = "training is not affected; only the scores of TASK@merge are missing"
                remedy = "nothing, if later merges leave that checkpoint out; else change eval.merge and start again"
            summary = f"{verdict.probe} of step {step}: {verdict.text}"
            self.open(key, severity, summary, effect, remedy, facts={"evaluated": step})
        self.resolve_others("evaluation-verdict", bad, "a later evaluation does not find it")

    def _judge_scores(self, results: Sequence[_Results]) -> None:
        """Check that the newest scores are finite numbers."""
        newest = results[-1:]
        rows = [(result.step, task, row) for result in newest for task, row in result.scores.items()]
        bad = [(step, task, metric) for step, task, row in rows for metric, value in row.items() if value is None]
        for step, task, metric in bad:
            self.open(
                f"evaluation-score/{task}/{metric}",
                Severity.CRIT,
                f"{task} {metric} of step {step} is no finite number",
                "the model computes NaN or infinity for some texts; what is trained now may be lost",
                "look at loss and gradient norm before that step, and evaluate an earlier checkpoint: "
                f"fsdp-eval run {self._run} --step N",
                facts={"evaluated": step},
            )
        keys = [f"evaluation-score/{task}/{metric}" for _, task, metric in bad]
        self.resolve_others("evaluation-score", keys, "later scores are numbers")


def _who(late: Sequence[_Late]) -> str:
    return "no worker has taken it" if not any(job.claimed for job in late) else "a worker holds it without a result"


def _steps(jobs: Sequence[_Late | _GivenUp]) -> str:
    return ", ".join(str(job.step) for job in jobs[:5]) + (" and more" if len(jobs) > 5 else "")
