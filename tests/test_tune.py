"""`plan --tune`: the best of all ways that fit, its reasons, and trials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import CLI, Run

from fsdp_pretrain.config.config import load
from fsdp_pretrain.plan import predict
from fsdp_pretrain.plan.plan import plan
from fsdp_pretrain.plan.trials import read_result, reason, run_trials
from fsdp_pretrain.plan.tune import SHOWN, micro_batches, tune
from fsdp_pretrain.plan.warnings import PLANNABLE

H100 = "NVIDIA H100 80GB HBM3"
WORLD, NODE = 16, 8


@pytest.fixture
def config(lab: Any) -> Path:
    """A model of which some ways fit into 6 GiB and some do not."""
    model = {"layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 2816, "vocab": 32_000}
    data, train = {"sequence_length": 2048}, {"global_batch": f"{8 * WORLD} samples", "micro_batch": 2}
    path: Path = lab.config(model=model, data=data, train=train)
    return path


@pytest.mark.shows("A1")
@pytest.mark.slow
def test_the_first_is_the_fastest_of_all_that_fit(config: Path) -> None:
    """Against every way, each planned and predicted on its own."""
    available = 6 * 2**30
    found = tune(load(config, []), H100, WORLD, gpus_per_node=NODE, available=available)
    rates, without = {}, 0
    for size in (1, 2, 4, 8):
        for recompute in (0, "feed-forward", 4, 2, 1):
            for reshard in ("true", "false"):
                overrides = (
                    f"train.micro_batch={size}",
                    f"parallel.recompute={recompute}",
                    f"parallel.reshard_after_forward={reshard}",
                )
                way = load(config, [*overrides, "train.precision=bf16"])
                layout = plan(way, WORLD, gpus_per_node=NODE, device=H100).world
                assert layout is not None
                if layout.memory.total > PLANNABLE * available:
                    without += 1
                    continue
                table = predict.predict(way, H100, world=WORLD, gpus_per_node=NODE)
                rates[overrides] = next(row.tokens for row in table.predictions if row.ranks == WORLD)
    assert rates and without, "the device is too large or too small for this test"
    best = found.fitting[0]
    assert best.overrides in rates and best.tokens == pytest.approx(max(rates.values()))
    assert [choice.tokens for choice in found.fitting] == sorted((each.tokens for each in found.fitting), reverse=True)
    assert len(found.fitting) == min(SHOWN, len(rates))
    for choice in found.fitting:
        assert choice.tokens == pytest.approx(rates[choice.overrides])


@pytest.mark.shows("D2")
def test_micro_batches_split_every_batch_of_a_ramp(lab: Any) -> None:
    ramp = {"first": "32 samples", "by": "16 samples", "duration": "1000 samples"}
    config = load(lab.config(train={"global_batch": "96 samples", "duration": "200 steps", "batch_ramp": ramp}), [])
    assert micro_batches(config, 8) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--world-size", "16", "--device", H100], 0, ["fastest: train.micro_batch=", "recomputation: ", "reshard: "]),
        (["--world-size", "16", "--device", H100, "--device-memory", "100MB"], 1, ["nothing fits", "parallel.shard"]),
        (["--world-size", "16"], 78, ["the speed of a --device is needed", "NVIDIA H100"]),
        (["--device", H100], 78, ["--tune needs --world-size"]),
        (["--world-size", "16", "--device", H100, "train.precision=fp32"], 78, ["only the rates of bf16 and fp16"]),
        (["--world-size", "16", "--device", H100, "--predict"], 78, ["exclude each other"]),
        (["--world-size", "16", "--device", H100, "--trials", "-1"], 78, ["not a whole number from 1 on"]),
        (["--world-size", "16", "--device", H100, "--trials", "1"], 78, ["--trials need 8 GPUs on this node"]),
        (["--world-size", "16", "--device", H100, "model.declared_params=7"], 78, ["model.declared_params = 7"]),
        (["--world-size", "16", "--device", H100, "--network", "400Gb"], 78, ["is not a size such as"]),
        (["--world-size", "7", "--device", H100], 78, ["do not split over 7 ranks"]),
    ],
)
def test_the_command(config: Path, run_command: Run, arguments: list[str], code: int, expected: list[str]) -> None:
    done = run_command(CLI, "plan", config, "--tune", *arguments)
    assert done.returncode == code, done.stderr
    assert all(part in done.stdout + done.stderr for part in expected), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if code == 0:
        shown = json.loads(run_command(CLI, "plan", config, "--tune", *arguments, "--json").stdout)
        assert f"fastest: {' '.join(shown['overrides'])}" in done.stdout


@pytest.mark.slow
def test_trials_measure_the_best_and_name_what_fails(lab: Any) -> None:
    config = load(lab.config(train={"global_batch": "64 samples", "micro_batch": 1}), [])
    choices = tune(config, H100, 2, gpus_per_node=2).fitting[:2]
    measured = run_trials(config, choices, ranks=1)
    assert {trial.overrides for trial in measured} == {choice.overrides for choice in choices}
    assert all(trial.tokens and trial.memory and not trial.problem for trial in measured)
    flex = load(lab.config(parallel={"attention": "flex"}, data={"attention": "document"}), [])
    (failed,) = run_trials(flex, choices[:1], ranks=1)
    assert failed.tokens is None and "flex cannot be used" in failed.problem


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        (
            "x\ntorch.OutOfMemoryError: CUDA out of memory\ntorch.distributed.elastic.Error: a\n====",
            "torch.OutOfMemoryError:",
        ),
        ("[rank3]: RuntimeError: NCCL error\nChildFailed\n=====", "[rank3]: RuntimeError: NCCL error"),
        ("error: parallel.attention = flex cannot be used\n====", "error: parallel.attention = flex"),
        ("  traceback : Signal 9 (SIGKILL) received by PID 7\n====", "traceback : Signal 9"),
        ("====", "it ended without a message"),
    ],
)
def test_the_reason_of_a_failed_trial(errors: str, expected: str) -> None:
    assert reason(errors).startswith(expected)


def test_a_result_is_found_among_what_libraries_write() -> None:
    result = json.dumps({"memory_bytes": 1, "nested": {"a": 2}}, indent=1)
    assert read_result(f"node0:1:2 NCCL INFO {{x}}\n{result}\nnode0 NCCL INFO done\n") == json.loads(result)
    assert read_result("NCCL INFO {x}") is None
