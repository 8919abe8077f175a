"""Checkpoints of real jobs: damage is skipped and reported, a full disk is survived, no fallback to step 0."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from machines import Disk
from processes import Run
from records import flip

from fsdp_pretrain.checkpoint.delivery import root_cause
from fsdp_pretrain.checkpoint.store import Store, describe_file
from fsdp_pretrain.run import state_files


@pytest.fixture(scope="module")
def trained(module_lab: Any) -> Path:
    """40 steps on two ranks, saved at 10, 20, 30 and 40."""
    train = {"duration": "40 steps", "micro_batch": 4}
    config = module_lab.config("trained", train=train, checkpoint={"keep_last": 4})
    module_lab.train(config, ranks=2)
    run: Path = module_lab.path / "trained"
    return run


@pytest.fixture
def copy(module_lab: Any, trained: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(configuration, run directory) of a copy of the run as of step 30, to be damaged."""
    run = tmp_path / "copy"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "checkpoints/step-00000040")
    return module_lab.path / "trained.toml", run


@pytest.mark.quick
@pytest.mark.parametrize(
    ("errors", "named"),
    [
        ([ValueError("bad\nof old")], "ValueError: bad"),
        ([RuntimeError("loading"), ValueError("bad")], "ValueError: bad"),
        ([RuntimeError("loading"), OSError(28, "No space left"), KeyError("a")], "OSError: [Errno 28] No space left"),
        ([RuntimeError("loading"), TimeoutError()], "TimeoutError: "),
    ],
)
def test_a_report_names_what_lies_behind(errors: list[Exception], named: str) -> None:
    """The innermost error, or what the system said; raised from the other, or while it was handled."""
    for link in ("__context__", "__cause__"):
        for outer, inner in itertools.pairwise(errors):
            outer.__cause__ = outer.__context__ = None
            setattr(outer, link, inner)
        assert root_cause(errors[0]) == named


@pytest.mark.shows("F4", "F20")
@pytest.mark.parametrize("file", ["__1_0.distcp", "train_state.json", "tensors.json"])
@pytest.mark.promise("damage-named")
def test_damage_is_passed_over_loudly(
    lab: Any, copy: tuple[Path, Path], helpers: Any, run_command: Run, trained: Path, file: str
) -> None:
    """The older one is used, and the damaged step is saved again, the old one moved aside."""
    config, run = copy
    flip(run / "checkpoints/step-00000030" / file)
    listed = run_command("fsdp_pretrain.cli", "checkpoints", run, "verify", "--json", expect=2)
    assert [row["step"] for row in json.loads(listed.stdout) if row["problem"]] == [30]
    output = lab.train(config, f"run.dir={run}", ranks=2)
    assert re.search(f"passed over step-00000030: {re.escape(file)}.* its bytes are not", output), output
    resume = helpers.journal(run, "resume")[-1]
    assert resume["step"] == 20 and len(resume["passed_over"]) == 1
    assert helpers.losses(run) == helpers.losses(trained)
    assert Store(run / "checkpoints").find(30).verified  # saved again; the damaged one was moved aside
    assert len(list((run / "checkpoints/abandoned").iterdir())) == 1


@pytest.mark.shows("F4")
@pytest.mark.promise("never-fresh")
def test_nothing_valid_is_an_error_and_never_step_0(
    lab: Any, copy: tuple[Path, Path], trained: Path, helpers: Any
) -> None:
    """All are damaged."""
    config, run = copy
    for path in (run / "checkpoints").glob("step-*"):
        flip(path / "__0_0.distcp")
    before = len(helpers.metrics(run))
    output = lab.train(config, f"run.dir={run}", ranks=2, expect=93)
    assert "none of them valid" in output and "--allow-fresh" in output and output.count("error:") == 1
    assert len(helpers.metrics(run)) == before
    shorter = ("train.duration=5 steps", "optimizer.decay=40 steps")
    lab.train(config, f"run.dir={run}", *shorter, ranks=2, flags=("--allow-fresh",))
    # Parts of both checkpoints were loaded before the damage was found.
    assert helpers.losses(run) == helpers.losses(trained)[:5]


