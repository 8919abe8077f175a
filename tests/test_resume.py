"""What a resume takes up and what it refuses: checkpoints in the fallback, changes in three classes, partial loads."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.jobs import due_jobs
from fsdp_pretrain.checkpoint.store import Store, directory_name
from fsdp_pretrain.checkpoint.stores import fallback, stores
from fsdp_pretrain.config import load
from fsdp_pretrain.fork import fork
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.rollback import rollback
from fsdp_pretrain.status import inspect

Run = Callable[..., subprocess.CompletedProcess[str]]
CLI = "fsdp_pretrain.cli"


@pytest.fixture(scope="module")
def trained(module_lab: Any) -> Path:
    """24 steps of 8 samples on one rank, saved every 6; a fallback is configured, and was not needed."""
    config = module_lab.config(
        "trained",
        train={"duration": "24 steps"},
        checkpoint={"every": "6 steps", "keep_last": 4, "fallback_dir": str(module_lab.path / "other")},
        eval={"every": "6 steps", "launch": False, "heldout": str(module_lab.heldout)},
    )
    module_lab.train(config)
    run: Path = module_lab.path / "trained"
    return run


@pytest.fixture
def copy(module_lab: Any, trained: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(configuration, run directory) of the run as if it had been trained in another place, to be changed."""
    run = tmp_path / "copy"
    shutil.copytree(trained, run)
    for path in (run / "config.toml", run / "segments/0001/config.toml"):
        text = path.read_text().replace(str(trained), str(run))
        path.write_text(text.replace(str(module_lab.path / "other"), str(tmp_path / "other")))
    config = tmp_path / "run.toml"
    shutil.copyfile(run / "config.toml", config)
    return config, run


@pytest.fixture
def spread(copy: tuple[Path, Path]) -> tuple[Path, Path, Path]:
    """(configuration, run directory, fallback) of a run whose steps 12, 18 and 24 went to the fallback."""
    config, run = copy
    place = fallback(load(config))
    assert place is not None
    for step in (12, 18, 24):
        shutil.move(run / "checkpoints" / directory_name(step), place.directory / directory_name(step))
    return config, run, place.directory


def steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in stores(RunDir(run)).scan()]


# ---------------------------------------------------------------- the fallback


def test_every_command_finds_what_lies_in_the_fallback(spread: tuple[Path, Path, Path], run_command: Run) -> None:
    config, run, other = spread
    listed = run_command(CLI, "checkpoints", run, "list")
    assert listed.returncode == 0 and listed.stdout.count(f"in the fallback {other}") == 3
    shutil.copytree(other / "step-00000024", run / "checkpoints/step-00000024")  # of two, the run's own is taken
    assert stores(RunDir(run)).find(24).path.parent == run / "checkpoints"
    (run / "checkpoints/step-00000024/manifest.json").unlink()
    assert stores(RunDir(run)).find(24).path.parent == other
    shutil.rmtree(run / "checkpoints/step-00000024")
    pinned = run_command(CLI, "checkpoints", run, "pin", 12, "--json")
    assert json.loads(pinned.stdout)[0]["fallback"] and (other / "step-00000012/pinned.json").exists()
    (other / "step-00000018/__0_0.distcp").write_bytes(b"x" * (other / "step-00000018/__0_0.distcp").stat().st_size)
    verified = run_command(CLI, "checkpoints", run, "verify", "--json")
    assert [row["step"] for row in json.loads(verified.stdout) if row["problem"]] == [18] and verified.returncode == 2
    report = inspect(RunDir(run))
    assert report.facts["verified_checkpoint"]["path"] == str(other / "step-00000024")
    assert any("is in the fallback" in text for _, text in report.problems)
    assert [job.checkpoint.step for job in due_jobs(RunDir(run), load(config))] == [6, 12, 18, 24]
    exported = run_command(CLI, "checkpoints", run, "export", 24, run.parent / "hf", timeout=300)
    assert exported.returncode == 0, exported.stderr


def test_a_fork_from_the_fallback_owns_its_checkpoint(spread: tuple[Path, Path, Path]) -> None:
    _, run, other = spread
    fork(RunDir(run), 18, run.parent / "new")
    shutil.rmtree(other)
    shutil.rmtree(run)
    assert steps(run.parent / "new") == [18]


def test_a_rollback_moves_aside_what_lies_in_the_fallback(
    lab: Any, spread: tuple[Path, Path, Path], helpers: Any, run_command: Run
) -> None:
    """Otherwise the next start would take the line that was left."""
    config, run, other = spread
    before = helpers.losses(run)
    done = run_command(CLI, "rollback", run, "--to", 12)
    assert done.returncode == 0 and str(other / "step-00000018") in done.stdout, done.stderr
    assert steps(run) == [6, 12]
    assert sorted(path.name[:13] for path in (other / "abandoned").iterdir()) == ["step-00000018", "step-00000024"]
    lab.train(config)
    assert helpers.journal(run, "resume")[-1]["step"] == 12
    assert helpers.losses(run) == before


def test_a_fallback_that_comes_back_after_a_rollback_does_not_bring_back_the_line(
    lab: Any, spread: tuple[Path, Path, Path], helpers: Any
) -> None:
    """Its storage was away when the run went back: a resume knows from the lineage what was left."""
    config, run, other = spread
    other.rename(other.with_name("unmounted"))
    rollback(RunDir(run), 6)
    other.with_name("unmounted").rename(other)
    output = lab.train(config, "train.duration=12 steps", "optimizer.decay=24 steps")
    resume = helpers.journal(run, "resume")[-1]
    assert resume["step"] == 6 and len(resume["passed_over"]) == 3
    assert "passed over step-00000024: segment 2 went back to step 6" in output
    assert steps(run) == [6, 12] and len(list((other / "abandoned").iterdir())) == 3
    (brought_back,) = (other / "abandoned").glob("step-00000018*")
    brought_back.rename(other / "step-00000018")
    rollback(RunDir(run), 18)  # going there on purpose is another matter
    lab.train(config, "train.duration=19 steps", "optimizer.decay=24 steps")
    assert helpers.journal(run, "resume")[-1]["step"] == 18


def test_a_fallback_that_is_no_longer_configured_is_still_known(
    lab: Any, spread: tuple[Path, Path, Path], helpers: Any
) -> None:
    config, run, other = spread
    config.write_text("".join(line for line in config.read_text().splitlines(True) if "fallback_dir" not in line))
    lab.train(config)
    assert helpers.journal(run, "resume")[-1]["step"] == 24
    stranger = run.with_name("stranger")
    shutil.copytree(run, stranger)
    assert steps(stranger) == [6] and steps(run) == [6, 12, 18, 24]
    run.rename(run.with_name("moved"))
    assert steps(run.with_name("moved")) == [6, 12, 18, 24]
    assert [checkpoint.step for checkpoint in Store(other).scan()] == [12, 18, 24]
