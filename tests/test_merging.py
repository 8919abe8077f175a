"""Merged checkpoints, and the texts that a model writes."""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from processes import Process, Run
from records import flip

from fsdp_pretrain import models
from fsdp_pretrain.checkpoint import dcp, merging
from fsdp_pretrain.checkpoint.loading import Weights
from fsdp_pretrain.checkpoint.manager import make_facts
from fsdp_pretrain.checkpoint.merging import coefficients
from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.checkpoint.store import Checkpoint, Store, verify_files
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.config.sections import MergeSection
from fsdp_pretrain.errors import CheckpointError, ConfigError, UserError
from fsdp_pretrain.eval import attempt
from fsdp_pretrain.parallel.mesh import SingleProcess
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.lock import hold


@pytest.fixture(scope="module")
def trained(module_lab: Any) -> Path:
    """Forty steps on a mesh of 2 x 2, saved at 10, 20, 30 and 40."""
    config = module_lab.config(
        "trained",
        train={"duration": "40 steps", "micro_batch": 2},
        checkpoint={"every": "10 steps", "keep_last": 4},
        parallel={"shard": 2},
        eval={"heldout": str(module_lab.heldout), "prompts": ["the run ", "文"]},
    )
    module_lab.train(config, ranks=4)
    run: Path = module_lab.path / "trained"
    saved = Store(run / "checkpoints")
    assert [saved.find(step).manifest().final for step in (30, 40)] == [False, True]
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def merged(run: Path, name: str) -> Checkpoint:
    (checkpoint,) = Store(run / "merged" / name / "checkpoints").scan()
    assert checkpoint.problem is None and checkpoint.verified
    return checkpoint


def weights(checkpoint: Checkpoint, config: Config) -> dict[str, torch.Tensor]:
    stored = Weights(checkpoint, models.build(config.model))
    return {name: stored[name] for name in stored.shapes}


@pytest.mark.quick
@pytest.mark.parametrize("count", [2, 3, 20])
def test_an_update_counts_as_under_a_learning_rate_that_decays(count: int) -> None:
    """Update i of n - 1 is in the checkpoints after it."""
    for kind, share in (("uniform", lambda x: 1 - x), ("decay", lambda x: 1 - math.sqrt(x))):
        values = coefficients(kind, count)  # type: ignore[arg-type]
        assert sum(values) == pytest.approx(1) and len(values) == count
        for update in range(1, count):
            assert sum(values[update:]) == pytest.approx(share(update / count))


@pytest.mark.promise("merge-exact")
@pytest.mark.parametrize(
    ("options", "steps", "shares"),
    [
        ([], [10, 20, 30, 40], [0.25] * 4),
        (["--last", "30 steps"], [20, 30, 40], [1 / 3] * 3),
        (["--last", "161 samples", "--every", "20 steps", "--weights", "decay"], [20, 40], [0.5**0.5, 1 - 0.5**0.5]),
        (["--last", f"{20 * 8 * 32 + 1} tokens"], [20, 30, 40], [1 / 3] * 3),
    ],
)
def test_a_merge_is_the_mean_in_fp64(
    run: Path, run_command: Run, options: list[str], steps: list[int], shares: list[float]
) -> None:
    done = run_command("fsdp_pretrain.cli", "checkpoints", run, "merge", *options, "--out", "mean", "--json", expect=0)
    checkpoint, config = merged(run, "mean"), load(str(run / "config.toml"))
    parents = [Store(run / "checkpoints").find(step) for step in steps]
    assert json.loads(done.stdout)["parents"] == [
        {"step": step, "weight": pytest.approx(share), "state_digest": parent.manifest().state_digest}
        for step, share, parent in zip(steps, shares, parents, strict=True)
    ]
    sources, result = [weights(parent, config) for parent in parents], weights(checkpoint, config)
    for name, tensor in result.items():
        parts = [share * source[name].numpy().astype(np.float64) for share, source in zip(shares, sources, strict=True)]
        mean = np.sum(parts, axis=0)
        assert tensor.dtype == torch.float32
        assert (np.abs(tensor.numpy() - mean) <= np.spacing(np.abs(mean).astype(np.float32))).all(), name
    assert checkpoint.step == 40 and not checkpoint.manifest().optimizer