@pytest.mark.shows("F51")
@pytest.mark.promise("never-fresh")
def test_a_record_without_its_checkpoints_never_begins_at_step_0(
    lab: Any, copy: tuple[Path, Path], trained: Path, helpers: Any, run_command: Run
) -> None:
    """They are gone without a trace, but the record knows of them: 93, every time. With --allow-fresh a new line
    starts, and nothing of the old one is on it, not even if it comes back."""
    config, run = copy
    for path in (run / "checkpoints").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    status = run_command("fsdp_pretrain.cli", "status", run)
    assert status.returncode == 2 and "INCOMPLETE" in status.stdout and "step 40 was saved" in status.stdout
    before = sorted(run.rglob("*"))
    for _ in range(2):
        output = lab.train(config, f"run.dir={run}", ranks=2, expect=93)
        assert "a checkpoint of step 40 was saved, and there is none" in output and output.count("error:") == 1
        assert "--allow-fresh" in output and f"{run}/checkpoints" in output
        assert sorted(run.rglob("*")) == before
    shorter = (f"run.dir={run}", "train.duration=12 steps", "optimizer.decay=40 steps")
    lab.train(config, *shorter, ranks=2, flags=("--allow-fresh",))
    (fresh,) = helpers.journal(run, "fresh")
    assert fresh["lost"] == {"steps": 40, "tokens": 40 * 8 * 32} and not helpers.journal(run, "resume")
    assert [(record["step"], record["segment"]) for record in helpers.metrics(run)] == [(n + 1, 2) for n in range(12)]
    assert ": COMPLETE" in run_command("fsdp_pretrain.cli", "status", run, expect=0).stdout
    account = json.loads(run_command("fsdp_pretrain.cli", "goodput", run, "--json").stdout)
    assert (account["tokens"], account["tokens_lost"]) == (12 * 8 * 32, 40 * 8 * 32)
    assert json.loads(run_command("fsdp_pretrain.cli", "where", run, "--step", 3, "--json").stdout)["segment"] == 2
    shutil.copytree(trained / "checkpoints/step-00000030", run / "checkpoints/step-00000030")
    output = lab.train(config, *shorter, ranks=2)
    assert "passed over step-00000030: segment 2 went back to step 0" in output
    assert helpers.journal(run, "resume")[-1]["step"] == 12 and not helpers.journal(run, "checkpoint-missing")


def test_a_missing_checkpoint_is_told_once(lab: Any, copy: tuple[Path, Path], helpers: Any, run_command: Run) -> None:
    """The newest is gone, an older one exists: reported, and training continues. What was moved aside is not missed."""
    config, run = copy
    status = run_command("fsdp_pretrain.cli", "status", run)
    assert status.returncode == 2 and "step 40 was saved, and the newest there is of step 30" in status.stdout
    output = lab.train(config, f"run.dir={run}", ranks=2)
    assert "[checkpoint-missing] the record says that a checkpoint of step 40 was saved" in output
    assert helpers.journal(run, "resume")[-1]["step"] == 30
    run_command("fsdp_pretrain.cli", "status", run, expect=0)
    (run / "checkpoints/abandoned").mkdir()
    (run / "checkpoints/step-00000040").rename(run / "checkpoints/abandoned/step-00000040-by-hand")
    lab.train(config, f"run.dir={run}", ranks=2)
    assert len(helpers.journal(run, "checkpoint-missing")) == 1


def test_a_crash_before_the_first_checkpoint_starts_again(lab: Any, helpers: Any, run_command: Run) -> None:
    """Without intervention; the chronicle records the loss."""
    config, run = lab.config(train={"duration": "4000 steps"}, checkpoint={"every": "4000 steps"}), lab.path / "run"
    job = lab.start(config)
    helpers.wait_for(lambda: run.exists() and len(helpers.metrics(run)) >= 3, what="steps")
    job.kill()
    job.wait()
    steps = helpers.metrics(run)[-1]["step"]
    job = lab.start(config)
    (fresh,) = helpers.wait_for(lambda: helpers.journal(run, "fresh"), what="another start")
    assert fresh["lost"]["steps"] == steps and "no checkpoint had been saved" in fresh["text"]
    helpers.wait_for(lambda: [one["segment"] for one in helpers.metrics(run)][:1] == [2], what="a step")
    run_command("fsdp_pretrain.cli", "status", run, expect=0)
    job.kill(0, signal.SIGTERM)
    assert job.wait() == [75], job.output()


@pytest.mark.shows("F51")
@pytest.mark.parametrize(("rank", "begun"), [(0, True), (1, False)])
def test_a_host_that_does_not_see_the_run_is_named(
    lab: Any, monkeypatch: pytest.MonkeyPatch, copy: tuple[Path, Path], rank: int, begun: bool
) -> None:
    """The mount is missing on one host, where the directory is empty: 93, and nothing changes."""
    config, run = copy
    if not begun:
        shutil.rmtree(run)
    first = lab.path / "first.py"
    first.write_text(
        "import ctypes, os, subprocess\n"
        f"if os.environ['RANK'] == '{rank}':\n"
        "    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):\n"
        "        raise PermissionError('mounts of its own need root')\n"
        "    subprocess.run(['mount', '--make-rprivate', '/'], check=True)\n"
        f"    subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', {str(run.parent)!r}], check=True)\n"
    )
    monkeypatch.setenv("EXECUTE_FIRST", str(first))
    before = sorted(run.rglob("*"))
    output = lab.train(config, f"run.dir={run}", ranks=2, expect=93)
    assert f"the run directory {run} is gone on {os.uname().nodename}: there is no such directory" in output
    assert ("rank 1: " in output) == (rank == 1) and output.count("error:") == 1
    assert sorted(run.rglob("*")) == (before if begun else [run / "run_id"])


