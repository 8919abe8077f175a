"""`[[timeline]]`: an entry is a restart with other settings, crashes and rollbacks change no value, resume rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.record.files import RunDir

OTHER = {
    "optimizer": {
        "lr": 5e-3, "min_lr": 5e-4, "weight_decay": 0.3, "betas": [0.8, 0.97], "embedding_shrink": 0.5,
        "shrink_paths": "input",
    },
    "train": {"grad_clip": 0.05, "z_loss": 1e-3},
}  # fmt: skip


def digest(run: Any) -> str:
    return Store(RunDir(run).checkpoints).scan()[-1].manifest().state_digest


@pytest.mark.shows("B13")
def test_an_entry_is_a_restart_with_other_settings(lab: Any, helpers: Any) -> None:
    common = {
        "model": {"tied_head": True},
        "train": {"duration": "6 steps"},
        "optimizer": {"decay": "12 steps"},
        "checkpoint": {"every": "6 steps"},
    }
    plain = lab.config("plain", **common)
    lab.train(plain)
    behind = "timeline=[{at='3 steps',optimizer={weight_decay=0.3}}]"
    refused = lab.train(plain, "train.duration=12 steps", behind, expect=78)
    assert "timeline: absent -> at 3 steps: optimizer.weight_decay = 0.3" in refused
    assert "--allow timeline" in refused
    settings = [f"{section}.{key}={value!r}" for section, keys in OTHER.items() for key, value in keys.items()]
    lab.train(plain, "train.duration=12 steps", *settings, flags=("--allow", "optimizer", "--allow", "train"))
    entry = {"at": "6 steps", "reason": "a restart", **OTHER}
    common["train"]["duration"] = "12 steps"
    lab.train(lab.config("steered", **common, timeline=[entry]))
    plain_run, run = lab.path / "plain", lab.path / "steered"
    assert helpers.losses(run) == helpers.losses(plain_run)
    assert digest(run) == digest(plain_run)
    first, last = (helpers.metrics(run)[index]["ramps"] for index in (5, 6))
    assert first["betas"] == [0.9, 0.95] and last["betas"] == [0.8, 0.97] and last["shrink_paths"] == "input"
    assert helpers.metrics(run)[6]["z_loss"] is not None and helpers.metrics(run)[5]["z_loss"] is None


@pytest.fixture(scope="module")
def eventful(module_lab: Any) -> Path:
    """Configuration of a run with every kind of change, some of them running at any step; trained to its end."""
    timeline = [
        {"at": "3 steps", "optimizer": {"lr": {"to": 5e-3, "over": "14 steps"}}},
        {"at": "37 samples", "optimizer": {"weight_decay": {"to": 0.4, "over": "100 samples"}}},
        {"at": "1000 tokens", "optimizer": {"betas": [0.8, 0.99]}},
        {
            "at": "5 steps",
            "optimizer": {"lr_scale": {"from": 0.0, "to": 1.0, "over": "9 steps"}, "shrink_paths": "input"},
        },
        {"at": "6 steps", "train": {"z_loss": {"from": 0, "to": 1e-2, "over": "9 steps"}, "grad_clip": 0.95}},
        {"at": "9 steps", "optimizer": {"embedding_shrink": {"from": 0.2, "to": 1.0, "over": "6 steps"}}},
        {"at": "15 steps", "optimizer": {"min_lr": {"to": 5e-4, "over": "4 steps"}}},
        {"at": "16 steps", "checkpoint": {"every": "2 steps"}},
    ]
    path: Path = module_lab.config(
        "eventful", timeline=timeline, model={"tied_head": True}, checkpoint={"every": "4 steps", "keep_last": 20}
    )
    module_lab.train(path)
    return path


def story(helpers: Any, run: Path) -> list[tuple[Any, ...]]:
    """What every step did, to the bit."""
    return [(r["step"], r["lr"], r["ramps"], r["clip"], r["loss"], r["grad_norm"]) for r in helpers.metrics(run)]


@pytest.mark.shows("A12", "A15")
@pytest.mark.slow
def test_crashes_inside_every_ramp_change_nothing(
    module_lab: Any, eventful: Path, helpers: Any, gates: Any, tmp_path: Path
) -> None:
    """Killed with SIGKILL inside the ramps and the new warm-up, at places that are no checkpoints."""
    run, whole = tmp_path / "killed", module_lab.path / "eventful"
    for step in (7, 11, 14, 19):
        gates(step)
        job = module_lab.start(eventful, f"run.dir={run}")
        helpers.wait_for(lambda step=step: len(helpers.metrics(run)) >= step - 3, what=f"step {step - 3}")
        job.kill()
        job.wait()
        gates()
    module_lab.train(eventful, f"run.dir={run}")
    assert story(helpers, run) == story(helpers, whole) and len(story(helpers, run)) == 20
    planned = [load(eventful).schedule.at(step) for step in range(1, 21)]  # what `plan` shows, to the bit
    for row, (_, lr, ramps, *_) in zip(planned, story(helpers, run), strict=True):
        assert row["lr"] == lr and {key: json.loads(json.dumps(row[key])) for key in ramps if key != "shares"} == {
            key: value for key, value in ramps.items() if key != "shares"
        }
    assert digest(run) == digest(whole)
    assert len({ramps["weight_decay"] for _, _, ramps, *_ in story(helpers, run)}) > 10
