"""A start that trains nothing changes nothing of the run but its own entry: of a complete run, and of a stopped one."""

from __future__ import annotations

import json
import re
import signal
import time
from typing import Any

import pytest
from processes import CLI, ROOT, Run
from sight import PATIENT, agents, steps, until

from fsdp_pretrain.run.files import AppendFile, RunDir, stamp
from fsdp_pretrain.views.trackers.run_facts import read_facts

TOTAL = 12
FASTER = "optimizer.lr=2e-2"
BEFORE_ITS_PLACE = {"rank": 0, "verb": "rename", "path": r"lineage\.json$", "after": ""}
"""Kills a start that has loaded a checkpoint, before it is the head of the run."""
WAITS_WHILE_IT_LOADS = {**BEFORE_ITS_PLACE, "act": "await_file", "skip": 0, "times": 1}
_PROGRESS = "state level problems running step total_steps consumed tokens loss".split()


class Views:
    """A run, and what every view says of it."""

    def __init__(self, lab: Any, run_command: Run, name: str, **sections: dict[str, Any]) -> None:
        self.before: dict[str, Any] = {}
        self.lab, self._command, self.run = lab, run_command, lab.path / name / "run"
        train = {"duration": f"{TOTAL} steps", "micro_batch": 4, **sections.pop("train", {})}
        watchdog = {**PATIENT, "pace": False, **sections.pop("watchdog", {})}
        (lab.path / name).mkdir()
        self.config = lab.config(
            name,
            run={"dir": str(self.run)},
            train=train,
            checkpoint={"every": "5 steps"},
            record={"tensorboard": True, **sections.pop("record", {})},
            watchdog=watchdog,
        )

    def ask(self, *arguments: object) -> tuple[int, str]:
        done = self._command(CLI, *arguments)
        assert done.returncode in (0, 1, 2) and not done.stderr, (arguments, done.returncode, done.stderr)
        return done.returncode, done.stdout

    def status(self) -> tuple[int, dict[str, Any]]:
        code, shown = self.ask("status", self.run, "--json")
        return code, json.loads(shown)

    def said(self) -> dict[str, Any]:
        """All that is not about the newest start, and does not count the time that passes."""
        code, status = self.status()
        _, shown = self.ask("status", self.run)
        _, live = self.ask("watch", self.run, "--once")
        _, rows = self.ask("watch", self.run.parent, "--once")
        self.ask("report", self.run, "--out", self.lab.path / "page.html")
        header = re.search(r'<section class="run".*?</section>', (self.lab.path / "page.html").read_text(), re.DOTALL)
        lines = live.splitlines()
        return {
            "status": [code, shown.splitlines()[0], *(status[key] for key in _PROGRESS), status["alarms"]],
            "behind": status["verified_checkpoint"]["steps_behind"],
            "progress": "went back" not in shown and status["since_last_look"]["steps"] == 0,
            "watch": [lines[1], *(line for line in lines if line.startswith(("goodput", "alarms")))],
            "list": rows.splitlines()[2].split()[:4],  # without the age of the checkpoint
            "goodput": json.loads(self.ask("goodput", self.run, "--json")[1]),
            "report": _PASSING.sub("", header[0] if header else ""),
            "config": (self.run / "config.toml").read_bytes(),
            "tracker": read_facts(RunDir(self.run)),
        }

    def again(self, *overrides: str, ranks: int = 1, codes: tuple[int, ...]) -> str:
        """Start it once more; what the newest start said, when its watchdog has ended too."""
        job = self.lab.start(self.config, *overrides, ranks=ranks)
        assert job.wait() == list(codes), job.output()
        until(lambda: not agents(self.run), what="the end of the watchdog")
        return str(job.output())


@pytest.fixture(scope="module")
def complete(module_lab: Any, run_command: Run) -> Views:
    """A complete run."""
    run = Views(module_lab, run_command, "complete")
    run.again(codes=(0,))
    run.status()
    run.before = run.said()
    assert run.before["status"][:3] == [0, "complete: COMPLETE", "complete"]
    return run


KILLED = -signal.SIGKILL
_PASSING = re.compile(r"<div[^>]*><dt>(progress|checkpoint|heartbeat|disk|last start)</dt>.*?</div>", re.DOTALL)
"""Rows of the report's header that count the time since, or are about the newest start; `status` shows them too."""
DIED = "(its process|stopped before its end: rank 0) .*exited .*without reporting a reason"
"""Told by `status`, or by the watchdog if it was up before the rank died."""