@pytest.mark.promise("merge-exact")
def test_a_merge_is_verified_exported_evaluated_and_sampled_like_a_run(
    run: Path, run_command: Run, tmp_path: Path
) -> None:
    def call(module: str, *arguments: Any) -> str:
        return run_command(module, *arguments, timeout=120, expect=0).stdout

    call("fsdp_pretrain.cli", "checkpoints", run, "merge", "--last", "20 steps", "--out", "tail")
    tail = run / "merged" / "tail"
    shutil.rmtree(run / "checkpoints")  # it needs none of its parents
    assert "verified" in call("fsdp_pretrain.cli", "checkpoints", tail, "verify")
    call("fsdp_pretrain.cli", "checkpoints", tail, "export", 40, tmp_path / "hf", "--dtype", "fp32")
    scores = [
        json.loads(call("fsdp_pretrain.eval.cli", "run", path, "--tasks", "heldout_bpb", "--json", *options))["scores"]
        for path, options in ((tail, []), (tmp_path / "hf", ["--heldout", load(str(run / "config.toml")).eval.heldout]))
    ]
    assert scores[0]["heldout_bpb"]["bits_per_byte"] == pytest.approx(scores[1]["heldout_bpb"]["bits_per_byte"])
    texts = {
        call("fsdp_pretrain.cli", "sample", path, "the run", "--tokens", 12, "--seed", seed)
        for path in (tail, tmp_path / "hf")
        for seed in (1, 1, 2)
    }
    assert len(texts) == 2 and all(text.startswith("the run") and text.endswith("\n") for text in texts)
    greedy = call("fsdp_pretrain.cli", "sample", tail, "the run", "--tokens", 12, "--temperature", 0)
    assert greedy not in texts
    refused = run_command("fsdp_pretrain.cli", "sample", tail, "the run", "--tokens", 32)
    assert refused.returncode == 78 and "32 tokens do not fit" in refused.stderr
    refused = run_command("fsdp_pretrain.cli", "fork", tail, tmp_path / "forked", "--at", 40)
    assert refused.returncode == 78 and "RUN/merged/NAME, that is RUN" in refused.stderr


@pytest.mark.parametrize("error", [CheckpointError, ConfigError])
def test_a_parent_that_cannot_be_used_takes_no_scores_from_the_checkpoint(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[UserError]
) -> None:
    """Damaged, or saved by other model code."""
    section = load(str(run / "config.toml")).eval.model_copy(
        update={"tasks": ["heldout_bpb"], "limit": 1, "prompts": [], "merge": MergeSection(last="20 steps")}
    )

    def unusable(*arguments: object) -> NoReturn:
        raise error("its code computes something else")

    monkeypatch.setattr(merging, "Mean", unusable)
    results = attempt._evaluate(run / "checkpoints/step-00000040", section, tmp_path)
    assert results.scores["heldout_bpb"]["bits_per_byte"] > 0
    assert [(verdict.ok, "its code computes" in verdict.text) for verdict in results.verdicts] == [(False, True)]


@pytest.mark.slow
@pytest.mark.promise("merge-exact")
def test_the_schedule_evaluates_the_merge_beside_the_checkpoint(lab: Any, run_command: Run) -> None:
    config = lab.config(
        train={"duration": "20 steps"},
        checkpoint={"every": "10 steps", "keep_last": 4},
        eval={
            "every": "10 steps",
            "heldout": str(lab.heldout),
            "tasks": ["heldout_bpb"],
            "launch": False,
            "merge": {"last": "10 steps", "every": "5 steps"},  # saved for it
            "prompts": ["the run "],
            "limit": 4,
        },
    )
    lab.train(config, ranks=2)
    run = lab.path / "run"
    (run / "checkpoints" / "step-00000005" / "manifest.json").unlink()  # step 10 has none to be merged with
    done = run_command("fsdp_pretrain.eval.cli", "watch", run, "--once", timeout=120, expect=0)
    early, late = (
        json.loads(next((run / "evals" / f"step-{step:08d}").glob("*/results.json")).read_text()) for step in (10, 20)
    )
    assert [*early["scores"]] == ["heldout_bpb"] and [*late["scores"]] == ["heldout_bpb", "heldout_bpb@merge"]
    assert ["step-00000005 is damaged" in verdict["text"] for verdict in early["verdicts"]] == [True]
    assert [verdict["ok"] for verdict in late["verdicts"]] == [True] and done.stderr.count("ALARM") == 1
    assert early["texts"]["the run "] and early["texts"] != late["texts"]
    merge = ("fsdp_pretrain.cli", "checkpoints", run, "merge", "--last", "10 steps", "--out", "by-hand")
    run_command(*merge, expect=0)
    hand = run_command("fsdp_pretrain.eval.cli", "run", run / "merged" / "by-hand", "--json", timeout=120)
    assert json.loads(hand.stdout)["scores"]["heldout_bpb"] == late["scores"]["heldout_bpb@merge"]
    shown = run_command("fsdp_pretrain.eval.cli", "report", run).stdout
    assert "heldout_bpb@merge" in shown and "| the run " in shown


