"""The Aim mirror: complete, rebuildable, and harmless to training whatever happens to its repository."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from skips import needs_aim

pytestmark = needs_aim


def read_back(repo: Path) -> dict[str, dict[int, float]]:
    """What Aim's own API returns: {"name context": {step: value}}, in a separate process."""
    code = f"""
import json
from aim.sdk.repo import Repo
repo = Repo({str(repo)!r})
out = {{}}
(run,) = list(repo.iter_runs())
for metric in run.metrics():
    steps, (values, *_) = metric.data.items_list()
    out[metric.name + " " + json.dumps(metric.context.to_dict())] = dict(zip(map(int, steps), map(float, values)))
print("RESULT" + json.dumps([run.name, run["config"]["train"]["duration"], out]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
    assert line is not None, done.stderr
    name, duration, out = json.loads(line.removeprefix("RESULT"))
    assert (name, duration) == ("run", "20 steps")
    return {key: {int(step): value for step, value in points.items()} for key, points in out.items()}


def followers(run: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        if "fsdp_pretrain.record.aim" in arguments and str(run) in arguments:
            found.append(process)
    return found


def test_mirror_and_rebuild_agree_with_the_record(lab: Any, helpers: Any, tokenizer: Any, run_command: Any) -> None:
    books = helpers.corpus(lab.path / "books", tokenizer.encode([helpers.text(n, 40) for n in range(20)]), tokenizer)
    heldout = {"loss_on": [{"name": "books", "path": str(books)}], "loss_every": "5 steps"}
    config = lab.config(record={"aim": True}, eval=heldout)
    run = lab.path / "run"
    for duration in ("10 steps", "20 steps"):
        lab.train(config, f"train.duration={duration}", "optimizer.decay=20 steps")
        helpers.wait_for(lambda: not followers(run), what="the end of the follower")  # left behind by a busy machine
    assert not helpers.journal(run, "aim-stopped"), helpers.journal(run, "aim-stopped")
    expected = {record["step"]: record["loss"]["sum"] / record["loss"]["count"] for record in helpers.metrics(run)}
    live = read_back(run / "aim")
    assert live['loss {"source": "all"}'] == pytest.approx(expected)
    assert set(live["grad_norm {}"]) == set(expected)
    measured = {r["step"]: r["heldout"]["books"] for r in helpers.metrics(run) if r["heldout"]}
    assert live['loss {"source": "books", "subset": "heldout"}'] == pytest.approx(
        {step: loss["sum"] / loss["count"] for step, loss in measured.items()}
    )
    assert set(measured) == {5, 10, 15, 20}
    assert 'seconds {"part": "data"}' in live and 'loss {"source": "text"}' not in live

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


def delete(repo: Path) -> None:
    shutil.rmtree(repo)


def replace_by_a_file(repo: Path) -> None:
    shutil.rmtree(repo)
    repo.write_text("not a directory")


def kill_the_follower(repo: Path) -> None:
    (process,) = followers(repo.parent / "run")
    process.kill()


DURING: dict[str, Callable[[Path], None]] = {
    "deleted": delete,
    "a-file": replace_by_a_file,
    "follower-killed": kill_the_follower,
}


DAMAGE = ["deleted"], ["locked", "a-file", "follower-killed", "read-only", "cannot-be-made"]


@pytest.mark.parametrize("damage", [*DAMAGE[0], *(pytest.param(name, marks=pytest.mark.slow) for name in DAMAGE[1])])
def test_damage_to_the_repository_is_one_journal_line(
    lab: Any, helpers: Any, reference: list[Any], damage: str, small_disk: Any, gates: Any
) -> None:
    """Training is bitwise what it is without Aim, exits with 0, and the journal has exactly one line about it."""
    run, repo, holder = lab.path / "run", lab.path / "aim", None
    if damage == "read-only":
        repo = small_disk("50m") / "aim"
    if damage == "cannot-be-made":
        (lab.path / "file").write_text("")
        repo = lab.path / "file/aim"
    config = lab.config(
        train={"duration": "150 steps"}, checkpoint={"every": "100 steps"}, record={"aim": True, "aim_repo": str(repo)}
    )
    if damage in (
        "locked",
        "read-only",
    ):  # once whole, then another process holds the very Aim run, or nothing can write
        lab.train(config, "train.duration=5 steps", "optimizer.decay=150 steps")
        helpers.wait_for(lambda: not followers(run), what="the end of the first follower")
        if damage == "locked":
            holder = hold(run, repo)
        else:
            mount = ["mount", "-o", "remount,ro,size=50m", str(repo.parent)]
            helpers.wait_for(lambda: subprocess.run(mount).returncode == 0, what="that nothing has a file open there")
    if damage in DURING:
        (gate,) = gates(100)
    job = lab.start(config)
    if damage in DURING:
        helpers.wait_for(lambda: (repo / ".aim").exists() and (run / "aim.json").exists(), what="the mirror")
        DURING[damage](repo)
        gate.touch()
    assert job.wait() == [0], job.output()
    helpers.wait_for(lambda: not followers(run), what="the end of the follower")
    if holder is not None:
        holder.kill()
    assert helpers.losses(run) == reference
    lines = helpers.journal(run, "aim-stopped")
    assert len(lines) == 1 and "training goes on" in lines[0]["text"], lines


def hold(run: Path, repo: Path) -> subprocess.Popen[str]:
    """Open the run's Aim run for writing and keep it."""
    known = json.loads((run / "aim.json").read_text())["hash"]
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


def test_asking_for_aim_without_having_it_is_refused(lab: Any, helpers: Any) -> None:
    """Refused before training starts, not at its end."""
    blocker = lab.path / "site/aim"
    blocker.mkdir(parents=True)
    code = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'aim' else real(name, *a)\n"
        "from fsdp_pretrain.train import main\n"
        f"sys.exit(main.main([{str(lab.config(record={'aim': True}))!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", env=helpers.environment()
    )
    assert done.returncode == 78, done.stderr
    assert "aim is not installed" in done.stderr and "fsdp-pretrain aim RUN" in done.stderr
