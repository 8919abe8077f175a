"""`bench --peers`: all sides train the same model on the same tokens, and are compared within rounds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_pretrain import models
from fsdp_pretrain.bench import peers, steps
from fsdp_pretrain.bench.measured import MeasuredSteps, Spread
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.config.sections import ParallelSection
from fsdp_pretrain.hf import layout as hf_layout
from fsdp_pretrain.parallel import fsdp, mesh

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    with mesh.connect(ParallelSection()) as connected:
        yield connected


def initial(config: Config) -> Any:
    """Our model with its initial values, not sharded."""
    return fsdp.materialise(models.build(config.model), config.run.seed, CPU)


def test_transformers_computes_our_function(lab: Any, world: Any) -> None:
    """With our weights: the same logits."""
    pytest.importorskip("transformers")
    config = load(lab.config(model={"norm_eps": 1e-3, "rope_base": 500.0, "vocab_multiple": 128, "vocab": 500}))
    network, ours = peers.NETWORKS["transformers"](config, world), initial(config)
    values = dict(ours.named_parameters())
    values = {weight.theirs: values[weight.ours[0]] for weight in hf_layout.weights(config.model, list(values))}
    network.module.load_state_dict(values)
    tokens = torch.randint(config.model.vocab, (3, config.data.sequence_length))
    with torch.no_grad():
        torch.testing.assert_close(network.logits(tokens), ours(tokens), rtol=1e-4, atol=1e-5)
    assert len(network.blocks) == config.model.layers


@pytest.mark.parametrize(
    ("precision", "tolerance", "apart"), [("fp32", 1e-5, 1e-3), pytest.param("bf16", 5e-3, 0.3, marks=pytest.mark.slow)]
)
def test_the_plain_loop_trains_as_the_trainer_does(
    lab: Any, world: Any, precision: str, tolerance: float, apart: float
) -> None:
    """From the same values, on the same tokens, in the same precision: the same losses, and about the same weights."""
    path = lab.config(
        train={"precision": precision, "grad_clip": 0.05},
        optimizer={"curve": "constant", "warmup": None, "min_lr": None, "lr": 0.02, "weight_decay": 0.3},
    )
    config = load(path)
    trainer = steps.build(config, world)
    network, start = peers.NETWORKS["plain"](config, world), initial(config)
    network.module.load_state_dict(dict(start.named_parameters()))
    loop = peers.PlainLoop(network, config, steps.RandomSteps(config, world), CPU, fsdp.compute_dtype(config, CPU))
    theirs = []
    for _ in range(8):
        trainer.step()
        loop.step()
        theirs.append(loop.loss())
    records = [record for _, record in trainer.read(keep=0)]
    assert theirs == pytest.approx([record.loss.mean for record in records], rel=tolerance)
    assert all(record.clip < 1 for record in records)
    before, after = dict(start.named_parameters()), dict(network.module.named_parameters())
    moved = difference = 0.0
    for name, parameter in trainer.model.named_parameters():
        ours = mesh.local_part(parameter).detach()
        moved += float((ours - before[name].detach()).abs().sum())
        difference += float((ours - after[name].detach().float()).abs().sum())
    assert moved > 1 and difference < apart * moved


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sides_take_turns_and_one_that_fails_ends_no_other(
    lab: Any, run_command: Any, helpers: Any, tmp_path: Path
) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/__init__.py").write_text("raise RuntimeError('of that build')\n")
    counts = ("--rounds", 2, "--steps", 2, "--warmup", 1, "--json")
    extra = {"PYTHONPATH": helpers.python_path(tmp_path)}
    done = run_command("fsdp_pretrain.bench", lab.config(), "--peers", *counts, timeout=280, **extra, expect=1)
    result = json.loads(done.stdout)
    assert "of that build" in result["failed"]["transformers"]
    assert [list(each) for each in result["rounds"]] == [["ours", "plain"], ["plain", "ours"]]
    seconds = [{name: times["speed"]["seconds_per_step"] for name, times in each.items()} for each in result["rounds"]]
    ratios = [each["plain"] / each["ours"] for each in seconds]
    rounds = [{name: MeasuredSteps.from_json(times) for name, times in each.items()} for each in result["rounds"]]
    assert peers.Comparison(rounds).ratio("plain") == Spread(statistics.median(ratios), min(ratios), max(ratios))
    found = result["rounds"][0]
    assert found["plain"]["loss"] == pytest.approx(found["ours"]["loss"], rel=0.1)
    assert found["plain"]["memory"] > 1e7 and seconds[0]["plain"] > 0
    assert found["plain"]["speed"]["tokens_per_second"] == pytest.approx(256 / seconds[0]["plain"])
    assert not (lab.path / "run").exists()


def test_what_others_do_not_compute_is_refused(lab: Any, run_command: Any) -> None:
    overrides = ("data.attention=document", "parallel.recompute=1", "optimizer.kind=muon")
    done = run_command("fsdp_pretrain.bench", lab.config(), *overrides, "--peers")
    named = "data.attention = document, parallel.recompute, optimizer.kind = muon"
    assert done.returncode == 78 and named in done.stderr
