"""Watches evaluations, which run beside training, in workers anywhere: those that nobody runs or finishes, and what
they found: verdicts of probes, scores that are no numbers.

Each answer of a probe is judged as a whole: nothing is remembered that a restart would lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from . import looks
from .base import Detector
from .periodic import PeriodicProbe

_RESULTS = 24
"""Last results that are read each time."""


class EvaluationDetector(Detector):
    """Alarms `evaluation-overdue`, `evaluation-given-up`, `evaluation-verdict/PROBE` and
    `evaluation-score/TASK/METRIC`."""

    def __init__(self, alarms: AlarmSink, run: Path) -> None:
        super().__init__(alarms)
        self._results = PeriodicProbe(looks.results, run=str(run), newest=_RESULTS)
        self._run = run

    def tick(self, now: float) -> None:
        """Start a look when it is due, and judge the answer of an earlier one."""
        answer = self._results.tick(now)
        if answer is not None and answer.error is None:
            self._judge_late(answer.value["late"])
            self._judge_given_up(answer.value["given_up"])
            self._judge_verdicts(answer.value["results"])
            self._judge_scores(answer.value["results"])

    def _judge_late(self, late: Sequence[dict[str, Any]]) -> None:
        if not late:
            self.resolve("evaluation-overdue", "no checkpoint waits any more, or a worker has it")
            return
        longest = max(each["seconds"] for each in late)
        self.open(
            "evaluation-overdue",
            Severity.WARN,
            f"no scores of step {_steps(late)}: {_who(late)} for {human_time(longest)}",
            "training is not affected; a mistake in the data or the model would not be seen in the scores",
            f"see evals/log and the journal (eval-failed, eval-refused), then run: fsdp-eval watch {self._run} --once",
            facts={"steps": [each["step"] for each in late], "seconds": longest},
        )

    def _judge_given_up(self, given_up: Sequence[dict[str, Any]]) -> None:
        if not given_up:
            self.resolve("evaluation-given-up", "somebody has decided, or there are results")
            return
        self.open(
            "evaluation-given-up",
            Severity.WARN,
            f"no scores of step {_steps(given_up)}: all eval.attempts failed: {given_up[-1]['reason']}",
            "training is not affected; a mistake in the data or the model would not be seen in the scores. The oldest "
            "checkpoint.keep_last of them are not deleted",
            f"see evals/log; mend the cause, then: fsdp-eval retry {self._run}",
            facts={"steps": [each["step"] for each in given_up]},
        )

    def _judge_verdicts(self, results: Sequence[dict[str, Any]]) -> None:
        """By the newest verdict of each probe that decides."""
        newest: dict[str, tuple[int, dict[str, Any]]] = {}
        for found in results:
            newest |= {each["probe"]: (found["step"], each) for each in found["verdicts"] if each["ok"] is not None}
        bad = {f"evaluation-verdict/{probe}": each for probe, each in newest.items() if not each[1]["ok"]}
        for key, (step, verdict) in bad.items():
            self.open(
                key,
                Severity.CRIT,
                f"{verdict['probe']} of step {step}: {verdict['text']}",
                "what is trained now teaches the model the wrong thing; tokens are being wasted",
                f"read a batch: fsdp-pretrain where {self._run} --step {step} --text; measure the corpora: fsdp-data "
                "validate; then go back with fsdp-pretrain rollback",
                facts={"evaluated": step},
            )
        self.resolve_others("evaluation-verdict", bad, "a later evaluation does not find it")

    def _judge_scores(self, results: Sequence[dict[str, Any]]) -> None:
        """By the newest scores: each must be a finite number."""
        newest = results[-1] if results else {"scores": {}}
        rows = newest["scores"].items()
        bad = [(task, metric) for task, row in rows for metric, value in row.items() if value is None]
        for task, metric in bad:
            self.open(
                f"evaluation-score/{task}/{metric}",
                Severity.CRIT,
                f"{task} {metric} of step {newest['step']} is no finite number",
                "the model computes NaN or infinity for some texts; what is trained now may be lost",
                "look at loss and gradient norm before that step, and evaluate an earlier checkpoint: "
                f"fsdp-eval run {self._run} --step N",
                facts={"evaluated": newest["step"]},
            )
        keys = [f"evaluation-score/{task}/{metric}" for task, metric in bad]
        self.resolve_others("evaluation-score", keys, "later scores are numbers")


def _who(late: Sequence[dict[str, Any]]) -> str:
    return (
        "no worker has taken it" if not any(each["claimed"] for each in late) else "a worker holds it without a result"
    )


def _steps(found: Sequence[dict[str, Any]]) -> str:
    return ", ".join(str(each["step"]) for each in found[:5]) + (" and more" if len(found) > 5 else "")
