"""Preflight and bench: exact numbers, contradictions refused with 78."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Run
from pydantic import TypeAdapter

from data.corpus.manifest import read_manifest
from fsdp_pretrain import models
from fsdp_pretrain.cli import main
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.model import LlamaModel, Model
from fsdp_pretrain.config.sections import OptimizerSection
from fsdp_pretrain.errors import ConfigError, Exit
from fsdp_pretrain.parallel import optimizer as optim
from fsdp_pretrain.parallel.fsdp import materialise
from fsdp_pretrain.plan import plan
from fsdp_pretrain.plan import warnings as advice
from fsdp_pretrain.plan.flops import peak_flops
from fsdp_pretrain.plan.plan import count_parameters
from fsdp_pretrain.units import human_count

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parent.parent


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`fsdp-pretrain plan` in this process: exit code and both outputs."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["fsdp-pretrain", "plan", *map(str, arguments)])
        capsys.readouterr()
        try:
            code = main.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return run


def test_plan_of_a_configuration(lab: Any, run_command: Run) -> None:
    ramp = {"first": "2 samples", "by": "2 samples", "duration": "80 samples"}
    config = lab.config(train={"duration": "4K tokens", "micro_batch": 1, "batch_ramp": ramp}, parallel={"shard": 2})
    done = run_command("fsdp_pretrain.cli", "plan", config, "--world-size", 2, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    config_model = LlamaModel(family="llama", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=512)
    model = materialise(models.build(config_model), 1, torch.device("cpu"))
    exact = sum(parameter.numel() for parameter in model.parameters())
    assert result["parameters"] == exact
    optimizer = optim.AdamW(model, OptimizerSection(lr=1e-3))
    state = [*model.parameters(), *(t for s in optimizer.state_by_name().values() for t in s.values())]
    held = sum(tensor.numel() * tensor.element_size() for tensor in state)
    assert result["checkpoint_bytes"] == pytest.approx(held, rel=1e-3)
    assert result["global_batches"] == [2, 4, 6, 8] and result["world_sizes"] == [1, 2]
    assert result["world"]["micro_batches_per_step"] == [1, 2, 3, 4] and result["world"]["replicas"] == 1
    held_by_rank = result["world"]["state_bytes"]
    assert held_by_rank == pytest.approx((held + 4 * exact) / 2, rel=1e-3)  # two shards
    parts = result["world"]["memory"]
    assert parts["total"] == sum(size for part, size in parts.items() if part not in ("total", "available"))
    assert result["samples"] >= 125 and result["tokens"] == result["samples"] * 32
    steps = [row["step"] for row in result["schedule"]]
    assert steps == sorted(steps) and steps[-1] == result["steps"]
    shown = run_command("fsdp_pretrain.cli", "plan", config, "--world-size", 2).stdout
    assert f"{exact:_} parameters" in shown and "feasible: 1, 2" in shown


@pytest.mark.shows("B14", "D2")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model.declared_params=57_000"], ["declared_params = 57_000", "51_360 parameters (-9.9%)"]),
        (["--world-size", "3"], ["do not split over 3 ranks", "feasible world sizes: 1, 2, 4"]),
        (["parallel.shard=3", "--world-size", "4"], ["parallel.shard = 3 does not divide the world size 4"]),
        (["--seconds-per-step", "2"], ["--seconds-per-step needs a positive time and --world-size"]),
        (["--seconds-per-step", "2", "--world-size", "2", "--at", "4 steps"], ["exclude each other"]),
        (["--device", "NVIDIA A100-SXM4-80GB"], ["what a rank needs: give --world-size as well"]),
        (["optimizer.betas=[nan,0.9]", "optimizer.lr=inf"], ["2 problems", "optimizer.betas.0 = nan", "lr = inf"]),
        (["train.duration=100"], ["bare number has no unit"]),
        (["--at", "soon"], ["--at: not a quantity"]),
        (["--at", "21 steps"], ["after the end of the run, which has 20 steps: 160 samples, 5_120 tokens"]),
        (["--at", "0 steps"], ["before the first step of the run"]),
        (
            ["optimizer.embedding_shrink=[{at='9 steps',value=1.0},{at='8 samples',value=0.1}]"],
            ["optimizer.embedding_shrink", "should be a valid number"],
        ),
    ],
)
def test_contradictions_are_refused(lab: Any, command: Command, arguments: list[str], expected: list[str]) -> None:
    code, _, errors = command(lab.config(), *arguments)
    assert code == 78 and all(part in errors for part in expected), errors


def test_the_schedule_at_a_point(lab: Any, command: Command) -> None:
    assert json.loads(command(lab.config(), "--at", "4 steps", "--json")[1]) == {
        "step": 4, "consumed": 32, "cursor": 32, "tokens": 1024, "batch": 8, "lr": 0.01, "sequence_length": 32,
        "shares": {"text": 1.0},
    }  # fmt: skip
    places = "1 samples,160 samples", "1 steps,20 steps", "1 tokens,5120 tokens"
    for at in places:
        rows = json.loads(command(lab.config(), "--at", at, "--json")[1])
        assert [(row["step"], row["consumed"]) for row in rows] == [(1, 8), (20, 160)]
    ramp = [{"at": "0 samples", "value": 1.0}, {"at": "60 samples", "value": 1.0}, {"at": "60 samples", "value": 3.0}]
    sources = [{"name": "a", "path": "/a", "weight": ramp}, {"name": "b", "path": "/b"}]
    config = lab.config("mixed", data={"sources": sources, "skip": ["8:40 samples", "72:80 samples"]})
    row = json.loads(command(config, "--at", "4 steps", "--json")[1])
    assert (row["consumed"], row["cursor"], row["shares"]) == (32, 64, {"a": 0.75, "b": 0.25})


def test_epochs(lab: Any, run_command: Run) -> None:
    """Of every source, against their tokens."""
    corpus = read_manifest(lab.corpus)
    stream = corpus.tokens + corpus.documents  # a separator after each
    sources = [{"name": "a", "path": str(lab.corpus), "weight": 3.0}, {"name": "b", "path": str(lab.corpus)}]
    config = lab.config(data={"sources": sources}, train={"duration": "2M tokens"})
    done = run_command("fsdp_pretrain.cli", "plan", config, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for name, share in (("a", 0.75), ("b", 0.25)):
        source = result["sources"][name]
        epochs = 2e6 * share / stream
        assert source["tokens"] == corpus.tokens
        assert source["epochs"] == pytest.approx(epochs, rel=0.01) and epochs > 4
    (warning,) = [text for text in result["warnings"] if text.startswith("a has ")]
    assert f"{result['sources']['a']['epochs']:.3g} times" in warning and "2305.16264" in warning
    shown = run_command("fsdp_pretrain.cli", "plan", config, "train.duration=1K tokens").stdout
    assert f"data        b: {human_count(corpus.tokens)} tokens, read 0.0" in shown and " is read " not in shown
    elsewhere = run_command(
        "fsdp_pretrain.cli", "plan", lab.config("away", data={"sources": [{**sources[0], "path": "/none"}]})
    )
    assert elsewhere.returncode == 0 and "the corpora are not here" in elsewhere.stdout


def test_another_budget_and_vocabulary_by_their_keys(command: Command) -> None:
    """50B tokens of the recipe of 2T, and a table of 50,304 rows: what the plan says to change is enough."""
    recipe = ROOT / "configs/runs/llama-7b-hsdp.toml"
    code, _, refused = command(recipe, "model.vocab=50_304")
    assert code == 78
    declared = re.search(r"set (model.declared_params) = ([\d_]+)", refused)
    assert declared is not None and int(declared[2]) == 6_738_415_616 + 2 * 4096 * (50_304 - 32_000)
    changes = ["model.vocab=50_304", f"{declared[1]}={declared[2]}", "train.duration=50B tokens"]
    result = json.loads(command(recipe, *changes, "--json")[1])
    assert result["tokens"] == pytest.approx(50e9, rel=1e-4)
    assert result["schedule"][-1]["lr"] == pytest.approx(3e-5) and not result["warnings"]
    _, longer, _ = command(recipe, "train.duration=50B tokens", "optimizer.decay=2T tokens")
    assert "the learning rate ends at 0.0003, above its floor of 3e-05" in longer


GOLDEN = {
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "tr1-13b": 12_853_386_240,
    "tr8-104b": 103_943_028_736,
    "tr8-104b-deep": 103_958_492_400,
    "tr11-176b": 176_247_271_424,
    "glm-130b": 128_697_794_560,
}
"""Parameters as published, or by the closed forms of the papers."""


@pytest.mark.parametrize("path", sorted((ROOT / "configs/models").glob("*.toml")), ids=lambda path: path.stem)
@pytest.mark.promise("declared-size")
def test_every_preset_is_the_size_it_declares(path: Path) -> None:
    model = TypeAdapter(Model).validate_python(tomllib.loads(path.read_text())["model"])
    assert count_parameters(model) == model.declared_params == GOLDEN.get(path.stem, model.declared_params)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("[br]*/*.toml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_the_size_it_declares(path: Path) -> None:
    config = load(str(path))
    assert config.model.declared_params in (None, count_parameters(config.model))


@pytest.mark.shows("B7", "D2", "D24")
@pytest.mark.parametrize(
    ("recipe", "overrides", "warned"),
    [
        (
            "tr8-104b",
            ["model.init_std=0.02"],
            ["hidden / layers is 512", "heads up to 256, not 512", "init_std = 0.02 is 4.0 times", "takes 6_494 steps",
             "floor from 126_953_125 of 300_001_504", "has 80 GiB: shard over more"],
        ),
        ("tr1-13b", [], ["216_320 samples (443M tokens) takes 8_641 steps because of the batch ramp"]),
    ],
)  # fmt: skip
def test_recipes(recipe: str, overrides: list[str], warned: list[str]) -> None:
    """The warm-up of tr1-13B was meant as 2,000 steps."""
    config = load(str(ROOT / f"configs/runs/{recipe}.toml"), overrides)
    result = plan.plan(config, 16, device="NVIDIA A100-SXM4-80GB")
    assert result.parameters == result.declared_params == GOLDEN[recipe]
    for text in warned:
        assert any(text in warning for warning in result.warnings), (text, result.warnings)


@pytest.mark.shows("D1")
@pytest.mark.promise("declared-size")
def test_the_104b_that_was_57b() -> None:
    config = load(str(ROOT / "configs/runs/tr8-104b.toml"), ["model.ffn=20_480"])
    with pytest.raises(ConfigError, match=r"103_943_028_736, .* has 56_696_946_688 parameters \(-45.5%\)") as refused:
        plan.plan(config)
    assert refused.value.exit == Exit.REFUSED


@pytest.mark.shows("B14")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], []),
        (["model.heads=16", "model.hidden=2560", "model.ffn=6912"], ["head size of 160 is not a multiple of 64:"]),
        (["model.ffn=4096"], ["ffn / hidden is 1.00, where the family has about 2.67"]),
        (["model.layers=10"], ["hidden / layers is 410"]),
        (["optimizer.decay=100_000 steps"], ["learning rate is at its floor from 25_600_000 of 488_281_344"]),
        (["model.vocab=50_257"], ["50257 rows, not a multiple of 64"]),
        (["checkpoint.every=2_000_000 steps"], ["is longer than the run"]),
    ],
)
def test_warnings(overrides: list[str], expected: list[str]) -> None:
    config = load(str(ROOT / "configs/runs/llama-7b-hsdp.toml"), overrides)
    warnings = advice.warnings(config)
    assert len(warnings) == len(expected) and all(part in text for part, text in zip(expected, warnings, strict=True))


def test_a_rank_that_does_not_fit() -> None:
    config = load(str(ROOT / "configs/runs/llama-7b-hsdp.toml"))
    with pytest.raises(ConfigError, match=r"parallel.shard = 3 does not divide the world size 128"):
        plan.plan(config, 128, gpus_per_node=3)
    result = plan.plan(config, 128, device="NVIDIA A100-SXM4-40GB")
    assert "has 40 GiB: shard over more" in result.warnings[-1]
    unknown = plan.plan(config, 128, device="NVIDIA A9000")
    assert "the memory of a device 'NVIDIA A9000' is not known" in unknown.warnings[-1]
    shown = plan.render(result)
    assert "12.6 GiB per rank for parameters, gradients and optimiser" in shown and "of 40 GiB at the" in shown
    assert result.world is not None
    total = result.world.memory.total
    warnings = [list(advice.memory_warning(total, int(total * room), "it")) for room in (0.99, 1.01, 1.2)]
    assert [len(found) for found in warnings] == [1, 1, 0] and "little is left" in warnings[1][0]


def test_unknown_devices_have_no_peak() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    for unknown in ("cpu", "NVIDIA GeForce RTX 9999", "H100", ""):
        assert peak_flops(unknown) is None


def test_speed_of_a_measured_step(command: Command) -> None:
    """3,700 tokens/s on an A100 were published as 57% MFU."""
    measured = (ROOT / "configs/runs/llama-7b-hsdp.toml", "--seconds-per-step", "2.214", "--world-size", "128")
    rates = json.loads(command(*measured, "--device", "NVIDIA A100-SXM4-80GB", "--json")[1])
    assert rates["tokens_per_second_per_device"] == pytest.approx(3700, rel=1e-3)
    assert rates["mfu"] == pytest.approx(0.555, abs=0.002)
    steps = 2e12 / (256 * 4096)  # two trillion tokens
    assert rates["days"] == pytest.approx(steps * 2.214 / 86_400, rel=1e-3)
    assert "MFU unknown (no peak on file)" in command(*measured)[1]


@pytest.mark.shows("A1")
def test_bench_measures_the_trainer(lab: Any, run_command: Run) -> None:
    done = run_command("fsdp_pretrain.bench", lab.config(), "--steps", 3, "--warmup", 1, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    speed, parts = result["speed"], result["parts"]
    assert speed["mfu"] is None and speed["device"] == "cpu"
    assert speed["tokens_per_second"] == pytest.approx(256 / speed["seconds_per_step"])
    assert speed["seconds_per_step"] == pytest.approx(parts["iteration"], rel=0.5)
    assert speed["days"] == pytest.approx(20 * speed["seconds_per_step"] / 86_400)  # the run has 20 steps
    assert parts["forward_backward"] > 0 and result["memory"] > 1e7
    assert not (lab.path / "run").exists()  # a benchmark leaves no files
    assert run_command("fsdp_pretrain.bench", lab.config(), "train.micro_batch=3").returncode == 78
