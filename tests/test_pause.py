"""Steering a live run with `control`: pausing it, and changing settings from a step on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import CLI, ROOT
from sight import PATIENT, steps, until

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.run.files import RunDir, seconds_of
from fsdp_pretrain.run.requests import send

PAUSE = ("pause", "resume")
LONG = {"duration": "100_000 steps", "micro_batch": 2}


class Live:
    """A run that trains until it is asked to stop, and commands to it."""

    def __init__(self, lab: Any, helpers: Any, run_command: Any, config: Path, ranks: int) -> None:
        self._lab, self._helpers, self._command, self.config, self.ranks = lab, helpers, run_command, config, ranks
        self.run: Path = lab.path / "run"
        self.job: Any = None

    def start(self, *overrides: str) -> Any:
        self.job = self._lab.start(self.config, *overrides, ranks=self.ranks)
        return self.job

    def reach(self, step: int) -> None:
        until(lambda: steps(self.run) >= step, what=lambda: self.job.output())

    def metrics(self) -> list[dict[str, Any]]:
        return self._helpers.metrics(self.run)  # type: ignore[no-any-return]

    def control(self, *arguments: object, expect: int = 0) -> str:
        done = self._command(CLI, "control", self.run, *arguments)
        assert done.returncode == expect, (arguments, done.returncode, done.stdout, done.stderr, self.job.output())
        return done.stdout + done.stderr  # type: ignore[no-any-return]

    def answers(self) -> list[dict[str, Any]]:
        return self._helpers.journal(self.run, "control")  # type: ignore[no-any-return]


@pytest.fixture
def live(lab: Any, helpers: Any, run_command: Any) -> Any:
    """`live(ranks, **sections)`: a run of many steps, not started yet."""

    def make(ranks: int = 2, **sections: dict[str, Any]) -> Live:
        train = {**LONG, "micro_batch": 8 // ranks, **sections.pop("train", {})}
        config = lab.config(train=train, **{"checkpoint": {"every": "50_000 steps"}, **sections})
        return Live(lab, helpers, run_command, config, ranks)

    return make


@pytest.mark.shows("D17")
def test_a_pause_holds_all_ranks_between_two_steps(live: Any, run_command: Any, helpers: Any) -> None:
    """Save, and stop, while paused; the pause is in the status, the journal and a row of its own in goodput, and no
    step's time."""
    run = live()
    job = run.start()
    run.reach(5)
    said = run.control("pause", "--reason", "power is cut")
    entry = run.answers()[-1]
    step = entry["step"]
    assert f"paused after step {step}, because: power is cut" in said and entry["did"] == "pause" and entry["by"]
    assert steps(run.run) == step
    status = run_command(CLI, "status", run.run)
    assert status.returncode == 1 and ": PAUSED" in status.stdout, status.stdout
    assert f"by {entry['by']}: power is cut" in status.stdout and "paused for" in status.stdout
    assert "paused already" in run.control("pause", expect=78)
    assert not helpers.journal(run.run, "checkpoint")
    assert f"all ranks save after step {step}" in run.control("save", "--reason", "just in case")
    asked = run.answers()[-1]
    assert (asked["asked"], asked["by"], asked["reason"]) == ("save", entry["by"], "just in case")
    until(lambda: [saved["step"] for saved in helpers.journal(run.run, "checkpoint")] == [step], what=job.output)
    assert steps(run.run) == step

    assert f"resumed after step {step}, after a pause" in run.control("resume")
    run.reach(step + 5)
    assert "not paused" in run.control("resume", expect=78)
    assert [record["step"] for record in run.metrics() if record["seconds"]["paused"]] == [step + 1]

    run.control("pause")
    last = run.answers()[-1]["step"]
    assert f"all ranks save and stop after step {last}, because: done" in run.control("stop", "--reason", "done")
    assert job.wait() == [75, 75], job.output()
    assert steps(run.run) == last == helpers.journal(run.run, "checkpoint")[-1]["step"]
    assert not Store(run.run / "checkpoints").find(last).manifest().final
    assert "done" in json.loads((run.run / "status.json").read_text())["exit_intent"]["reason"]
    found = json.loads(run_command(CLI, "goodput", run.run, "--json").stdout)
    held = sum(record["seconds"]["paused"] for record in run.metrics())
    begun, over = (seconds_of([e["time"] for e in run.answers() if e.get("did") == did][-1]) for did in PAUSE)
    assert begun is not None and over is not None and held > 0
    assert found["states"]["idle"] == pytest.approx(held + over - begun) and over > begun
    assert sum(found["states"].values()) == pytest.approx(found["wall_seconds"])
    assert not found["incidents"]


