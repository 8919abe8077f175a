"""Alarms about evaluations: verdicts of probes, scores that are no numbers, checkpoints that nobody evaluates."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import records
from watch import Watch

from fsdp_pretrain.checkpoint.evaluations import given_up_jobs
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.eval.results import MERGE
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.lock import this_process
from fsdp_pretrain.watchdog.detectors.evaluations import EvaluationDetector

TASKS = "heldout_bpb+separator_probe"


def ago(hours: float) -> str:
    return datetime.fromtimestamp(time.time() - 3600 * hours, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


class Evaluated:
    """A run whose results the test writes, and the detector on it."""

    def __init__(self, lab: Any, watch: Watch) -> None:
        self.path: Path = lab.path / "run"
        self.path.mkdir()
        (self.path / "watchdog").mkdir()
        tasks = {"every": "10 steps", "heldout": str(lab.heldout), "tasks": TASKS.split("+"), "overdue": "1 h"}
        lab.config(eval={**tasks, "attempts": 2}).rename(self.path / "config.toml")
        self.watch = watch
        watch.detectors = [EvaluationDetector(watch.alarms, RunDir(self.path))]

    def result(
        self, step: int, bpb: float | None = 2.0, ok: bool | None = True, limit: int | None = None,
        merge: bool | None = None,
    ) -> None:  # fmt: skip
        folder = self.path / f"evals/step-{step:08d}" / TASKS
        folder.mkdir(parents=True)
        values = {
            "tasks": TASKS,
            "limit": limit,
            "scores": {"heldout_bpb": {"bits_per_byte": bpb}, "separator_probe": {"second": 0.5}},
            "higher_is_better": {"heldout_bpb": {"bits_per_byte": False}},
            "verdicts": [
                {"probe": "separator_probe", "ok": ok, "text": "P(separator) is 0.5"},
                *([] if merge is None else [{"probe": MERGE, "ok": merge, "text": "of its parents"}]),
            ],
        }
        state_files.write(folder / "results.json", records.results(step=step, **values))

    def checkpoint(self, step: int, hours: float) -> Path:
        """Committed so long ago; the folder of its evaluation."""
        records.commit(Store(self.path / "checkpoints"), step, committed=ago(hours))
        folder = self.path / f"evals/step-{step:08d}" / TASKS
        folder.mkdir(parents=True)
        return folder

    def changes(self) -> list[tuple[str, str, str]]:
        """Transitions since the last call."""
        self.watch.advance(60)
        found = self.watch.transitions()
        self.watch.changes.clear()
        return found


@pytest.fixture
def evaluated(lab: Any, watch: Watch) -> Iterator[Evaluated]:
    yield Evaluated(lab, watch)


def test_a_verdict_is_critical_until_a_later_one_is_good(evaluated: Evaluated) -> None:
    key = "evaluation-verdict/separator_probe"
    assert evaluated.changes() == []
    evaluated.result(10, ok=None)
    assert evaluated.changes() == []
    evaluated.result(20, ok=False)
    assert evaluated.changes() == [(key, "CRIT", "open")]
    (alarm,) = evaluated.watch.alarms
    assert alarm.summary == "separator_probe of step 20: P(separator) is 0.5" and alarm.effect and alarm.remedy
    evaluated.result(30, ok=None)  # decides nothing
    evaluated.result(40, ok=False)  # no news
    assert evaluated.changes() == []
    evaluated.result(50, ok=True)
    assert evaluated.changes() == [(key, "CRIT", "resolved")]


def test_a_merge_that_cannot_be_made_is_no_fault_of_training(evaluated: Evaluated) -> None:
    """Neither its severity, effect nor remedy are those of wrong data, and the next merge ends it."""
    evaluated.result(10, merge=False)
    assert evaluated.changes() == [("evaluation-verdict/merge", "WARN", "open")]
    (alarm,) = evaluated.watch.alarms
    assert "training is not affected" in alarm.effect and "rollback" not in alarm.remedy
    evaluated.result(20)  # fewer than two checkpoints to merge
    assert evaluated.changes() == []
    evaluated.result(30, merge=True)
    assert evaluated.changes() == [("evaluation-verdict/merge", "WARN", "resolved")]


@pytest.mark.promise("no-wrong-scores")
def test_a_score_that_is_no_number_is_critical_and_hides_nothing_later(evaluated: Evaluated) -> None:
    for step, value in enumerate((2.00, 1.98, 1.97, 1.97, 1.96, 1.95, None, 1.95, 1.95), 1):
        evaluated.result(step, value)
        found = evaluated.changes()
        key = "evaluation-score/heldout_bpb/bits_per_byte"
        assert found == {7: [(key, "CRIT", "open")], 8: [(key, "CRIT", "resolved")]}.get(step, [])


@pytest.mark.shows("C6")
def test_a_checkpoint_that_nobody_evaluates_is_told(evaluated: Evaluated) -> None:
    key = "evaluation-overdue"
    evaluated.checkpoint(10, hours=0.5)
    evaluated.checkpoint(15, hours=9)  # not due
    assert evaluated.changes() == []
    folder = evaluated.checkpoint(20, hours=2)
    assert evaluated.changes() == [(key, "WARN", "open")]
    (alarm,) = evaluated.watch.alarms
    assert alarm.summary.startswith("no scores of step 20: no worker has taken it for 2h0")
    state_files.write(folder / "claim.json", {"token": "x", "deadline": 1e9, **this_process()})
    assert evaluated.changes() == [(key, "WARN", "resolved")]  # a worker has it
    (folder / "claim.json").unlink()
    assert evaluated.changes() == [(key, "WARN", "open")]
    evaluated.result(30)  # a later one was evaluated
    assert evaluated.changes() == [(key, "WARN", "resolved")]


@pytest.mark.parametrize(("minutes", "opened"), [(1, False), (30, False), (90, True)])
def test_a_checkpoint_waits_from_its_last_failed_attempt_on(evaluated: Evaluated, minutes: int, opened: bool) -> None:
    """The pause before the next attempt is not a missing worker."""
    folder = evaluated.checkpoint(10, hours=9)
    committed = Store(evaluated.path / "checkpoints").find(10).manifest().committed
    failed = {"time": ago(minutes / 60), "reason": "no partition", "committed": committed}
    state_files.write(folder / "failed-0.json", failed)
    assert evaluated.changes() == ([("evaluation-overdue", "WARN", "open")] if opened else [])


def test_a_checkpoint_that_was_given_up_is_told_until_somebody_decides(evaluated: Evaluated) -> None:
    """At once, and though later ones are evaluated."""
    key, folder = "evaluation-given-up", evaluated.checkpoint(10, hours=0)
    committed = Store(evaluated.path / "checkpoints").find(10).manifest().committed
    for attempt in range(2):
        assert evaluated.changes() == []
        state_files.write(
            folder / f"failed-{attempt}.json", {"time": f"{attempt}", "reason": "no partition", "committed": committed}
        )
    assert evaluated.changes() == [(key, "WARN", "open")]
    (alarm,) = evaluated.watch.alarms
    assert alarm.summary == "no scores of step 10: all eval.attempts failed: no partition" and alarm.remedy
    evaluated.result(20)
    assert evaluated.changes() == []
    run = RunDir(evaluated.path)
    (job,) = given_up_jobs(run, load(run.config))
    job.forget_failures()
    assert evaluated.changes() == [(key, "WARN", "resolved")]