def test_a_parent_that_retention_deletes_meanwhile_is_named(run: Path, tmp_path: Path) -> None:
    """It cannot be read: nothing is wrong with what is written."""
    parent, config, world = Store(run / "checkpoints").find(20), load(str(run / "config.toml")), SingleProcess()
    model, target = models.build(config.model), tmp_path / "target"
    source = Weights(parent, model)
    shutil.rmtree(parent.path)
    with pytest.raises(CheckpointError, match=r"cannot read embedding\.weight of .*step-00000020") as raised:
        dcp.save(
            world,
            Store(target),
            make_facts(config, world, TrainState()),
            state={"model": model.state_dict()},
            fetch=lambda key: source[key.removeprefix("model.")],
            train_state="{}",
            config="",
        )
    assert "retention" in raised.value.remedy and not list(target.iterdir())


def test_a_merge_that_is_killed_leaves_nothing_half(
    run: Path, start_command: Callable[..., Process], run_command: Run
) -> None:
    rng, command = random.Random(3), ("checkpoints", run, "merge", "--out", "mean")
    store = Store(run / "merged" / "mean" / "checkpoints")
    for _ in range(6):
        process = start_command("fsdp_pretrain.cli", *command)
        until = time.monotonic() + rng.uniform(0.0, 4.0)
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        process.signal(signal.SIGKILL)
        process.wait()
        if found := store.scan():
            assert found[0].problem is None
            break
    else:
        run_command("fsdp_pretrain.cli", *command, expect=0)
    merged(run, "mean")
    assert "nothing is overwritten" in run_command("fsdp_pretrain.cli", *command, expect=78).stderr


def test_of_two_merges_of_a_name_one_is_written(run: Path, start_command: Callable[..., Process]) -> None:
    """At the same time; the other is refused, and takes nothing of the first away."""
    command = ("fsdp_pretrain.cli", "checkpoints", run, "merge", "--out", "mean")
    with hold(RunDir(run / "merged" / "mean"), "merge"):
        process = start_command(*command)
        assert process.wait() == 78 and "merged/mean is held by merge on host" in process.output()[1]
        assert "wait for its end. " in process.output()[1]  # `control` reaches no merge
    both = [start_command(*command) for _ in range(2)]
    assert sorted(process.wait() for process in both) == [0, 78], [process.output() for process in both]
    found = Store(run / "merged" / "mean" / "checkpoints").find(40)
    assert not verify_files(found.path, found.files())
    assert merged(run, "mean").manifest().step == 40


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ("", ["--last", "10 steps"], "1 checkpoint to merge"),
        ("", ["--every", "7 steps"], "0 checkpoints to merge"),
        ("", ["--every", "0 steps"], "'0 steps' is nothing"),
        ("", ["--out", "../up"], "cannot be the name of a folder"),
        ("", ["--last", "10"], "not a quantity with a unit"),
        ("flip", [], "is damaged: __"),
        ("truncate", [], "is damaged: __"),
        ("suspect", [], "was saved during an incident: a spike"),
        ("other", [], "is not of the model of"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    run: Path, lab: Any, run_command: Run, change: str, options: list[str], reason: str
) -> None:
    victim = run / "checkpoints" / "step-00000020"
    part = next(victim.glob("__*.distcp"))
    if change == "flip":
        flip(part)
    elif change == "truncate":
        part.write_bytes(part.read_bytes()[:-1])
    elif change == "suspect":
        manifest = Store(run / "checkpoints").find(20).manifest()
        state_files.write(victim / "manifest.json", manifest.model_copy(update={"suspect": "a spike"}))
    elif change == "other":
        other = lab.config("other", model={"ffn": 96}, train={"duration": "20 steps"})
        lab.train(other)
        shutil.rmtree(victim)
        shutil.move(lab.path / "other" / "checkpoints" / victim.name, victim)
    out = [] if "--out" in options else ["--out", "mean"]
    done = run_command("fsdp_pretrain.cli", "checkpoints", run, "merge", *options, *out)
    assert done.returncode == 78 and reason in done.stderr, (done.returncode, done.stderr)
    assert not (run / "merged").exists()