@pytest.mark.shows("D17")
@pytest.mark.slow
def test_a_pause_raises_no_alarm_and_a_hang_in_it_does(live: Any, helpers: Any) -> None:
    """Several times longer than the deadlines of a hang."""
    hang = {**PATIENT["hang"], "soft": "5 s", "hard": "60 s"}
    run = live(watchdog={**PATIENT, "hang": hang})
    run.start()
    run.reach(40)
    run.control("pause")
    begun = helpers.journal(run.run, "control")[-1]["time"]
    pages = run.run / "watchdog"
    until(lambda: _age(begun) > 20, what="20 s in a pause")
    assert pages.exists() and not helpers.alarms(run.run, "hang")
    run.job.kill(1, 19)  # SIGSTOP
    until(lambda: helpers.alarms(run.run, "hang"), what="the alarm for a rank that is stopped in a pause")
    assert helpers.alarms(run.run, "hang")[-1]["facts"]["suspects"] == [1]


def _age(since: str) -> float:
    from fsdp_pretrain.run.files import age

    return age(since)


WAITS_WHILE_IT_LOADS = {
    "rank": 0,
    "verb": "rename",
    "path": r"lineage\.json$",
    "act": "await_file",
    "skip": 0,
    "times": 1,
}


@pytest.mark.parametrize("verb", ["save", "stop"])
def test_a_run_that_still_loads_is_asked(
    lab: Any, helpers: Any, start_command: Any, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command waits, and the run does it in its first steps; what an earlier start had left is discarded."""
    config, run, loaded = lab.config(train={"duration": "40 steps"}), lab.path / "run", lab.path / "loaded"
    monkeypatch.setenv("EXECUTE_FIRST", str(ROOT / "tests/traps.py"))
    monkeypatch.setenv("TRAP", json.dumps({**WAITS_WHILE_IT_LOADS, "file": str(loaded)}))
    job = lab.start(config)
    monkeypatch.undo()
    until(lambda: helpers.journal(run, "start"), what=job.output)
    left = send(RunDir(run), "stop", segment=0)
    command = start_command(CLI, "control", run, verb, "--wait", "5 minutes")
    until(lambda: len(list((run / "control").glob("[!.]*.json"))) == 2, what=command.output)
    assert command.poll() is None
    loaded.touch()
    assert job.wait() == [75 if verb == "stop" else 0], job.output()
    assert command.wait() == 0, command.output()
    discarded, answer = helpers.journal(run, "control")
    assert (discarded["request"], discarded["refused"]) == (left.stem, "it was sent to an earlier start")
    assert answer["asked"] == verb and answer["by"] and answer["step"] <= 4 and answer["text"] in command.output()[0]
    assert helpers.journal(run, "checkpoint")[0]["step"] == answer["step"]


def test_a_pause_that_was_killed_is_over(lab: Any, run_command: Any, live: Any) -> None:
    """In `status`, `watch` and the report, at once."""
    run = live(1)
    job = run.start()
    run.reach(3)
    run.control("pause")
    assert run_command(CLI, "status", run.run).stdout.startswith("run: PAUSED")
    job.kill()
    job.wait()
    shown = run_command(CLI, "status", run.run)
    assert shown.returncode == 2 and shown.stdout.startswith("run: NOT RUNNING"), shown.stdout
    assert "exited without reporting a reason" in shown.stdout and "paused for" not in shown.stdout