def test_another_model_does_not_load_silently(lab: Any, copy: tuple[Path, Path]) -> None:
    """If the identity check ever passes, names, shapes and dtypes are compared before anything is read."""
    config, run = copy
    for path in (run / "checkpoints").glob("*/train_state.json"):
        state = json.loads(path.read_text())
        state["identity"]["model"]["ffn"] = 96
        state_files.write(path, state)
        content = json.loads((path.parent / "manifest.json").read_text())
        content["files"] = [f for f in content["files"] if f["name"] != path.name] + [vars(describe_file(path))]
        state_files.write(path.parent / "manifest.json", content)
    output = lab.train(config, f"run.dir={run}", "model.ffn=96", ranks=2, expect=78)
    assert "does not fit this model" in output and "(32, 64)" in output and "(32, 96)" in output


def test_retention_of_a_real_run(lab: Any, helpers: Any) -> None:
    keep = {"keep_last": 2, "keep_every": ["12 steps", "2_560 tokens"]}  # ten steps, not a multiple of three
    config = lab.config(train={"duration": "30 steps"}, checkpoint={"every": "3 steps", **keep})
    lab.train(config)
    store = Store(lab.path / "run/checkpoints")
    assert [checkpoint.step for checkpoint in store.scan()] == [10, 12, 20, 24, 27, 30]
    assert all(checkpoint.verified for checkpoint in store.scan())
    assert helpers.journal(lab.path / "run", "checkpoint-deleted")


# ---------------------------------------------------------------- a full disk


@pytest.mark.shows("C3", "F1")
@pytest.mark.promise("failed-saves")
def test_a_full_disk_is_an_alarm_then_survived(lab: Any, helpers: Any, small_disk: Disk) -> None:
    """A neighbour fills the disk: saves fail and are reported until there is space."""
    disk = small_disk("12m")
    config = lab.config(
        train={"duration": "40_000 steps"}, checkpoint={"every": "5 steps", "max_failures": 1000, "retry": "0.1 s"}
    )
    run, hog = disk / "run", disk / "hog"
    job = lab.start(config, f"run.dir={run}", ranks=2)
    helpers.wait_for(lambda: helpers.journal(run, "checkpoint"), what="a first checkpoint")
    fill(disk, hog, leave=200_000)
    refused = lambda: [e for e in helpers.journal(run, "checkpoint-failed") if "needs" in e["text"]]  # noqa: E731
    failed = helpers.wait_for(refused, what="a save that is not begun")[0]
    assert "free" in failed["text"]
    at = failed["step"]
    helpers.wait_for(lambda: helpers.metrics(run)[-1]["step"] > at + 10, what="training going on")
    hog.unlink()
    helpers.wait_for(lambda: helpers.journal(run, "checkpoint")[-1]["step"] > at, what="a checkpoint after the alarm")
    job.kill(0, 15)
    assert job.wait() == [75, 75], job.output()
    assert not list((run / "checkpoints").glob("*writing*"))


def fill(disk: Path, hog: Path, leave: int) -> None:
    """Fill a file system up to `leave` bytes."""
    size = shutil.disk_usage(disk).free - leave
    with contextlib.suppress(OSError):  # the job writes too: an earlier full disk is fine
        hog.write_bytes(b"x" * max(0, size))


@pytest.mark.shows("C3", "F1")
@pytest.mark.promise("failed-saves")
def test_too_many_failed_saves_stop_with_93(lab: Any, helpers: Any, small_disk: Disk, run_command: Run) -> None:
    """And the last checkpoint loads."""
    disk = small_disk("12m")
    config = lab.config(
        train={"duration": "100 steps"}, checkpoint={"every": "5 steps", "max_failures": 3, "retry": "0.1 s"}
    )
    run, hog = disk / "run", disk / "hog"
    job = lab.start(config, f"run.dir={run}", "train.duration=4000 steps", ranks=2)
    helpers.wait_for(lambda: helpers.journal(run, "checkpoint"), what="a first checkpoint")
    fill(disk, hog, leave=200_000)
    assert job.wait() == [93, 93], job.output()
    assert "3 saves in a row failed" in job.output() and job.output().count("error:") == 1
    saved = helpers.journal(run, "checkpoint")[-1]["step"]
    run_command("fsdp_pretrain.cli", "status", run, expect=2)
    hog.unlink()
    shorter = (f"train.duration={saved + 2} steps", "optimizer.decay=4000 steps")
    lab.train(config, f"run.dir={run}", *shorter, ranks=2, flags=("--allow", "train.duration"))
    assert helpers.journal(run, "resume")[-1]["step"] == saved
