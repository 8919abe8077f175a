"""`[[timeline]]`: an entry is a restart with other settings, crashes and rollbacks change no value, resume rules."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.run.files import RunDir

SMALL = ("train.global_batch=8 samples", "train.micro_batch=8")
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


@pytest.mark.promise("schedules")
def test_another_batch_does_not_move_what_has_begun(lab: Any, helpers: Any) -> None:
    """A ramp that has ended and an entry behind would begin again: refused, and written in samples they stay."""
    train = {"duration": "12 steps", "global_batch": "4 samples"}
    ramp = {"at": "4 steps", "optimizer": {"lr_scale": {"to": 0.1, "over": "4 steps"}}}
    jump = {"at": "10 steps", "optimizer": {"weight_decay": 0.5}}
    optimizer = {"decay": "30 steps"}
    lab.train(lab.config(train=train, optimizer=optimizer, timeline=[jump, ramp]))
    longer = {**train, "duration": "14 steps"}
    config = lab.config(train=longer, optimizer=optimizer, timeline=[jump, ramp])
    refused = lab.train(config, *SMALL, flags=("--allow", "train.global_batch"), expect=78)
    for moved in (
        "optimizer.warmup: 4 steps: 16 -> 32 samples",
        "optimizer.decay: 30 steps: 120 -> 240 samples",
        "timeline: at 4 steps: optimizer.lr_scale = to 0.1 over 4 steps: 16:32 -> 32:64 samples",
        "timeline: at 10 steps: optimizer.weight_decay = 0.5: 40 -> 80 samples",
        "--allow optimizer.warmup --allow optimizer.decay --allow timeline",
    ):
        assert moved in refused
    ramp = {"at": "16 samples", "optimizer": {"lr_scale": {"to": 0.1, "over": "16 samples"}}}
    jump["at"] = "40 samples"
    optimizer = {"decay": "120 samples", "warmup": "16 samples"}
    config = lab.config(train=longer, optimizer=optimizer, timeline=[jump, ramp])
    lab.train(config, *SMALL, flags=("--allow", "train.global_batch"))
    last, first = helpers.metrics(lab.path / "run")[11:13]
    assert last["ramps"] | {"shares": 0} == first["ramps"] | {"shares": 0}
    assert (first["consumed"], first["ramps"]["lr_scale"], first["ramps"]["weight_decay"]) == (56, 0.1, 0.5)