@pytest.mark.parametrize(
    ("overrides", "codes", "trap", "told"),
    [
        (("record.console_every=7",), (0, 0), {}, "complete"),
        ((FASTER,), (78,), {}, "ended with exit 78: these changes affect what is learned"),
        ((), (KILLED,), BEFORE_ITS_PLACE, DIED),
    ],
    ids=["again on other ranks", "other rate", "killed while it loads"],
)
@pytest.mark.promise("complete")
def test_a_start_of_a_complete_run_changes_nothing(
    complete: Views,
    overrides: tuple[str, ...],
    codes: tuple[int, ...],
    trap: dict[str, Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = len(RunDir(complete.run).segments)
    if trap:
        monkeypatch.setenv("EXECUTE_FIRST", str(ROOT / "tests/traps.py"))
        monkeypatch.setenv("TRAP", json.dumps(trap))
    complete.again(*overrides, ranks=len(codes), codes=codes)
    monkeypatch.undo()
    assert len(RunDir(complete.run).segments) == starts + 1
    assert complete.said() == complete.before
    shown = complete.ask("status", complete.run)[1]
    assert re.search(rf"last start +{starts + 1} trained nothing: {told}", shown), shown


@pytest.mark.slow
@pytest.mark.promise("complete")
def test_launch_of_a_complete_run_changes_nothing(complete: Views, run_command: Run) -> None:
    for arguments, code in (((FASTER,), 78), ((), 0)):
        run_command(CLI, "launch", "--nproc-per-node", 1, complete.config, *arguments, expect=code)
        until(lambda: not agents(complete.run), what="the end of the watchdog")
        assert complete.said() == complete.before


@pytest.mark.promise("complete")
def test_an_alarm_of_a_start_that_trained_nothing_is_not_of_the_run(complete: Views) -> None:
    """Nor once another start has ended well."""
    journal = AppendFile(RunDir(complete.run).journal)
    for state in ("open", "resolved"):
        alarm = {"kind": "alarm", "key": "rank-died", "severity": "CRIT", "state": state, "text": state}
        journal.write(json.dumps({"time": stamp(time.time()), **alarm}))
    journal.close()
    complete.again(codes=(0,))
    assert complete.said() == complete.before


def test_a_complete_run_that_is_made_longer_goes_on(complete: Views) -> None:
    """After starts that trained nothing."""
    complete.again(FASTER, codes=(78,))
    complete.again("train.duration=16 steps", "optimizer.decay=12 steps", codes=(0,))
    code, status = complete.status()
    assert (code, status["state"], status["step"], status["total_steps"]) == (0, "complete", 16, 16)
    assert "before" not in json.loads((complete.run / "status.json").read_text())
    account = json.loads(complete.ask("goodput", complete.run, "--json")[1])
    assert account["tokens"] == 16 * 8 * 32 and account["states"]["idle"] > 0


@pytest.fixture(scope="module")
def stopped(module_lab: Any, run_command: Run) -> Views:
    """A run that was asked to stop."""
    train, off = {"duration": "100_000 steps"}, {"enabled": False}
    run = Views(module_lab, run_command, "stopped", train=train, watchdog=off, record={"tensorboard": False})
    job = module_lab.start(run.config)
    until(lambda: steps(run.run) >= 7, what=job.output)
    job.kill(number=signal.SIGTERM)
    assert job.wait() == [75], job.output()
    _, run.before = run.status()
    assert run.before["state"] == "stopped"
    assert run.before["step"] == run.before["verified_checkpoint"]["step"] >= 7
    return run


@pytest.mark.parametrize(
    ("overrides", "trap", "code", "level", "told"),
    [
        ((FASTER,), {}, 78, {2}, "ended with exit 78: these changes affect what is learned"),
        ((), BEFORE_ITS_PLACE, KILLED, {1, 2}, DIED),
        ((), WAITS_WHILE_IT_LOADS, 75, {1}, "stopped before its end: SIGTERM before training began"),
    ],
    ids=["refused", "killed while it loads", "asked to stop while it loads"],
)
def test_a_stopped_run_stays_stopped(
    stopped: Views,
    helpers: Any,
    overrides: tuple[str, ...],
    trap: dict[str, Any],
    code: int,
    level: set[int],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No progress is lost, and the status says what the newest start wanted."""
    before, run = stopped.before, stopped.run
    if trap:
        monkeypatch.setenv("EXECUTE_FIRST", str(ROOT / "tests/traps.py"))
        monkeypatch.setenv("TRAP", json.dumps({**trap, "file": str(run / "go on")}))
    job = stopped.lab.start(stopped.config, *overrides)
    if code == 75:
        loaded = len(helpers.journal(run, "resume"))
        until(lambda: len(helpers.journal(run, "resume")) > loaded, what=job.output)
        job.kill(number=signal.SIGTERM)
    assert job.wait() == [code], job.output()
    monkeypatch.undo()
    found, status = stopped.status()
    kept = [key for key in _PROGRESS if key not in ("level", "problems")]
    assert {key: status[key] for key in kept} == {key: before[key] for key in kept}
    assert status["verified_checkpoint"]["steps_behind"] == 0 == status["since_last_look"]["steps"]
    assert found in level and re.search(told, status["untrained"])
    problems = " and ".join(each["text"] for each in status["problems"])
    assert re.search(told, problems) and "stopped before its end: stopped on request (SIGTERM)" in problems
    shown = stopped.ask("status", run)[1]
    assert shown.startswith("stopped: STOPPED") and "went back" not in shown
    assert "tokens trained" not in helpers.journal(run)[-1]["text"]
