"""The memory estimate of `plan` against training, and its parts against closed forms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from processes import ROOT, python
from weigh import highest

from fsdp_pretrain import models
from fsdp_pretrain.bench import steps
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.config.sections import ParallelSection
from fsdp_pretrain.parallel import mesh
from fsdp_pretrain.plan import memory

pytestmark = pytest.mark.quick
CPU, GPU = torch.device("cpu"), torch.device("cuda")
LLAMA = {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 160, "vocab": 509}
OLMO = {**LLAMA, "family": "olmo3", "kv_heads": 4, "sliding_window": 32, "sliding_window_pattern": 4}
GPT = {"family": "gpt", "layers": 4, "hidden": 64, "heads": 4, "ffn": 256, "positions": 128, "vocab": 509}
GLM = {"family": "glm", "layers": 4, "hidden": 72, "heads": 6, "vocab": 518}
BLANKS = "data.objective={kind='glm',row=112,slots=2}"


def configuration(lab: Any, model: dict[str, Any], *overrides: str) -> Config:
    """Sequences of 128, one step of eight of them."""
    path = lab.config(
        "toy",
        model={"kv_heads": None, "ffn": None, **model},
        data={"sequence_length": 128},
        train={"duration": "9 steps", "global_batch": "8 samples", "micro_batch": 8},
        parallel={"shard": 1, "timeout": "60 s"},
    )
    return load(path, overrides)


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    with mesh.connect(ParallelSection()) as connected:
        yield connected


@pytest.mark.shows("B20")
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        (LLAMA, []),
        (OLMO, []),
        (GPT, ["train.micro_batch=2", "parallel.recompute=1"]),
        (GPT, ["parallel.recompute=2", "parallel.reshard_after_forward=false"]),
        (LLAMA, ["train.micro_batch=2", "parallel.recompute=feed-forward"]),
        (GLM, [BLANKS]),
        (GLM, [BLANKS, "model.positions=rope-2d", "train.micro_batch=2", "parallel.recompute=1"]),
        pytest.param({**LLAMA, "family": "qwen2"}, [], marks=pytest.mark.slow),
        pytest.param({**LLAMA, "family": "qwen3", "head_size": 32}, [], marks=pytest.mark.slow),
    ],
    ids=[
        "plain",
        "windows",
        "accumulated-recomputed",
        "half-recomputed",
        "feed-forward",
        "glm",
        "glm-2d-accumulated-recomputed",
        "qwen2",
        "qwen3",
    ],
)
def test_estimate_is_the_measured_peak(lab: Any, world: Any, model: dict[str, Any], overrides: list[str]) -> None:
    """The allocator's own account of a real training step, as the profiler records it."""
    config = configuration(lab, model, *overrides)
    trainer = steps.build(config, world)
    trainer.step()
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    before = sum(getattr(t, "_local_tensor", t).nbytes for t in (*trainer.model.parameters(), *moments))
    peak = highest(before, trainer.step)
    parts = memory.estimate(config, shards=1, micro_batches=8 // config.train.micro_batch, device=CPU)
    assert peak > 2 * before
    assert parts.total == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        (LLAMA, []),
        pytest.param(GPT, [], marks=pytest.mark.slow),
        pytest.param(LLAMA, ["model.hidden=256", "model.ffn=704", "data.sequence_length=16"], marks=pytest.mark.slow),
    ],
    ids=["llama", "gpt", "mostly-parameters"],
)
def test_shards_of_two_ranks(lab: Any, helpers: Any, model: dict[str, Any], overrides: list[str]) -> None:
    """What each holds, and the peak of a step. 509 rows do not divide by two: the padding counts."""
    overrides = ["parallel.shard=2", "train.micro_batch=4", *overrides]
    config = configuration(lab, model, *overrides)
    arguments = [2, helpers.port(), lab.path / "toy.toml", *overrides]
    done = python(ROOT / "tests/weigh.py", *arguments, timeout=300)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 2
    parts = memory.estimate(config, shards=2, micro_batches=1, device=CPU)
    for line in lines:
        assert parts.parameters == pytest.approx(line["parameters"], rel=0.01)
        assert parts.parameters == pytest.approx(line["gradients"], rel=0.01)
        assert parts.optimizer == pytest.approx(line["optimizer"], rel=0.01)
        assert parts.total == pytest.approx(line["peak"], rel=0.05)


def activations(lab: Any, model: dict[str, Any], *overrides: str) -> int:
    """Bytes that one more layer keeps for the backward pass on a GPU, per token of 8 x 128.

    The vocabulary is large enough for the peak to be in the loss, after all layers.
    """
    sizes = []
    for layers in (6, 7):
        config = configuration(lab, {**model, "layers": layers, "vocab": 8192}, "train.precision=bf16", *overrides)
        sizes.append(memory.estimate(config, shards=1, micro_batches=2, device=GPU).activations)
    return (sizes[1] - sizes[0]) // (8 * 128)


def test_activations_of_a_layer_are_the_closed_form(lab: Any) -> None:
    """bf16, bytes per token: inputs of norms and matrices; q, k, v and out of attention, one fp32 number per head."""
    h, f, heads = 64, 160, 4
    llama = 2 * (2 * 2 * h + h + 2 * h // 2 + h + 4 * f) + 2 * 4 + 4 * heads
    assert activations(lab, LLAMA) == llama
    f = 4 * h
    gpt = 2 * (2 * 2 * h + 3 * h + h + 2 * f) + 4 * 4 + 4 * heads
    assert activations(lab, GPT) == gpt
    assert activations(lab, GPT, "model.dropout=0.1") == gpt + 2 * h  # one byte for each element that may be dropped
    recomputed = activations(lab, LLAMA, "parallel.recompute=1")
    assert recomputed == 2 * h  # the input of the block
    assert activations(lab, LLAMA, "parallel.recompute=feed-forward") == llama - 2 * 4 * 160
    assert activations(lab, GPT, "parallel.recompute=feed-forward") == gpt - 2 * 2 * 4 * h


def test_what_sharding_gathers(lab: Any) -> None:
    model = models.build(configuration(lab, GPT).model)
    block = 2 * sum(parameter.numel() for parameter in model.blocks[0].parameters())
    whole = 2 * model.count_parameters()
    root = whole - 4 * block

    def gathered(shards: int, reshard: bool) -> int:
        config = configuration(
            lab, {**GPT, "vocab": 512}, "train.precision=bf16", f"parallel.reshard_after_forward={str(reshard).lower()}"
        )
        return memory.estimate(config, shards=shards, micro_batches=1, device=GPU).gathered

    more = 2 * 3 * 64  # 512 rows instead of 509
    # At the peak a pass is in the last block, with a buffer for it (forward) or the one before (backward) if there are
    # others to gather from.
    assert gathered(4, True) == root + more + block + block
    assert gathered(1, True) == root + more + block
    assert gathered(4, False) == whole + more + block
