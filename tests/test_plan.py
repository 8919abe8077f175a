"""Preflight and bench: exact numbers, contradictions refused with 78."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_pretrain import models, optim
from fsdp_pretrain.config import load
from fsdp_pretrain.model_sections import LlamaModel
from fsdp_pretrain.parallel import materialise
from fsdp_pretrain.plan import count_parameters
from fsdp_pretrain.sections import OptimizerSection
from fsdp_pretrain.throughput import flops_per_token, peak_flops

pytestmark = pytest.mark.quick
Run = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parent.parent


def test_plan_of_a_configuration(lab: Any, run_command: Run) -> None:
    ramp = {"first": "2 samples", "by": "2 samples", "end": "80 samples"}
    config = lab.config(train={"duration": "4K tokens", "micro_batch": 1, "batch_ramp": ramp}, parallel={"shard": 2})
    done = run_command("fsdp_pretrain.cli", "plan", config, "--world-size", 2, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    config_model = LlamaModel(family="llama", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=512)
    model = materialise(models.build(config_model), 1, torch.device("cpu"))
    exact = sum(parameter.numel() for parameter in model.parameters())
    assert plan["parameters"] == exact
    optimizer = optim.build(model, OptimizerSection(lr=1e-3))
    state = [*model.parameters(), *(t for s in optim.state_by_name(model, optimizer).values() for t in s.values())]
    held = sum(tensor.numel() * tensor.element_size() for tensor in state)
    assert plan["checkpoint_bytes"] == pytest.approx(held, rel=1e-3)
    assert plan["global_batches"] == [2, 4, 6, 8] and plan["world_sizes"] == [1, 2]
    assert plan["world"]["micro_batches_per_step"] == [1, 2, 3, 4] and plan["world"]["replicas"] == 1
    assert plan["samples"] >= 125 and plan["tokens"] == plan["samples"] * 32
    steps = [row["step"] for row in plan["schedule"]]
    assert steps == sorted(steps) and steps[-1] == plan["steps"]
    shown = run_command("fsdp_pretrain.cli", "plan", config, "--world-size", 2).stdout
    assert f"{exact:_} parameters" in shown and "feasible: 1, 2" in shown


def test_plan_shows_the_shrink(lab: Any, run_command: Run) -> None:
    shrink = [{"at": "2 steps", "value": 0.1}, {"at": "12 steps", "value": 1.0}]
    config = lab.config(optimizer={"embedding_shrink": shrink})
    done = run_command("fsdp_pretrain.cli", "plan", config, "--at", "7 steps", "--json")
    assert json.loads(done.stdout)["embedding_shrink"] == pytest.approx(0.55)
    shown = run_command("fsdp_pretrain.cli", "plan", config).stdout.splitlines()
    assert next(line for line in shown if "consumed" in line).endswith("embedding_shrink")
    assert shown[-1].endswith("1.0000")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model.declared_params=57_000"], ["declared_params = 57_000", "51_360 parameters (-9.9%)"]),
        (["--world-size", "3"], ["do not split over 3 ranks", "feasible world sizes: 1, 2, 4"]),
        (["parallel.shard=3", "--world-size", "4"], ["parallel.shard = 3 does not divide a world of 4"]),
        (["train.duration=100"], ["bare number has no unit"]),
        (["--at", "soon"], ["--at: not a quantity"]),
        (["train.loss_scale.min=1e6"], ["min = 1000000.0 is above first = 65536.0"]),
        (
            ["optimizer.embedding_shrink=[{at='9 steps',value=1.0},{at='8 samples',value=0.1}]"],
            ["optimizer.embedding_shrink: a point at sample 8 follows one at sample 72"],
        ),
    ],
)
def test_contradictions_are_refused(lab: Any, run_command: Run, arguments: list[str], expected: list[str]) -> None:
    done = run_command("fsdp_pretrain.cli", "plan", lab.config(), *arguments)
    assert done.returncode == 78 and "Traceback" not in done.stderr
    assert all(part in done.stderr for part in expected), done.stderr


def test_the_schedule_at_a_point(lab: Any, run_command: Run) -> None:
    done = run_command("fsdp_pretrain.cli", "plan", lab.config(), "--at", "4 steps", "--json")
    row = json.loads(done.stdout)
    assert row == {
        "step": 4, "consumed": 32, "cursor": 32, "tokens": 1024, "batch": 8, "lr": 0.01, "sequence_length": 32,
        "shares": {"text": 1.0},
    }  # fmt: skip
    ramp = [{"at": "0 samples", "value": 1.0}, {"at": "60 samples", "value": 1.0}, {"at": "60 samples", "value": 3.0}]
    sources = [{"name": "a", "path": "/a", "weight": ramp}, {"name": "b", "path": "/b"}]
    config = lab.config("mixed", data={"sources": sources, "skip": ["8:40 samples", "72:80 samples"]})
    row = json.loads(run_command("fsdp_pretrain.cli", "plan", config, "--at", "4 steps", "--json").stdout)
    assert (row["consumed"], row["cursor"], row["shares"]) == (32, 64, {"a": 0.75, "b": 0.25})


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("[br]*/*.toml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_the_size_it_declares(path: Path) -> None:
    config = load(str(path))
    assert config.model.declared_params in (None, count_parameters(config.model))


def test_unknown_devices_have_no_peak() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    for unknown in ("cpu", "NVIDIA GeForce RTX 9999", "H100", ""):
        assert peak_flops(unknown) is None


def test_flops_reproduce_the_published_mfu_of_the_7b_run() -> None:
    """9,600 tokens/s on an H100 were published as 46% MFU (of the dense peak)."""
    model = LlamaModel(family="llama", layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000)
    assert 9600 * flops_per_token(6_738_415_616, model, 4096) / 989e12 == pytest.approx(0.455, abs=0.002)


def test_bench_measures_the_trainer(lab: Any, run_command: Run) -> None:
    done = run_command("fsdp_pretrain.bench", lab.config(), "--steps", 3, "--warmup", 1, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    parts = result["seconds"]
    assert result["mfu"] is None and result["device"] == "cpu"
    assert result["tokens_per_second"] == pytest.approx(256 / parts["iteration"], rel=0.5)
    assert parts["forward_backward"] > 0 and result["memory_bytes"] > 1e7
    assert not (lab.path / "run").exists()  # a benchmark leaves nothing behind
    assert run_command("fsdp_pretrain.bench", lab.config(), "train.micro_batch=3").returncode == 78
