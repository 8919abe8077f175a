"""One attempt at an evaluation in a process of its own: what its worker learns of it, however it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import records

from fsdp_pretrain.errors import StorageError
from fsdp_pretrain.eval.attempt import guarded
from fsdp_pretrain.eval.results import RefusedError, Results, Verdict
from fsdp_pretrain.run import state_files

pytestmark = pytest.mark.quick
SCORES = {
    "choice": {"acc": 0.5, "acc_stderr": 0.1, "f1": 0.25},
    "text": {"bits": 1.5, "bits_stderr": 0.2},
}


def results() -> Results:
    verdicts = [
        Verdict(probe="one", ok=None, text="undecided"),
        Verdict(probe="two", ok=False, text="bad"),
        Verdict(probe="three", ok=True, text="good"),
    ]
    return Results(**records.results(scores=SCORES, verdicts=verdicts))


def test_scores_have_their_errors() -> None:
    assert [*results().metrics()] == [
        ("choice", "acc", 0.5, 0.1),
        ("choice", "f1", 0.25, None),
        ("text", "bits", 1.5, 0.2),
    ]
    assert [*results().alarms()] == [("two", "bad")]


# ---------------------------------------------------------------- in the process of an attempt


def raises(error: BaseException) -> Callable[[], Results]:
    def work() -> Results:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "said", "refused"),
    [
        (StorageError("the disk is gone", "an effect", "a remedy"), "the disk is gone", None),
        (ValueError("of a task"), "ValueError: of a task", None),
        (SystemExit(0), "SystemExit: 0", None),
        (KeyboardInterrupt(), "KeyboardInterrupt: ", None),
        (RefusedError("a", "b", "c"), "", ["a", "b", "c"]),
    ],
)
def test_a_failure_is_told(error: BaseException, said: str, refused: list[str] | None, tmp_path: Path) -> None:
    failure = guarded(raises(error), tmp_path, 600.0)
    assert failure is not None and (failure.reason, failure.refused) == (said, refused)
    assert not (tmp_path / "results.json").exists()


def test_the_stack_of_one_that_is_late_is_kept_and_it_may_still_end(tmp_path: Path) -> None:
    def slow() -> Results:
        while "test_eval_attempt.py" not in (tmp_path / "stack").read_text():  # threads are written one by one
            pass
        return results()

    assert guarded(slow, tmp_path, 0.05) is None
    assert "test_eval_attempt.py" in (tmp_path / "stack").read_text()
    assert state_files.read(tmp_path / "results.json", Results) == results()
