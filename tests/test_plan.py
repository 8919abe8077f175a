"""Preflight and bench: exact numbers, contradictions refused with 78."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT, Run
from pydantic import TypeAdapter

from fsdp_pretrain import models
from fsdp_pretrain.cli import main
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.model import LlamaModel, Model
from fsdp_pretrain.config.sections import OptimizerSection
from fsdp_pretrain.data.corpus.manifest import read_manifest
from fsdp_pretrain.errors import ConfigError, Exit
from fsdp_pretrain.hardware import peak_flops
from fsdp_pretrain.models.flops import hardware_flops_per_token, speed
from fsdp_pretrain.parallel import optimizer as optim
from fsdp_pretrain.parallel.fsdp import materialise
from fsdp_pretrain.plan import plan
from fsdp_pretrain.plan import warnings as advice
from fsdp_pretrain.plan.plan import count_parameters
from fsdp_pretrain.units import human_count

pytestmark = pytest.mark.quick


def test_plan_of_a_configuration(lab: Any, run_command: Run) -> None:
    ramp = {"first": "2 samples", "by": "2 samples", "duration": "80 samples"}
    config = lab.config(train={"duration": "4K tokens", "micro_batch": 1, "batch_ramp": ramp}, parallel={"shard": 2})
    result = json.loads(run_command("fsdp_pretrain.cli", "plan", config, "--world-size", 2, "--json", expect=0).stdout)
    config_model = LlamaModel(family="llama", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=512)
    model = materialise(models.build(config_model), 1, torch.device("cpu"))
    exact = sum(parameter.numel() for parameter in model.parameters())
    assert result["parameters"] == exact
    optimizer = optim.Optimizer(model, OptimizerSection(lr=1e-3))
    state = [*model.parameters(), *(t for s in optimizer.state_by_name().values() for t in s.values())]
    held = sum(tensor.numel() * tensor.element_size() for tensor in state)
    assert result["checkpoint_bytes"] == pytest.approx(held, rel=1e-3)
    assert result["global_batches"] == [2, 4, 6, 8] and result["world_sizes"] == [2]
    assert result["world"]["micro_batches_per_step"] == [1, 2, 3, 4] and result["world"]["replicas"] == 1
    held_by_rank = result["world"]["state_bytes"]
    assert held_by_rank == pytest.approx((held + 4 * exact) / 2, rel=1e-3)  # two shards
    parts = result["world"]["memory"]
    assert parts["total"] == sum(size for part, size in parts.items() if part not in ("total", "available"))
    assert result["samples"] >= 125 and result["tokens"] == result["samples"] * 32
    steps = [row["step"] for row in result["schedule"]]
    assert steps == sorted(steps) and steps[-1] == result["steps"]
    shown = run_command("fsdp_pretrain.cli", "plan", config, "--world-size", 2).stdout
    assert f"{exact:_} parameters" in shown and "feasible: 2" in shown


@pytest.mark.shows("B14", "D2")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model.declared_params=57_000"], ["declared_params = 57_000", "51_360 parameters (-9.9%)"]),
        (["--world-size", "3"], ["does not split over 3 ranks", "feasible world sizes: 1, 2, 4"]),
        (["parallel.shard=3", "--world-size", "4"], ["parallel.shard = 3 does not divide the world size 4"]),
        (
            ["parallel.shard=2", "--world-size", "3"],
            ["shard = 2 does not divide", "does not split over 3", "sizes: 2, 4"],
        ),
        (["--seconds-per-step", "2"], ["--seconds-per-step needs a positive time and --world-size"]),
        (["--seconds-per-step", "2", "--world-size", "2", "--at", "4 steps"], ["--world-size, --seconds-per-step"]),
        (["--mfu", "40%"], ["--mfu needs --world-size and --device"]),
        (["--mfu", "40%", "--world-size", "2"], ["that of None is not known", "NVIDIA H100"]),
        (["--mfu", "0.4", "--world-size", "2"], ["is not a share such as 45%"]),
        (["--device", "NVIDIA A100-SXM4-80GB"], ["what a rank needs: give --world-size as well"]),
        (["optimizer.betas=[nan,0.9]", "optimizer.lr=inf"], ["2 problems", "optimizer.betas.0 = nan", "lr = inf"]),
        (["--at", "soon"], ["--at: not a quantity"]),
        (["--at", "21 steps"], ["after the end of the run, which has 20 steps: 160 samples, 5_120 tokens"]),
        (["--at", "0 steps"], ["before the first step of the run"]),
    ],
)
def test_contradictions_are_refused(lab: Any, run_command: Run, arguments: list[str], expected: list[str]) -> None:
    done = run_command("fsdp_pretrain.cli", "plan", lab.config(train={"micro_batch": 2}), *arguments)
    assert done.returncode == 78 and "Traceback" not in done.stderr
    assert all(part in done.stderr for part in expected), done.stderr


def test_the_schedule_at_a_point(lab: Any, run_command: Run) -> None:
    done = run_command("fsdp_pretrain.cli", "plan", lab.config(), "--at", "4 steps", "--json")
    row = json.loads(done.stdout)
    assert row == {
        "step": 4, "consumed": 32, "cursor": 32, "tokens": 1024, "batch": 8, "lr": 0.01, "sequence_length": 32,
        "shares": {"text": 1.0},
    }  # fmt: skip
    for at, place in (("1 samples", (1, 8)), ("5120 tokens", (20, 160))):
        row = json.loads(run_command("fsdp_pretrain.cli", "plan", lab.config(), "--at", at, "--json").stdout)
        assert (row["step"], row["consumed"]) == place
    ramp = [{"at": "0 samples", "value": 1.0}, {"at": "60 samples", "value": 1.0}, {"at": "60 samples", "value": 3.0}]
    sources = [{"name": "a", "path": "/a", "weight": ramp}, {"name": "b", "path": "/b"}]
    config = lab.config("mixed", data={"sources": sources, "skip": ["8:40 samples", "72:80 samples"]})
    row = json.loads(run_command("fsdp_pretrain.cli", "plan", config, "--at", "4 steps", "--json").stdout)
    assert (row["consumed"], row["cursor"], row["shares"]) == (32, 64, {"a": 0.75, "b": 0.25})


def test_epochs_and_days(lab: Any, run_command: Run) -> None:
    """Of every source, against their tokens; the days against the formula."""
    corpus = read_manifest(lab.corpus)
    stream = corpus.tokens + corpus.documents  # a separator after each
    sources = [{"name": "a", "path": str(lab.corpus), "weight": 3.0}, {"name": "b", "path": str(lab.corpus)}]
    config = lab.config(data={"sources": sources}, train={"duration": "2M tokens"})
    result = json.loads(run_command("fsdp_pretrain.cli", "plan", config, "--json", expect=0).stdout)
    for name, share in (("a", 0.75), ("b", 0.25)):
        source = result["sources"][name]
        epochs = 2e6 * share / stream
        assert source["tokens"] == corpus.tokens
        assert source["epochs"] == pytest.approx(epochs, rel=0.01) and epochs > 4
    (warning,) = [text for text in result["warnings"] if text.startswith("a has ")]
    assert f"{result['sources']['a']['epochs']:.3g} times" in warning and "2305.16264" in warning
    shown = run_command("fsdp_pretrain.cli", "plan", config, "train.duration=1K tokens").stdout
    assert f"data        b: {human_count(corpus.tokens)} tokens, read 0.0" in shown and " is read " not in shown
    options = ["--world-size", 2, "--device", "NVIDIA H100 80GB HBM3", "--mfu", "40%", "--json"]
    rates = json.loads(run_command("fsdp_pretrain.cli", "plan", config, *options).stdout)
    rate = 2 * 989e12 * 0.4 / result["flops_per_token"]
    assert rates["mfu"] == pytest.approx(0.4) and rates["tokens_per_second"] == pytest.approx(rate)
    assert rates["days"] == pytest.approx(result["tokens"] / rate / 86_400, rel=0.01)
    away = lab.config("away", data={"sources": [{**sources[0], "path": "/none"}]})
    assert "no corpus at /none" in run_command("fsdp_pretrain.cli", "plan", away, expect=0).stdout
    strict = run_command("fsdp_pretrain.cli", "plan", away, "--strict")
    assert strict.returncode == Exit.REFUSED and "no corpus at /none" in strict.stderr and not strict.stdout
    heldout = "eval.loss_on=[{name='h', path='/nowhere'}]"
    assert "at /nowhere" in run_command("fsdp_pretrain.cli", "plan", config, heldout, "--strict", expect=78).stderr


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


@pytest.mark.shows("D2")
@pytest.mark.parametrize(
    ("recipe", "options", "parameters", "warned"),
    [
        (
            "tr8-104b",
            ["model.init_std=0.02", "--world-size", "16", "--device", "NVIDIA A100-SXM4-80GB"],
            GOLDEN["tr8-104b"],
            ["hidden / layers is 512", "heads up to 256, not 512", "init_std = 0.02 is 4.0 times", "takes 6_494 steps",
             "floor from 126_953_125 of 300_001_504", "limits the run to 16 ranks", "has 80 GiB: shard over more"],
        ),
        (
            "glm-130b",
            [],
            GOLDEN["glm-130b"], ["limits the run to 24 ranks"],
        ),
    ],
    ids=["tr8-104b", "glm-130b"],
)  # fmt: skip
def test_recipes(run_command: Run, recipe: str, options: list[str], parameters: int, warned: list[str]) -> None:
    done = run_command("fsdp_pretrain.cli", "plan", ROOT / f"configs/runs/{recipe}.toml", *options, "--json", expect=0)
    result = json.loads(done.stdout)
    assert result["parameters"] == result["declared_params"] == parameters
    for text in warned:
        assert any(text in warning for warning in result["warnings"]), (text, result["warnings"])


@pytest.mark.shows("D1")
@pytest.mark.promise("declared-size")
def test_the_104b_that_was_57b() -> None:
    config = load(str(ROOT / "configs/runs/tr8-104b.toml"), ["model.ffn=20_480"])
    with pytest.raises(ConfigError, match=r"103_943_028_736, .* has 56_696_946_688 parameters \(-45.5%\)") as refused:
        plan.plan(config)
    assert refused.value.exit == Exit.REFUSED


@pytest.mark.shows("B7", "D24")
def test_a_warm_up_that_the_ramp_makes_long() -> None:
    """tr1-13B: 216,320 samples were meant as 2,000 steps."""
    config = load(str(ROOT / "configs/runs/tr1-13b.toml"))
    result = plan.plan(config)
    assert result.parameters == result.declared_params == GOLDEN["tr1-13b"]
    (warning,) = [text for text in result.warnings if "warm-up" in text]
    assert "216_320 samples (443M tokens) takes 8_641 steps because of the batch ramp" in warning


@pytest.mark.parametrize(
    ("scores", "micro_batch", "warned"), [("layer_scaled", 4, 1), ("layer_scaled", 2, 0), ("fused", 4, 0)]
)
def test_a_warning_of_large_scores_that_no_fused_kernel_computes(scores: str, micro_batch: int, warned: int) -> None:
    path = str(ROOT / "configs/runs/tr1-13b.toml")
    config = load(path, [f"model.scores={scores}", f"train.micro_batch={micro_batch}"])
    assert sum("in fp32, 2 GiB for a micro-batch" in text for text in advice.warnings(config)) == warned


@pytest.mark.shows("B14")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], []),
        (["model.heads=40", "model.hidden=5200", "model.ffn=13_866"], ["head size of 130 is not a multiple of 8:"]),
        (["model.ffn=4096"], ["ffn / hidden is 1.00, where the family has about 2.67"]),
        (["model.vocab=50_257"], ["50257 rows, not a multiple of 64"]),
        (["model.vocab=50_257", "model.vocab_multiple=128"], []),
        (["model.layers=10"], ["hidden / layers is 410"]),
        (["optimizer.decay=100_000 steps"], ["learning rate is at its floor from 25_600_000 of 488_281_344"]),
        (["checkpoint.every=2_000_000 steps"], ["is longer than the run"]),
        (["checkpoint.every=3T tokens"], ["is longer than the run"]),
        (["optimizer.curve=constant", "optimizer.decay_shape=linear"], ["optimizer.min_lr"]),  # fork --anneal uses it
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
    assert peak_flops("NVIDIA H100 PCIe") == 756e12 and peak_flops("NVIDIA H200 NVL") == 835e12
    assert [peak_flops(unknown) for unknown in ("cpu", "NVIDIA GeForce RTX 9999", "H100", "")] == [None] * 4


@pytest.mark.shows("A1")
@pytest.mark.parametrize(("batch", "seconds", "tflops"), [(4224, 88.5, 134.15), (6144, 122.5, 140.97)])
def test_megatron_formula_gives_the_logged_tflops_of_glm_130b(batch: int, seconds: float, tflops: float) -> None:
    config = load(str(ROOT / "configs/runs/glm-130b.toml"))
    rates = speed(config, GOLDEN["glm-130b"], batch=batch, seconds=seconds, devices=768, device="NVIDIA A100")
    assert rates.hardware_tflops_per_device == pytest.approx(tflops, abs=0.005)
    assert rates.hfu == pytest.approx(tflops / 312, abs=1e-4)
    if batch == 4224:
        assert rates.mfu == pytest.approx(0.324, abs=0.0005)


def test_hardware_flops_know_the_real_shape() -> None:
    """Counted matrix by matrix: Llama 3 8B has fewer KV heads and ffn = 3.5 hidden."""
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
    model = LlamaModel(family="llama", **shape)  # type: ignore[arg-type]
    matrices = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    forward = 32 * (2 * matrices + 4 * 4096 * 8192)
    assert hardware_flops_per_token(model, 8192) == 3 * (forward + 2 * 4096 * 128256)
    assert hardware_flops_per_token(model, 8192, recompute=2) == 3 * (forward + 2 * 4096 * 128256) + forward / 2
    inside = 32 * 2 * 2 * 4096 * 14336  # gate and up
    recomputed = hardware_flops_per_token(model, 8192, recompute="feed-forward")
    assert recomputed == pytest.approx(3 * (forward + 2 * 4096 * 128256) + inside)


def test_speed_of_a_measured_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """3,700 tokens/s on an A100 were published as 57% MFU."""
    command = ["fsdp-pretrain", "plan", str(ROOT / "configs/runs/llama-7b-hsdp.toml")]
    command += ["--seconds-per-step", "2.214", "--world-size", "128"]
    monkeypatch.setattr("sys.argv", [*command, "--device", "NVIDIA A100-SXM4-80GB", "--json"])
    assert main.main() == 0
    rates = json.loads(capsys.readouterr().out)
    assert rates["tokens_per_second_per_device"] == pytest.approx(3700, rel=1e-3)
    assert rates["mfu"] == pytest.approx(0.555, abs=0.002)
    steps = 2e12 / (256 * 4096)  # two trillion tokens
    assert rates["days"] == pytest.approx(steps * 2.214 / 86_400, rel=1e-3)
    monkeypatch.setattr("sys.argv", command)
    assert main.main() == 0 and "MFU unknown (no peak on file)" in capsys.readouterr().out


@pytest.mark.quick
@pytest.mark.parametrize(
    ("every", "keep", "kept"),
    [
        *[(1, "'6 steps'", 4 + 3), (1, "['5 steps', '10 steps']", 4 + 4), (1, "'640 tokens'", 4 + 8), (1, "[]", 4)],
        *[(10, "'10 steps'", 2), (10, "'6 steps'", 5), (50, "[]", 1)],  # there are no more
    ],
)
def test_permanent_checkpoints_need_space(lab: Any, every: int, keep: str, kept: int) -> None:
    """20 steps of 256 tokens; three are kept otherwise, and one is being written."""
    keys = [f"checkpoint.every={every} steps", f"checkpoint.keep_every={keep}", "checkpoint.keep_last=3"]
    made = plan.plan(load(lab.config(), keys))
    assert made.checkpoints_kept == kept and made.disk_bytes == kept * made.checkpoint_bytes


@pytest.mark.quick
@pytest.mark.parametrize(("every", "keep", "kept"), [(2, "[]", 4 + 6), (6, "[]", 4 + 3), (6, "'6 steps'", 4 + 3)])
def test_checkpoints_that_wait_for_an_evaluation_need_space(lab: Any, every: int, keep: str, kept: int) -> None:
    """Of 20 steps: three that wait, and three given up, unless there are fewer or they are kept anyway."""
    keys = ["checkpoint.every=1 steps", f"checkpoint.keep_every={keep}", "checkpoint.keep_last=3"]
    made = plan.plan(load(lab.config(), [*keys, f"eval.every={every} steps", "eval.tasks=['arc_easy']"]))
    assert made.checkpoints_kept == kept


def test_a_run_whose_batch_was_changed_is_planned_in_its_steps(lab: Any, run_command: Run) -> None:
    """10 steps of 8 samples, and the rest of its 320 in 15 of 16."""
    entry = {"at": "200 samples", "optimizer": {"lr": 2e-3}}
    path = lab.config(
        train={"duration": "320 samples"}, optimizer={"curve": "constant", "min_lr": None}, timeline=[entry]
    )
    lab.train(path, "train.duration=80 samples")
    command = ["fsdp_pretrain.cli", "plan", path, "train.global_batch=16 samples", "--json"]
    result = json.loads(run_command(*command, expect=0).stdout)
    assert result["steps"] == 25 and result["timeline"][0]["step"] == 17
    rows = {row["step"]: row for row in result["schedule"]}
    assert (rows[10]["batch"], rows[10]["consumed"]) == (8, 80) and (rows[25]["batch"], rows[25]["consumed"]) == (
        16,
        320,
    )
    assert [rows[step]["lr"] for step in (17, 18, 19)] == [1e-2, 2e-3, 2e-3]


@pytest.mark.shows("A1")
def test_bench_measures_the_trainer(lab: Any, run_command: Run) -> None:
    done = run_command("fsdp_pretrain.bench", lab.config(), "--steps", 3, "--warmup", 1, "--json", expect=0)
    result = json.loads(done.stdout)
    speed, parts = result["speed"], result["parts"]
    assert speed["mfu"] is None and speed["device"].startswith("cpu (")
    assert speed["tokens_per_second"] == pytest.approx(256 / speed["seconds_per_step"])
    assert speed["days"] == pytest.approx(20 * speed["seconds_per_step"] / 86_400)  # the run has 20 steps
    assert 0 < parts["forward_backward"] <= parts["iteration"] and result["memory"] > 1e7
    assert not (lab.path / "run").exists()  # a benchmark leaves no files
    run_command("fsdp_pretrain.bench", lab.config(), "train.micro_batch=3", expect=78)
