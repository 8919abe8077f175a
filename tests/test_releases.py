"""Every later version can show and resume what a release has written. See docs/training.md for the rule."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import CLI
from released import ARCHIVES, unpack

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.metrics import last_records, read_metrics


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release's run, read only."""
    place = tmp_path_factory.mktemp("release")
    unpack(request.param, place)
    return place


@pytest.fixture
def copy(release: Path, tmp_path: Path) -> Path:
    """A copy of the run, for changes."""
    shutil.copytree(release / "run", tmp_path / "run")
    shutil.copyfile(release / "rollback.json", tmp_path / "rollback.json")
    (tmp_path / "run/lock.json").unlink()  # its job was killed on another host: 90 seconds of silence would show it
    return tmp_path / "run"


@pytest.mark.shows("D20")
@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (("status",), 2, "step 24 verified"),
        (("checkpoints", "list"), 0, "pinned"),
        (("checkpoints", "verify"), 0, "verified"),
        (("alarms",), 2, "rank-died"),
        (("journal",), 0, "a person's line"),
        (("goodput",), 0, "goodput"),
        (("where", "--step", 10, "--text"), 0, "the"),
        (("rollback", "--to", 16, "--dry-run"), 0, "would go back"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_every_command_shows_it(
    release: Path, run_command: Any, arguments: tuple[object, ...], code: int, shown: str
) -> None:
    verb, *more = arguments
    done = run_command(CLI, verb, release / "run", *more)
    assert done.returncode == code, done.stdout + done.stderr
    assert shown in done.stdout and "damaged" not in done.stdout + done.stderr


def test_its_evaluations_are_shown(release: Path, run_command: Any) -> None:
    done = run_command("eval.cli", "report", release / "run", "--json")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [8, 16] and not done.stderr


def test_it_is_acknowledged_forked_and_exported(copy: Path, tmp_path: Path, run_command: Any) -> None:
    assert run_command(CLI, "ack", copy, "rank-died").returncode == 0
    for arguments in (
        ("fork", copy, "--at", 16, tmp_path / "new"),
        ("checkpoints", copy, "export", 16, tmp_path / "hf"),
    ):
        done = run_command(CLI, *arguments)
        assert done.returncode == 0, done.stderr
    assert [record.step for record in read_metrics(RunDir(tmp_path / "new"))] == list(range(1, 17))


def config_of(release: Path, run: Path) -> tuple[Path, str]:
    return release / "run.toml", f"run.dir={run}"


@pytest.mark.shows("C2")
def test_it_goes_on_where_it_was(release: Path, copy: Path, lab: Any, helpers: Any) -> None:
    """It resumes from the last checkpoint and repeats the steps that were recorded after it."""
    before = {record.step: json.loads(record.to_line()) for record in read_metrics(RunDir(copy))}
    last = last_records(RunDir(copy).segment(4))[-1]
    assert last.step > 24
    end = f"train.duration={last.step} steps"
    output = lab.train(*config_of(release, copy), end, flags=("--allow", "train.duration"))
    (resume,) = [entry for entry in helpers.journal(copy, "resume") if entry["segment"] == 5]
    assert resume["step"] == 24 and resume["passed_over"] == [] and "as saved" in resume["text"], output
    after = helpers.metrics(copy)
    assert [record["step"] for record in after] == list(range(1, last.step + 1))
    for record in after[24:]:
        old = before[record["step"]]
        assert [record[key] for key in ("data_digest", "cursor", "lr")] == [
            old[key] for key in ("data_digest", "cursor", "lr")
        ]
        assert record["loss"]["sum"] == pytest.approx(old["loss"]["sum"], rel=1e-5)  # to the bit on the same machine
    assert all(item.problem is None for item in Store(copy / "checkpoints").scan())
    entries = helpers.wait_for(lambda: helpers.journal(copy, "alarm")[1:], what="the end of the alarm of before")
    assert [(entry["key"], entry["state"]) for entry in entries] == [("rank-died", "resolved")]


def test_a_rollback_that_it_decided_is_carried_out(
    release: Path, copy: Path, lab: Any, helpers: Any, run_command: Callable[..., Any]
) -> None:
    shutil.copyfile(copy.parent / "rollback.json", copy / "rollback.json")
    shown = run_command(CLI, "status", copy)
    assert "a rollback is under way" in shown.stdout
    output = lab.train(*config_of(release, copy), "train.duration=10 steps", flags=("--allow", "train.duration"))
    assert "finished the rollback" in output and not (copy / "rollback.json").exists()
    assert helpers.journal(copy, "resume")[-1]["step"] == 8
    assert [record["step"] for record in helpers.metrics(copy)] == list(range(1, 11))
    assert helpers.journal(copy, "rollback")[-1]["reason"] == "decided, not done"
