"""Helper processes: restarted when they die, and only then; ended with their input, or else by force."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dying_helper import DyingSettings
from sight import until

from fsdp_pretrain.helper_process import HelperProcess

pytestmark = pytest.mark.quick
Start = Callable[..., HelperProcess]


@pytest.fixture
def codes() -> list[int]:
    """The exit codes that were reported."""
    return []


@pytest.fixture
def start(tmp_path: Path, codes: list[int], monkeypatch: pytest.MonkeyPatch) -> Start:
    def make(deaths: int, pause: float, *, stubborn: bool = False) -> HelperProcess:
        monkeypatch.setattr("fsdp_pretrain.helper_process._PAUSE", pause)
        settings = DyingSettings(str(tmp_path / "starts"), deaths, stubborn)
        return HelperProcess("tests.dying_helper", settings=settings, log=tmp_path / "log", died=codes.append)

    return make


@pytest.fixture
def starts(tmp_path: Path) -> Callable[[], list[str]]:
    return lambda: (tmp_path / "starts").read_text().split() if (tmp_path / "starts").exists() else []


def test_it_is_restarted_until_it_lives_and_not_after_it_finished(
    start: Start, starts: Callable[[], list[str]], codes: list[int]
) -> None:
    helper = start(2, 0.01)
    until(lambda: starts() == ["0", "1", "2"])
    assert codes == [3, 3] and not helper.ended
    helper.finish()
    until(lambda: helper.ended)
    time.sleep(0.5)
    assert helper.finished and starts() == ["0", "1", "2"] and codes == [3, 3]


def test_one_that_is_dead_is_started_to_finish(start: Start, starts: Callable[[], list[str]]) -> None:
    helper = start(1, 3600.0)
    until(lambda: helper.ended)
    helper.finish()
    until(lambda: helper.finished)
    assert starts() == ["0", "1"]


@pytest.mark.parametrize("stubborn", [False, True])
def test_it_ends_with_its_input_or_is_killed(start: Start, starts: Callable[[], list[str]], stubborn: bool) -> None:
    helper = start(0, 0.01, stubborn=stubborn)
    until(starts)
    helper.close(0.3 if stubborn else 60.0)
    until(lambda: helper.ended)
    time.sleep(0.3)
    assert helper.finished is not stubborn and starts() == ["0"]
