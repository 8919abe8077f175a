"""Checkpoints of real jobs: damage is skipped and reported, a full disk is survived, no fallback to step 0."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import Disk
from processes import Run
from torch.distributed.checkpoint.filesystem import FileSystemReader

from fsdp_pretrain.checkpoint.store import Store, describe_file
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.files import now


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


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def another_digest(path: Path) -> None:
    digest = json.loads(path.read_text())["state_digest"]
    replace(path, digest, f"{int(digest, 16) ^ 1:016x}")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit": (lambda p: flip(p / "__1_0.distcp"), "its bytes are not the ones that were written"),
    "truncated": (lambda p: (p / "__0_0.distcp").write_bytes(b"x"), "has 1 bytes"),
    "tensors": (lambda p: (p / "tensors.json").unlink(), "tensors.json is missing"),
    "tensors-bit": (lambda p: flip(p / "tensors.json"), "its bytes are not the ones that were written"),
    "metadata-bit": (lambda p: flip(p / ".metadata"), "its bytes are not the ones that were written"),
    "manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "segment": (
        lambda p: replace(p / "manifest.json", '"segment": 1', '"segment": 3'),
        "manifest.json is damaged: its values are not the ones",
    ),
    "digest": (lambda p: another_digest(p / "manifest.json"), "manifest.json is damaged: its values are not the ones"),
    "key": (
        lambda p: replace(p / "manifest.json", '"consumed"', '"consumee"'),
        "manifest.json is damaged: its values are not the ones",
    ),
    "moved": (
        lambda p: shutil.copyfile(p.parent / "step-00000020/manifest.json", p / "manifest.json"),
        "is that of step 20",
    ),
    "state": (lambda p: flip(p / "train_state.json"), "its bytes are not the ones that were written"),
    "half-deleted": (lambda p: [f.unlink() for f in p.glob("*.distcp")], "__0_0.distcp is missing"),
}


SLOW = {"truncated", "tensors", "half-deleted", "digest", "key", "moved"}  # detected like the others


@pytest.mark.shows("F4", "F20")
@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in DAMAGE]
)
@pytest.mark.promise("damage-named")
def test_damage_is_passed_over_loudly(
    lab: Any, copy: tuple[Path, Path], helpers: Any, run_command: Run, trained: Path, damage: str
) -> None:
    """The older one is used, and the damaged step is saved again, the old one moved aside."""
    config, run = copy
    act, text = DAMAGE[damage]
    act(run / "checkpoints/step-00000030")
    listed = run_command("fsdp_pretrain.cli", "checkpoints", run, "verify", "--json")
    assert listed.returncode == 2
    assert [row["step"] for row in json.loads(listed.stdout) if row["problem"]] == [30]
    output = lab.train(config, f"run.dir={run}", ranks=2)
    assert re.search(f"passed over step-00000030: (\\S+ )?{re.escape(text)}", output), output
    resume = helpers.journal(run, "resume")[-1]
    assert resume["step"] == 20 and len(resume["passed_over"]) == 1
    assert helpers.losses(run) == helpers.losses(trained)
    assert Store(run / "checkpoints").find(30).verified  # saved again; the damaged one was moved aside
    assert len(list((run / "checkpoints/abandoned").iterdir())) == 1


def test_touched_times_and_stray_files_do_not_matter(
    lab: Any, copy: tuple[Path, Path], helpers: Any, run_command: Run
) -> None:
    config, run = copy
    for path in (run / "checkpoints").rglob("*"):
        os.utime(path, (1, 1) if "10" in path.name else (2**31, 2**31))
    (run / "checkpoints/step-00000099").write_text("a stray file")
    (run / "checkpoints/step-00000077.writing-0123456789ab").mkdir()
    (run / "checkpoints/step-00000030/stray").write_text("x")
    rows = json.loads(run_command("fsdp_pretrain.cli", "checkpoints", run, "verify", "--json").stdout)
    assert [(row["step"], row["problem"]) for row in rows if row["problem"]] == [(99, "not a directory")]
    output = lab.train(config, f"run.dir={run}", ranks=2)
    assert helpers.journal(run, "resume")[-1]["step"] == 30
    assert "passed over step-00000099: not a directory" in output
    assert not (run / "checkpoints/step-00000077.writing-0123456789ab").exists()


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
    status = run_command("fsdp_pretrain.cli", "status", run)
    assert status.returncode == 0 and ": COMPLETE" in status.stdout
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
    assert run_command("fsdp_pretrain.cli", "status", run).returncode == 0
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
    assert run_command("fsdp_pretrain.cli", "status", run).returncode == 0
    job.kill(0, signal.SIGTERM)
    assert job.wait() == [75], job.output()


@pytest.mark.shows("F51")
@pytest.mark.parametrize(("rank", "begun"), [(0, True), (1, True), (1, False)])
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


def test_another_mesh_goes_on_with_the_same_loss_and_names(
    lab: Any, copy: tuple[Path, Path], trained: Path, helpers: Any
) -> None:
    config, run = copy
    shorter = ("train.duration=31 steps", "optimizer.decay=40 steps", "parallel.shard=1")
    lab.train(config, f"run.dir={run}", *shorter, ranks=2, flags=("--allow", "train.duration"))
    assert helpers.losses(run)[-1][1] == pytest.approx(helpers.losses(trained)[30][1], rel=1e-6)
    before, after = (
        set(FileSystemReader(path / f"checkpoints/step-{step:08}").read_metadata().state_dict_metadata)
        for path, step in ((trained, 30), (run, 31))
    )
    assert before == after
    names = after
    assert "model.blocks.0.attention.query.weight" in names
    assert "optim.blocks.0.attention.query.weight.exp_avg_sq" in names
    assert not [name for name in names if "_orig_mod" in name or "_checkpoint" in name]


@pytest.mark.shows("A22")
def test_hyperparameters_of_the_configuration_win(lab: Any, copy: tuple[Path, Path], helpers: Any) -> None:
    config, run = copy
    lab.train(
        config, f"run.dir={run}", "optimizer.lr=5e-3", "optimizer.min_lr=5e-3", ranks=2, flags=("--allow", "optimizer")
    )
    assert helpers.metrics(run)[-1]["lr"] == 5e-3
    assert "optimizer.lr: 0.01 -> 0.005" in helpers.journal(run, "resume")[-1]["changed"]


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
    config = lab.config(
        train={"duration": "30 steps"}, checkpoint={"every": "3 steps", "keep_last": 2, "keep_every": "12 steps"}
    )
    lab.train(config)
    store = Store(lab.path / "run/checkpoints")
    assert [checkpoint.step for checkpoint in store.scan()] == [12, 24, 27, 30]
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
    assert run_command("fsdp_pretrain.cli", "status", run).returncode == 2
    hog.unlink()
    shorter = (f"train.duration={saved + 2} steps", "optimizer.decay=4000 steps")
    lab.train(config, f"run.dir={run}", *shorter, ranks=2, flags=("--allow", "train.duration"))
    assert helpers.journal(run, "resume")[-1]["step"] == saved


@pytest.mark.shows("F2")
def test_enospc_in_the_middle_of_writing(lab: Any, helpers: Any, small_disk: Disk) -> None:
    """The space is gone when a save writes: partial files are deleted, training continues."""
    disk = small_disk("12m")
    config = lab.config(
        train={"duration": "4000 steps"}, checkpoint={"every": "3 steps", "max_failures": 1000, "retry": "0.1 s"}
    )
    run, hog = disk / "run", disk / "hog"
    job = lab.start(config, f"run.dir={run}", ranks=2)
    helpers.wait_for(lambda: helpers.journal(run, "checkpoint"), what="a first checkpoint")

    def fill_during_a_save() -> list[str]:
        if list((run / "checkpoints").glob("*writing*")):
            fill(disk, hog, leave=50_000)
            time.sleep(0.3)
            hog.unlink()
        return [entry["text"] for entry in helpers.journal(run, "checkpoint-failed") if "failed: rank" in entry["text"]]

    (text, *_) = helpers.wait_for(fill_during_a_save, what="a save that ran out of space while writing")
    assert "No space left on device" in text or "(0 B free)" in text  # torch's writer hides the cause
    at = helpers.metrics(run)[-1]["step"]
    helpers.wait_for(lambda: helpers.journal(run, "checkpoint")[-1]["step"] > at, what="a checkpoint after the alarm")
    job.kill(0, 15)
    assert job.wait() == [75, 75], job.output()
    assert not list((run / "checkpoints").glob("*writing*"))
    assert all(checkpoint.problem is None for checkpoint in Store(run / "checkpoints").scan())


@pytest.mark.shows("F2", "F22")
@pytest.mark.parametrize("background", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_one_rank_cannot_write(lab: Any, helpers: Any, background: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 cannot write beyond 1000 bytes: every rank drops the save within a step."""
    config = lab.config(
        train={"duration": "100000 steps"},
        checkpoint={"every": "2 steps", "max_failures": 1000, "retry": "0.1 s", "background": background == "true"},
    )
    run = lab.path / "run"
    monkeypatch.setenv("EXECUTE_FIRST", str(Path(__file__).with_name("faults.py")))  # steps longer than a check
    monkeypatch.setenv("FAULT", json.dumps({"rank": "all", "step": 0, "kind": "wait", "seconds": 0.3}))
    job = lab.start(config, ranks=2)
    helpers.wait_for(lambda: helpers.journal(run, "checkpoint"), what="a first checkpoint")
    resource.prlimit(job.ranks[1].pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    gone = ""

    def failed_once() -> Any:
        nonlocal gone
        gone = now() if list((run / "checkpoints").glob("*.writing-*")) else gone
        return helpers.journal(run, "checkpoint-failed")

    helpers.wait_for(failed_once, what="a failed save", every=0.001)
    helpers.wait_for(lambda: len(helpers.journal(run, "checkpoint-failed")) > 2, what="three failed saves")
    resource.prlimit(job.ranks[1].pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    at = helpers.metrics(run)[-1]["step"]
    helpers.wait_for(lambda: helpers.journal(run, "checkpoint")[-1]["step"] > at, what="a checkpoint after that")
    job.kill(0, 15)
    assert job.wait() == [75, 75], job.output()
    failed = helpers.journal(run, "checkpoint-failed")
    assert all("failed: rank 0: " in e["text"] or "failed: rank 1: " in e["text"] for e in failed), failed
    between = [r["step"] for r in helpers.metrics(run) if gone < r["time"] < failed[0]["time"]]
    assert len(between) <= 2, between  # the step under way when the writer ended, and the next
    assert not list((run / "checkpoints").glob("*writing*"))
    assert all(checkpoint.verified for checkpoint in Store(run / "checkpoints").scan())


@pytest.mark.promise("plain-dcp")
def test_torch_sees_the_same_weights(trained: Path) -> None:
    """The evaluation's loader, one process without a process group, reads what two ranks wrote."""
    from fsdp_pretrain import models
    from fsdp_pretrain.checkpoint.loading import Weights, load_rows
    from fsdp_pretrain.config.config import load

    checkpoint = Store(trained / "checkpoints").find(40)
    model = models.build(load(checkpoint.path / "config.toml").model).to_empty(device="cpu")
    load_rows(Weights(checkpoint, model), model)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert float(model.blocks[0].mlp.up.weight.detach().std()) > 0.01
