"""What operators of published runs had to do by hand, and no other test asks for; see docs/operations.md."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
from processes import CLI, Run
from sight import tree

from fsdp_pretrain.config.config import load
from fsdp_pretrain.data.packing.opening import open_packer
from fsdp_pretrain.data.text.tokenizer import Tokenizer

END = ("train.duration=20 steps", "optimizer.decay=20 steps")


@pytest.fixture(scope="module")
def steered(module_lab: Any, run_command: Run) -> Path:
    """20 steps: to 8; to 14 with half the rate; back to 8, and from there on two ranks with a fifth of it."""
    run = module_lab.path / "run"
    config = module_lab.config(train={"duration": "8 steps", "micro_batch": 4}, checkpoint={"every": "4 steps"})
    module_lab.train(config, END[1])
    half = ("--allow", "optimizer.lr", "--reason", "the loss falls slowly")
    module_lab.train(config, "train.duration=14 steps", END[1], "optimizer.lr=5e-3", flags=half)
    run_command(CLI, "rollback", run, "--to", 8, "--set", "optimizer.lr=2e-3", "--reason", "a spike", expect=0)
    module_lab.train(config, *END, ranks=2)
    return run  # type: ignore[no-any-return]


def planned(run_command: Run, config: Path, step: int, *overrides: str) -> dict[str, Any]:
    """The schedule of a configuration at a step."""
    done = run_command(CLI, "plan", config, *overrides, "--at", f"{step} steps", "--json", expect=0)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.shows("A35")
def test_the_record_has_what_was_in_force_at_every_step(steered: Path, helpers: Any, run_command: Run) -> None:
    """Each start keeps the configuration it trained with, to the last bit, whatever was changed after it."""
    records = helpers.metrics(steered)
    assert [(r["step"], r["segment"]) for r in records] == [(n, 1) for n in range(1, 9)] + [
        (n, 4) for n in range(9, 21)
    ]
    for record in [records[step - 1] for step in (1, 4, 8, 9, 14, 20)]:
        row = planned(run_command, steered / f"segments/{record['segment']:04d}/config.toml", record["step"])
        assert [row[key] for key in ("lr", "batch", "cursor")] == [record[key] for key in ("lr", "batch", "cursor")]
    told = [entry["text"] for kind in ("changed", "rollback") for entry in helpers.journal(steered, kind)]
    assert any("optimizer.lr: 0.01 -> 0.005" in text and "the loss falls slowly" in text for text in told), told
    (back,) = helpers.journal(steered, "rollback")
    assert "optimizer.lr: 0.005 -> 0.002" in back["changes"] and back["lost"]["steps"] == 6


@pytest.mark.shows("B15")
def test_a_run_starts_again_from_its_folder_alone(steered: Path, module_lab: Any, helpers: Any) -> None:
    again = module_lab.path / "again"
    module_lab.train(steered / "segments/0001/config.toml", f"run.dir={again}")
    assert helpers.losses(again) == helpers.losses(steered)[:8]


@pytest.mark.shows("B3")
def test_no_curve_depends_on_the_times_of_files(steered: Path, tmp_path: Path, helpers: Any, run_command: Run) -> None:
    """BigScience cut its event files by their times after every rollback."""
    copy = shutil.copytree(steered, tmp_path / "run")
    for path in copy.rglob("*"):
        os.utime(path, (0, random.Random(path.name).randrange(10**9)))
    assert helpers.metrics(copy) == helpers.metrics(steered)
    listed = [run_command(CLI, "checkpoints", run, "list", "--json").stdout for run in (copy, steered)]
    assert [row["step"] for row in json.loads(listed[0])] == [row["step"] for row in json.loads(listed[1])] != []


@pytest.mark.shows("D5")
def test_a_checkpoint_is_as_large_as_its_tensors(steered: Path, run_command: Run) -> None:
    """Ten times larger once, when slices were saved with all of what they were cut from."""
    done = run_command(CLI, "plan", steered / "config.toml", "--json")
    for step in steered.glob("checkpoints/step-*"):
        written = sum(path.stat().st_size for path in step.glob("*.distcp"))
        assert 1 < written / json.loads(done.stdout)["checkpoint_bytes"] < 1.5  # a kilobyte per small tensor


@pytest.mark.shows("A13")
def test_a_fork_may_read_the_rest_in_another_order(steered: Path, tmp_path: Path, run_command: Run) -> None:
    """GLM-130B's branch of text alone, shuffled anew: the same samples up to the fork, others after it."""
    before, new = tree(steered), tmp_path / "text"
    done = run_command(CLI, "fork", steered, "--at", 8, new, "--set", 'data.reshuffle=["64 samples"]')
    assert done.returncode == 0 and tree(steered) == before, done.stderr
    ours, theirs = (open_packer(load(run / "config.toml")).pack(0, 160).tokens for run in (new, steered))
    assert (ours[:64] == theirs[:64]).all() and (ours[64:] == theirs[64:]).all(axis=1).mean() < 0.05


