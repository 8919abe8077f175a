"""The live view: in a real terminal, in a file, of one run and of many."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import numpy as np
import pytest
import records
from laboratory import Lab
from processes import Run
from records import step_record
from sight import contents, until
from terminals import needs_tmux, terminal  # noqa: F401  (a fixture)

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.run import journal, lineage
from fsdp_pretrain.run.files import RunDir, now
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.run.step_record import LossSum
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.views.watch.charts import draw
from fsdp_pretrain.views.watch.following import RunFollower
from fsdp_pretrain.watchdog.notify.alarms import Alarms, alarms_file

TOTAL = 400


class Written:
    """A run as a trainer writes it, in this process: it looks alive as long as the test is."""

    def __init__(self, lab: Lab, name: str = "small", below: str = "") -> None:
        self.run = RunDir(lab.path / below / name)
        self.config = load(lab.config(name, run={"dir": str(self.run.path)}))
        self.step = 0
        self.start()

    def start(self) -> None:
        """A start from the last step, or from the beginning."""
        segment = self.run.new_segment()
        number = int(segment.name)
        lineage.record(segment, parent=number - 1 or None, step=self.step, kind="start")
        self.run.config.write_text(self.config.to_toml())
        self.recorder = Recorder(self.run, segment, name=self.run.path.name, console_every=10**6, total_steps=TOTAL)
        self.recorder.status(force=True, state="starting")

    def train(self, steps: int, **changes: Any) -> None:
        for self.step in range(self.step + 1, self.step + steps + 1):  # noqa: B020
            loss = LossSum(sum=256 * (2.0 + 8.0 / self.step), count=256)
            heldout = {"text": LossSum(sum=3.5 * 4, count=4)} if self.step % 50 == 0 else None
            self.recorder.step(step_record(self.step, loss=loss, heldout=heldout, **changes), target=TOTAL)
        self.recorder.status(force=True)

    def save(self) -> None:
        records.commit(Store(self.run.checkpoints), self.step, committed=now(), segment=self.recorder.number)
        text = f"step-{self.step:08d}: 7 bytes"
        self.recorder.event("checkpoint", text, step=self.step, seconds=0.5, bytes=7)

    def alarm(self, key: str, severity: Severity = Severity.CRIT) -> None:
        alarms = Alarms(alarms_file(self.run), on_change=lambda *_: None)
        alarms.open(key, severity, f"the summary of {key}, which says in numbers how bad it is")
        alarms.close()


@pytest.fixture
def written(lab: Lab) -> Written:
    """150 steps of 400, a checkpoint of step 100, an evaluation, two alarms."""
    made = Written(lab)
    made.train(100)
    made.save()
    made.train(50)
    scores = {"cloze": {"acc": 0.25, "acc_stderr": 0.02}, "bpb": {"bits_per_byte": 1.5}}
    journal.add(made.run, "eval", "cloze acc 0.25", step=100, scores=scores, tasks="cloze+bpb")
    made.alarm("disk/run")
    made.alarm("pace", Severity.WARN)
    return made


# ------------------------------------------------------------------ in a terminal


@needs_tmux
def test_a_run_in_a_terminal(written: Written, terminal: Any) -> None:  # noqa: F811
    """Follows it, fits every size, writes nothing, leaves the terminal as it was."""
    run, before = written.run, contents(written.run.path)
    shown = terminal("watch", run.path)
    screen = shown.shows(
        "small  RUNNING",
        "150 of 400",
        "alarms 2",
        "CRIT disk/run",
        "100 verified",
        "cloze acc 0.25±0.02",
        "how bad it is",
    )
    lines = screen.splitlines()
    assert len(lines) == 24 and max(map(len, lines)) <= 80
    for part in (
        "loss 2.053",
        "gradient norm",
        "tokens/s",
        "step       0.5s",
        "held-out   text 3.5",
        "goodput",
        "ETA 2m05s",
    ):
        assert part in screen, screen
    shown.resize(80, 14)
    until(lambda: len(shown.screen().splitlines()) == 14 and "eval @100" not in shown.screen(), what=shown.screen)
    assert contents(run.path) == before
    shown.resize(200, 50)
    wide = shown.shows("pace", "the summary of disk/run", "\x20" * 100)
    assert len(wide.splitlines()) == 50 and 150 < max(map(len, wide.splitlines())) <= 200
    written.train(10)
    shown.shows("160 of 400", "loss 2.05", "160")
    shutil.move(run.path, run.path.with_name("elsewhere"))
    shown.shows("NO ANSWER", "is gone; waiting for it")
    shutil.move(run.path.with_name("elsewhere"), run.path)
    shown.shows("RUNNING", "160 of 400")
    shown.press("C-c")
    assert "-echo" not in shown.shows("left with 130", "echo") and shown.is_clean()


# ------------------------------------------------------------------ not in a terminal


@pytest.mark.shows("B17")
def test_a_page_in_a_file(written: Written, run_command: Run) -> None:
    """One page, no escape codes, the exit code of `status`, nothing written; as wide as COLUMNS says."""
    before = contents(written.run.path)
    for arguments, width in ((["watch"], 160), (["watch", "--once"], 80)):
        columns = "" if width == 160 else str(width)
        done = run_command("fsdp_pretrain.cli", *arguments, written.run.path, COLUMNS=columns)
        assert done.returncode == 2 and "\x1b" not in done.stdout, done
        assert done.stdout.startswith("small  RUNNING  start 1") and "CRIT disk/run" in done.stdout
        assert width - 20 < max(map(len, done.stdout.splitlines())) <= width
    assert run_command("fsdp_pretrain.cli", "watch", written.run.path, COLUMNS="12").returncode == 2
    assert contents(written.run.path) == before


def test_scores_that_a_rollback_left_behind_are_not_shown(written: Written, run_command: Run) -> None:
    journal.add(written.run, "eval", "cloze acc 0.75", step=150, scores={"cloze": {"acc": 0.75}}, tasks="cloze+bpb")
    for shown in (True, False):
        page = run_command("fsdp_pretrain.cli", "watch", written.run.path, COLUMNS="160").stdout
        assert ("150  cloze acc 0.75" in page) == shown and "100  cloze acc 0.25" in page, page
        journal.add(written.run, "rollback", "back to step 100", step=100)


def test_runs_in_a_file(lab: Lab, written: Written, run_command: Run) -> None:
    """Wherever below the directory they are."""
    other = Written(lab, "other", "below/deeper")
    other.train(20)
    other.recorder.status(force=True, state="complete")
    (lab.path / "below/corpus/shards").mkdir(parents=True)
    done = run_command("fsdp_pretrain.cli", "watch", lab.path, COLUMNS="120")
    title, _, worst, best = done.stdout.splitlines()
    assert done.returncode == 2 and "\x1b" not in done.stdout and "2 runs" in title
    assert worst.split()[:3] == ["small", "running", "150/400"]
    assert "2m05s" in worst and "2 alarms: disk/run, pace" in worst
    assert best.split()[:3] == ["below/deeper/other", "complete", "20/400"] and "never" in best


def test_starts_that_wait_or_died_are_shown_plainly(lab: Lab, run_command: Run) -> None:
    made = Written(lab)

    def page() -> str:
        text: str = run_command("fsdp_pretrain.cli", "watch", made.run.path).stdout
        return text

    assert "small  STARTING" in page() and f"waiting for the first step of {TOTAL}" in page()
    made.train(3, loss_scale=None)
    gone = subprocess.Popen(["true"])
    gone.wait()
    made.recorder.status(force=True, pid=gone.pid)
    assert "NOT RUNNING" in page() and "exited without reporting a reason" in page() and "ETA" not in page()
    made.recorder.status(force=True, host="another-node")
    assert "small  RUNNING" in page() and "on another-node" in page()
    made.recorder.status(force=True, state="failed", exit_intent={"code": 93, "reason": "the disk\nis full"})
    assert "FAILED" in page() and "exit 93: the disk is full" in page()


# ------------------------------------------------------------------ what is read, and how it is drawn


def test_the_kept_line_is_followed(lab: Lab) -> None:
    """A resume replaces what came after it; what happened is seen at once."""
    made = Written(lab)
    made.train(300)
    follower = RunFollower(made.run)

    def column(name: str) -> list[float]:
        line = follower.poll().line
        assert line is not None
        return [float(value) for value in line.columns[name]]

    assert column("step") == list(range(1, 301))
    made.step = 100  # resumes from there
    made.start()
    made.train(10, grad_norm=9.0)
    made.recorder.event("note", "something happened")
    assert column("step") == list(range(1, 111))
    assert set(column("grad_norm")[:100]) == {0.5} and set(column("grad_norm")[100:]) == {9.0}
    line = follower.poll().line
    assert line is not None and line.breaks == [100]


@pytest.mark.quick
@pytest.mark.parametrize("columns", [60, 2000])
def test_a_spike_of_one_step_stays(columns: int) -> None:
    values = np.full(100_000, 2.0)
    values[70_123], values[80_321], values[81_000:81_010] = 9.0, 1.0, np.nan
    drawn = draw(values, columns, 4)
    assert drawn is not None and (drawn.low, drawn.high, len(drawn.rows[0])) == (1.0, 9.0, columns)
    assert [at for at, char in enumerate(drawn.rows[0]) if char != " "] == [70_123 * columns // 100_000]
    low = 80_321 * columns // 100_000
    assert [at for at, char in enumerate(drawn.rows[3]) if char != drawn.rows[3][0]] in ([low], [low, low + 1])
