"""One attempt at an evaluation in a process of its own: what its worker learns of it, however it ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import records

from eval.attempt import (
    ConfidenceInterval,
    EvaluationError,
    EvaluationLimits,
    RefusedError,
    Results,
    Verdict,
    run_in_child,
)
from fsdp_pretrain.errors import StorageError

pytestmark = pytest.mark.quick
LONG = EvaluationLimits(deadline=600.0, end=1800.0)
SCORES = {
    "choice": {"acc": 0.5, "acc_stderr": 0.1, "f1": 0.25},
    "text": {"bits": 1.5, "bits_stderr": 0.2},
}
INTERVALS = {"text": {"bits": {"low": 1.0, "high": 2.5}}}


def results() -> Results:
    verdicts = [
        Verdict(probe="one", ok=None, text="undecided"),
        Verdict(probe="two", ok=False, text="bad"),
        Verdict(probe="three", ok=True, text="good"),
    ]
    return Results(**records.results(scores=SCORES, intervals=INTERVALS, verdicts=verdicts))


def never_late(text: str) -> None:
    raise AssertionError(text)


def test_results_come_back_as_they_are(tmp_path: Path) -> None:
    assert run_in_child(results, LONG, tmp_path / "stacks", never_late) == results()
    assert not (tmp_path / "stacks").exists()


def test_scores_have_their_errors_and_intervals() -> None:
    rows = {(task, metric): (value, error, interval) for task, metric, value, error, interval in results().metrics()}
    assert rows.keys() == {("choice", "acc"), ("choice", "f1"), ("text", "bits")}
    value, error, interval = rows["choice", "acc"]
    assert (value, error) == (0.5, 0.1) and interval is not None and interval.method == "normal"
    assert (interval.low, interval.high) == pytest.approx((0.5 - 0.1959964, 0.5 + 0.1959964), abs=1e-7)
    assert rows["choice", "f1"] == (0.25, None, None)
    assert rows["text", "bits"] == (1.5, 0.2, ConfidenceInterval(low=1.0, high=2.5))
    assert [*results().alarms()] == [("two", "bad")]


def fault(act: Callable[[], object]) -> Callable[[], Results]:
    def work() -> Results:
        act()
        return results()

    return work


def raises(error: BaseException) -> Callable[[], Results]:
    def work() -> Results:
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (raises(StorageError("the disk is gone", "an effect", "a remedy")), "the disk is gone"),
        (raises(ValueError("of a task")), "ValueError: of a task"),
        (raises(SystemExit(0)), "SystemExit: 0"),
        (raises(KeyboardInterrupt()), "its process ended with 130"),
        (fault(lambda: os._exit(3)), "its process ended with 3"),
        (fault(lambda: os._exit(0)), "its process ended with 0"),
        (fault(lambda: os.kill(os.getpid(), signal.SIGKILL)), "its process was ended by signal 9"),
    ],
)
def test_a_failure_is_told(work: Callable[[], Results], said: str, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError) as failed:
        run_in_child(work, LONG, tmp_path / "stacks", never_late)
    assert str(failed.value) == said


def test_a_refusal_keeps_its_three_parts(tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as refused:
        run_in_child(raises(RefusedError("a", "b", "c")), LONG, tmp_path / "stacks", never_late)
    assert (refused.value.cause, refused.value.effect, refused.value.remedy) == ("a", "b", "c")


def test_one_that_is_late_is_told_once_and_may_still_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    told = []

    def late(text: str) -> None:
        told.append(text)
        os.write(writing, b"go")

    limit = EvaluationLimits(deadline=0.05, end=600.0)
    found = run_in_child(fault(lambda: os.read(reading, 2)), limit, tmp_path / "a/stacks", late)
    assert found == results() and len(told) == 1 and "has taken 0.05s" in told[0] and "a/stacks" in told[0]
    text = (tmp_path / "a/stacks").read_text()
    assert text.count("most recent call first") >= 1 and "test_eval_attempt.py" in text


def test_one_that_never_ends_is_killed_with_a_second_stack(tmp_path: Path) -> None:
    told, pids = list[str](), list[str]()

    def late(text: str) -> None:
        told.append(text)
        pids.extend((tmp_path / "pid").read_text().split())

    def hang() -> None:
        (tmp_path / "pid").write_text(f"{os.getpid()}")
        threading.Event().wait()

    limit = EvaluationLimits(deadline=2.0, end=2.2)
    with pytest.raises(EvaluationError, match=r"ended after 2.2s: it hangs, or eval.deadline is too short"):
        run_in_child(fault(hang), limit, tmp_path / "stacks", late)
    assert len(told) == 1 and (tmp_path / "stacks").read_text().count("# 2") == 2
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids[0]), 0)
