"""The Aim mirror: complete, rebuildable, and harmless to training whatever happens to its repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from skips import needs_aim
from views import aim_runs

pytestmark = needs_aim


def read_back(repo: Path) -> dict[str, dict[int, float]]:
    """The curves of the only run in a repository."""
    (run,) = aim_runs(repo).values()
    assert (run["name"], run["config"]["train"]["duration"]) == ("run", "20 steps")
    curves: dict[str, dict[int, float]] = run["curves"]
    return curves


def followers(run: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        if "fsdp_pretrain.trackers.follow" in arguments and str(run) in arguments:
            found.append(process)
    return found


@pytest.mark.slow
def test_mirror_and_rebuild_agree_with_the_record(lab: Any, helpers: Any, tokenizer: Any, run_command: Any) -> None:
    books = helpers.corpus(lab.path / "books", tokenizer.encode([helpers.text(n, 40) for n in range(20)]), tokenizer)
    heldout = {"loss_on": [{"name": "books", "path": str(books)}], "loss_every": "5 steps"}
    config = lab.config(record={"aim": True}, eval=heldout)
    run = lab.path / "run"
    for duration in ("10 steps", "20 steps"):
        lab.train(config, f"train.duration={duration}", "optimizer.decay=20 steps")
        helpers.wait_for(lambda: not followers(run), what="the end of the follower")  # left behind by a busy machine
    assert not helpers.journal(run, "tracker-stopped"), helpers.journal(run, "tracker-stopped")
    expected = {record["step"]: record["loss"]["sum"] / record["loss"]["count"] for record in helpers.metrics(run)}
    live = read_back(run / "aim")
    assert live["loss/training"] == pytest.approx(expected)
    assert set(live["optimizer/grad_norm"]) == set(expected)
    measured = {r["step"]: r["heldout"]["books"] for r in helpers.metrics(run) if r["heldout"]}
    assert live["loss/heldout/books"] == pytest.approx(
        {step: loss["sum"] / loss["count"] for step, loss in measured.items()}
    )
    assert set(measured) == {5, 10, 15, 20}
    assert "speed/seconds/data" in live and "loss/training/text" not in live

    shutil.rmtree(run / "aim")  # losing the view loses nothing
    rebuilt = run_command("fsdp_pretrain.cli", "aim", run)
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert read_back(run / "aim") == live
    again = run_command("fsdp_pretrain.cli", "aim", run)  # tracking the same steps again duplicates nothing
    assert again.returncode == 0
    assert read_back(run / "aim") == live


@pytest.fixture(scope="module")
def reference(module_lab: Any, helpers: Any) -> list[Any]:
    """The curve without Aim."""
    module_lab.train(module_lab.config("run", train={"duration": "150 steps"}, checkpoint={"every": "100 steps"}))
    return list(helpers.losses(module_lab.path / "run"))


def kill_the_follower(run: Path) -> None:
    for process in followers(run):
        process.kill()


@pytest.mark.parametrize(
    "damage",
    [pytest.param(name, marks=pytest.mark.slow) for name in ("follower-killed", "locked", "cannot-be-made")],
)
def test_damage_is_one_journal_line(lab: Any, helpers: Any, reference: list[Any], damage: str, gates: Any) -> None:
    """Training is bitwise what it is without Aim, exits with 0, and the journal has exactly one line about it."""
    run, repo, holder = lab.path / "run", lab.path / "aim", None
    if damage == "cannot-be-made":
        (lab.path / "file").write_text("")
        repo = lab.path / "file/aim"
    config = lab.config(
        train={"duration": "150 steps"}, checkpoint={"every": "100 steps"}, record={"aim": True, "aim_repo": str(repo)}
    )
    if damage == "locked":  # once whole, then another process holds the very Aim run
        lab.train(config, "train.duration=5 steps", "optimizer.decay=150 steps")
        helpers.wait_for(lambda: not followers(run), what="the end of the first follower")
        holder = hold(run, repo)
    if damage == "follower-killed":
        (gate,) = gates(100)
    job = lab.start(config)
    if damage == "follower-killed":
        helpers.wait_for(lambda: (repo / ".aim/meta/chunks").is_dir(), what="the view")
        kill_the_follower(run)
        gate.touch()
    assert job.wait() == [0], job.output()
    helpers.wait_for(lambda: not followers(run), what="the end of the follower")
    if holder is not None:
        holder.kill()
    assert helpers.losses(run) == reference
    lines = helpers.journal(run, "tracker-stopped")
    assert len(lines) == 1 and "training goes on" in lines[0]["text"], lines


def hold(run: Path, repo: Path) -> subprocess.Popen[str]:
    """Open the run's Aim run for writing and keep it."""
    known = next((repo / ".aim/meta/chunks").iterdir()).name
    code = f"""
import time
from aim import Run
run = Run({known!r}, repo={str(repo)!r}, system_tracking_interval=None, capture_terminal_logs=False)
run.track(1.0, name="x", step=0)
print("held", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd="/")
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process
