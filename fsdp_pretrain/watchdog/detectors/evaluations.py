"""Watches evaluations, which run beside training, in workers anywhere: those that hang, by their claims; those that
nobody runs; and what they found: verdicts of probes, scores that are worse than before. No torch.

Each answer of a probe is judged as a whole: nothing is remembered that a restart would lose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from fsdp_pretrain.record.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink
from fsdp_pretrain.watchdog.probes import looks
from fsdp_pretrain.watchdog.probes.periodic import PeriodicProbe

from .base import Detector
from .regression import Point, regression

_RESULTS = 24
"""Last results that are read each time."""


class EvaluationDetector(Detector):
    """Alarms `evaluation/STEP`, `evaluation-overdue`, `evaluation-given-up`, `evaluation-verdict/PROBE` and
    `evaluation-score/TASK/METRIC`.

    An evaluation that takes longer than the deadline in its worker's claim saves its stack, and the worker finally ends
    it; `evaluation/STEP` reports it even when the worker is stopped.
    """

    def __init__(self, alarms: AlarmSink, run: Path) -> None:
        super().__init__(alarms)
        self._probe = PeriodicProbe(looks.evaluations, evals=str(run / "evals"))
        self._results = PeriodicProbe(looks.results, run=str(run), newest=_RESULTS)
        self._run = run
        self._seen: dict[str, float] = {}
        self._heldout: dict[str, deque[Point]] = {}
        self._worse_heldout: set[str] = set()

    def step(self, record: StepRecord) -> None:
        """Judge the held-out losses, if they were measured, by those of this start."""
        super().step(record)
        for source, loss in (record.heldout or {}).items():
            points = self._heldout.setdefault(source, deque(maxlen=_RESULTS))
            if not isfinite(loss.mean):
                continue
            points.append(Point(record.step, loss.mean, None))
            name = f"heldout_loss/{source}"
            if (key := self.judge_curve(name, [*points], higher_is_better=False)) is not None:
                self._worse_heldout.add(key)
            elif (key := f"evaluation-score/{name}") in self._worse_heldout:
                self._worse_heldout.remove(key)
                self.resolve(key, "later measurements are as before")

    def tick(self, now: float) -> None:
        """Start due probes, and judge the answers of earlier ones. Durations use the monotonic clock."""
        answer = self._probe.tick(now)
        if answer is not None and answer.error is None:
            self._judge_claims(answer.value["claims"], now)
        answer = self._results.tick(now)
        if answer is not None and answer.error is None:
            self._judge_waiting(answer.value["waiting"], answer.value["overdue"])
            self._judge_given_up(answer.value["given_up"])
            self._judge_verdicts(answer.value["results"])
            self._judge_scores(answer.value["results"])

    def _judge_claims(self, claims: Sequence[dict[str, Any]], now: float) -> None:
        self._seen = {claim["token"]: self._seen.get(claim["token"], now) for claim in claims}
        late = [claim for claim in claims if now - self._seen[claim["token"]] > claim["deadline"]]
        for claim in late:
            self.open(
                f"evaluation/{claim['step']}",
                Severity.WARN,
                f"the evaluation of step {claim['step']} ({claim['tasks']}) on {claim['host']}, pid {claim['pid']}, "
                f"takes longer than {human_time(claim['deadline'])}",
                "training is not affected; there are no scores of this checkpoint, and it is not deleted",
                "the journal (eval-late) names its stack; it is ended after three times as long, which is one of its "
                "eval.attempts",
                step=claim["step"],
                facts={name: claim[name] for name in ("host", "pid", "deadline", "tasks")},
            )
        keys = {f"evaluation/{claim['step']}" for claim in late}
        self.resolve_others("evaluation", keys, "it has ended; the journal says how")

    def _judge_waiting(self, waiting: Sequence[dict[str, Any]], overdue: float) -> None:
        late = [each for each in waiting if not each["claimed"] and each["seconds"] > overdue]
        if not late:
            self.resolve("evaluation-overdue", "no checkpoint waits any more, or a worker has it")
            return
        longest = max(each["seconds"] for each in late)
        self.open(
            "evaluation-overdue",
            Severity.WARN,
            f"no scores of step {_steps(late)}: no worker has taken it for {human_time(longest)}",
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
            f"see evals/log; mend the cause, then: fsdp-eval retry {self._run} (or retry --drop: no scores are wanted)",
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
        curves: dict[tuple[str, str, bool], list[Point]] = {}
        keys: set[str | None] = set(self._judge_numbers(results[-1])) if results else set()
        for found in (each for each in results if each["limit"] == results[-1]["limit"]):
            for task, directions in found["higher_is_better"].items():
                row = found["scores"].get(task, {})
                for metric, higher in directions.items():
                    if row.get(metric) is not None:
                        point = Point(found["step"], row[metric], row.get(f"{metric}_stderr"))
                        curves.setdefault((task, metric, higher), []).append(point)
        keys |= {
            self.judge_curve(f"{task}/{metric}", points, higher_is_better=higher)
            for (task, metric, higher), points in curves.items()
            if f"evaluation-score/{task}/{metric}" not in keys
        }
        self.resolve_others(
            "evaluation-score", {*filter(None, keys), *self._worse_heldout}, "later scores are as before"
        )

    def _judge_numbers(self, newest: dict[str, Any]) -> Iterator[str]:
        """Open an alarm for each score that is no finite number; their keys."""
        for task, row in newest["scores"].items():
            for metric in (metric for metric, value in row.items() if value is None):
                key = f"evaluation-score/{task}/{metric}"
                self.open(
                    key,
                    Severity.CRIT,
                    f"{task} {metric} of step {newest['step']} is no finite number",
                    "the model computes NaN or infinity for some texts; what is trained now may be lost",
                    "look at loss and gradient norm before that step, and evaluate an earlier checkpoint: "
                    f"fsdp-eval run {self._run} --step N",
                    facts={"evaluated": newest["step"]},
                )
                yield key

    def judge_curve(self, name: str, points: Sequence[Point], *, higher_is_better: bool) -> str | None:
        """Open `evaluation-score/NAME` if the last point is worse than those before; its key, or None if it is not."""
        found = regression(points, higher_is_better=higher_is_better)
        if found is None:
            return None
        key, change = f"evaluation-score/{name}", abs(found.newest.value - found.usual)
        self.open(
            key,
            Severity.WARN,
            f"{name.replace('/', ' ')} is {found.newest.value:.4g} at step {found.newest.step}, was {found.usual:.4g}: "
            f"worse by {change:.2g}, {change / found.noise:.1f} times its usual change",
            "the model became worse at this since the last evaluations",
            "compare with what changed before that step (fsdp-pretrain journal: resume, changed, overrides), and look "
            "at the loss there",
            facts={"evaluated": found.newest.step, "value": found.newest.value, "usual": found.usual},
        )
        return key


def _steps(found: Sequence[dict[str, Any]]) -> str:
    return ", ".join(str(each["step"]) for each in found[:5]) + (" and more" if len(found) > 5 else "")