@pytest.mark.shows("A10")
@pytest.mark.promise("data-changes")
def test_a_source_that_was_replaced_is_named(lab: Any, helpers: Any) -> None:
    """GLM-130B's multi-task data were the wrong ones until somebody looked."""
    corpus = lab.path / "corpus"
    shutil.copytree(lab.corpus, corpus)
    config = lab.config(data={"sources": [{"name": "tasks", "path": str(corpus)}]}, train={"duration": "4 steps"})
    lab.train(config, END[1])
    shutil.rmtree(corpus)
    documents = [[random.Random(n).randrange(20, 200) for _ in range(100)] for n in range(200)]
    helpers.corpus(corpus, documents, Tokenizer.load(lab.tokenizer))
    output = lab.train(config, *END, expect=78)
    assert "tasks" in output and "with another model or other data" in output and "Traceback" not in output
    assert helpers.metrics(lab.path / "run")[-1]["step"] == 4


@pytest.mark.quick
@pytest.mark.shows("A20")
def test_ramps_that_have_ended_need_no_edit(lab: Any, run_command: Run) -> None:
    """GLM-130B took flags out of its start once their ramps were over."""
    weight = [{"at": "0 samples", "value": 0.0}, {"at": "8192 samples", "value": 3.0}]
    shrink = {"at": "2 steps", "optimizer": {"embedding_shrink": {"from": 0.1, "to": 1.0, "over": "998 steps"}}}
    configs = {}
    for name, ramp, timeline in (("ended", weight, [shrink]), ("none", 3.0, [])):
        sources = [{"name": "a", "path": "/a"}, {"name": "b", "path": "/b", "weight": ramp}]
        configs[name] = lab.config(name, data={"sources": sources}, train={"duration": "3000 steps"}, timeline=timeline)
    rows = {name: planned(run_command, config, 300) for name, config in configs.items()}
    assert rows["ended"]["shares"] != rows["none"]["shares"] and rows["ended"]["embedding_shrink"] < 1
    for step in (1025, 3000):
        ended, none = (planned(run_command, config, step) for config in configs.values())
        assert ended == {"embedding_shrink": 1.0, **none}


@pytest.mark.slow
@pytest.mark.shows("A19")
def test_a_noisy_template_is_seen_in_its_loss(lab: Any, helpers: Any, run_command: Run) -> None:
    """Two sources, of which one has noise for answers. Named by its loss, and by the worst samples."""
    noise, tokenizer = random.Random(1), Tokenizer.load(lab.tokenizer)
    words = sorted(
        {*open_packer(load(lab.config("plain"))).pack(0, 300).tokens[:, :-1].ravel().tolist()} - {tokenizer.eod}
    )
    noisy = helpers.corpus(lab.path / "noisy", [noise.choices(words, k=200) for _ in range(60)], tokenizer)
    sources = [{"name": "good", "path": str(lab.corpus)}, {"name": "noisy", "path": str(noisy)}]
    train = {"duration": "40 steps", "global_batch": "16 samples", "micro_batch": 16}
    lab.train(lab.config(data={"sources": sources}, train=train, checkpoint={"every": "20 steps"}))
    records = helpers.metrics(lab.path / "run")[-20:]
    means = [{name: loss["sum"] / loss["count"] for name, loss in record["sources"].items()} for record in records]
    apart = [mean["noisy"] - mean["good"] for mean in means]
    assert statistics.mean(apart) > 5 * statistics.stdev(apart) / len(apart) ** 0.5
    shown = run_command("fsdp_pretrain.eval.cli", "samples", lab.path / "run", "--step", 40, "--json")
    worst = json.loads(shown.stdout)["samples"][:4]
    assert shown.returncode == 0 and {sample["source"] for sample in worst} == {"noisy"}, shown.stderr
