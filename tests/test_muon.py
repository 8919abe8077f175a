"""Muon: its mathematics against NumPy and torch, on any mesh; who computes what, and what is sent; groups."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import muon_ranks
import numpy as np
import pytest
import torch
from count_collectives import collectives
from processes import python
from pydantic import ValidationError

from fsdp_pretrain import models
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.sections import OptimizerSection
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.parallel import fsdp
from fsdp_pretrain.parallel.muon import Matrix, assign, flops_of, orthogonalize
from fsdp_pretrain.parallel.optimizer import Optimizer, treatments
from fsdp_pretrain.plan import memory

SMALL = {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 40, "vocab": 67}


def reference(matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Five iterations of Newton-Schulz with the quintic's coefficients, in fp64."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(8, 8), (24, 40), (40, 24), (1, 7)], ids=str)
def test_the_iteration(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    found = orthogonalize(matrix)
    np.testing.assert_allclose(found.numpy(), reference(matrix.double().numpy()), atol=2e-6)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5 and values.max() < 1.3
    theirs = pytest.importorskip("torch.optim._muon")
    expected = theirs._zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(orthogonalize(matrix.bfloat16()), expected)


@pytest.mark.promise("muon-once")
@pytest.mark.parametrize(
    ("mesh", "scale"),
    [
        ((2, 2), "rms"),
        ((1, 1), "spectral"),
        *(pytest.param(mesh, "rms", marks=pytest.mark.slow) for mesh in [(1, 1), (1, 2), (2, 4), (4, 2)]),
    ],
    ids=str,
)
def test_fifty_steps_on_any_mesh(mesh: tuple[int, int], scale: str, lab: Any, tmp_path: Path) -> None:
    """Matrices of blocks as in NumPy; everything else as AdamW on one process; replicas alike to the bit."""
    path, out = lab.config(model=SMALL, optimizer={"update_scale": scale}), tmp_path / "parameters.pt"
    python(muon_ranks.__file__, *mesh, path, out, timeout=100)
    found, config = torch.load(out), load(path)
    model = fsdp.materialise(models.build(config.model), config.run.seed, torch.device("cpu"))
    initial = {name: parameter.detach() for name, parameter in model.named_parameters()}
    spared = [name for name in initial if "norm" in name]
    rest = {name: torch.nn.Parameter(value.clone()) for name, value in initial.items() if value.ndim == 1
            or not name.startswith("blocks.")}  # fmt: skip
    section, steps = config.optimizer, [step for step in range(muon_ranks.STEPS) if step not in muon_ranks.SKIPPED]
    adamw = torch.optim.AdamW(
        [{"params": [rest[name]], "weight_decay": 0.0 if name in spared else section.weight_decay} for name in rest],
        lr=muon_ranks.LR, betas=section.betas, eps=section.eps,
    )  # fmt: skip
    for step in steps:
        for name, parameter in rest.items():
            parameter.grad = muon_ranks.gradient(name, tuple(parameter.shape), step) / muon_ranks.divisor(step)
        adamw.step()
    for name, parameter in rest.items():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-6)
    for name in sorted(initial.keys() - rest.keys()):
        weights, momentum = initial[name].double().numpy(), np.zeros(initial[name].shape)
        for step in steps:
            gradient = muon_ranks.gradient(name, weights.shape, step).double().numpy() / muon_ranks.divisor(step)
            momentum = 0.95 * momentum + 0.05 * gradient
            ahead = 0.05 * gradient + 0.95 * momentum
            rows, columns = weights.shape
            factor = 0.2 * math.sqrt(max(weights.shape)) if scale == "rms" else math.sqrt(max(1.0, rows / columns))
            update = factor * reference(ahead)
            weights = weights * (1 - muon_ranks.LR * section.weight_decay) - muon_ranks.LR * update
        np.testing.assert_allclose(found[name].numpy(), weights, atol=1e-6, err_msg=name)


# ------------------------------------------------------------------------ who computes what, and what is sent


@pytest.mark.quick
@pytest.mark.promise("muon-once")
@pytest.mark.parametrize(("replicas", "shards"), [(1, 8), (16, 8)])
def test_no_product_is_computed_twice(replicas: int, shards: int) -> None:
    """Llama 2 7B: every matrix has one owner; no rank could have less to do, given whole matrices."""
    shapes = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
    matrices = tuple(Matrix(f"{layer}.{at}", *shape) for layer in range(32) for at, shape in enumerate(shapes))
    rounds, ranks = assign(matrices, replicas, shards), replicas * shards
    owned = [matrix for owners in rounds for matrix in owners if matrix is not None]
    assert sorted(owned, key=lambda m: m.name) == sorted(matrices, key=lambda m: m.name)
    work = [sum(flops_of((m.rows, m.columns)) for m in owners if m) for owners in zip(*rounds, strict=True)]
    mean = sum(work) / ranks
    if ranks == 8:
        assert max(work) / mean < 1.02
    else:  # 96 ranks have a matrix of the feed-forward layers; 128 others on the remaining 32 would be four on each
        small, large = flops_of((4096, 4096)), flops_of((11008, 4096))
        assert max(work) == small + large == pytest.approx(1.205 * mean, rel=1e-3)


def traffic(config: Any, replicas: int, shards: int) -> Counter[tuple[str, int, int]]:
    """(kind, ranks, bytes) of the rows that rank 0 sends, from the assignment alone; fp32."""
    model, found = models.build(config.model), Counter[tuple[str, int, int]]()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    kinds = treatments(shapes, config.optimizer)
    matrices = tuple(Matrix(name, *shapes[name]) for name in shapes if kinds[name].kind == "muon")

    def rows(matrix: Matrix | None) -> int:
        return 0 if matrix is None else min(math.ceil(matrix.rows / shards), matrix.rows) * matrix.columns * 4

    for owners in assign(matrices, replicas, shards):
        groups = [owners[first : first + shards] for first in range(0, replicas * shards, shards)]
        there, whole = sum(map(rows, groups[0])), 0 if owners[0] is None else owners[0].rows * owners[0].columns * 4
        if shards > 1:
            found["alltoall_base_", shards, max(there, whole)] += 2
        if replicas > 1:
            found["allgather_", replicas, max(sum(map(rows, group)) for group in groups)] += 1
    return found


@pytest.mark.parametrize(("replicas", "shards"), [(1, 1), (1, 4), (4, 1), (2, 4), (16, 8)])
@pytest.mark.promise("no-waiting")
def test_a_step_sends_every_row_once(lab: Any, replicas: int, shards: int) -> None:
    path = lab.config(model=SMALL, train={"global_batch": f"{replicas * shards} samples", "micro_batch": 1})
    with_adamw = Counter(collectives(replicas, shards, path, []))
    with_muon = Counter(collectives(replicas, shards, path, ["optimizer.kind=muon"]))
    assert with_muon - with_adamw == traffic(load(path, ["optimizer.kind=muon"]), replicas, shards)
    assert not with_adamw - with_muon


@pytest.mark.quick
def test_plan_counts_the_states(lab: Any) -> None:
    """Of two shards: 4 bytes per element of a matrix of the blocks, 8 of all else."""
    config = load(lab.config(model=SMALL), ["optimizer.kind=muon", "train.precision=fp32"])
    parts = memory.estimate(config, shards=2, micro_batches=1, device=torch.device("cpu"))
    shapes = {name: tuple(p.shape) for name, p in models.build(config.model).named_parameters()}
    kinds = treatments(shapes, config.optimizer)
    bytes_of = {"muon": 4, "adamw": 8}
    rows = {name: math.ceil(shape[0] / 2) * math.prod(shape[1:]) for name, shape in shapes.items()}
    assert parts.optimizer == sum(rows[name] * bytes_of[kinds[name].kind] for name in shapes)
    assert {kinds[name].kind for name in shapes} == {"muon", "adamw"}


# ------------------------------------------------------------------------ groups

NAMES = {"embedding.weight": (67, 24), "blocks.0.mlp.up.weight": (40, 24), "blocks.0.norm.weight": (24,)}


@pytest.mark.quick
def test_the_first_group_that_matches_counts() -> None:
    groups = [
        {"match": "embedding.*", "lr_scale": 0.5},
        {"match": "*norm.weight", "weight_decay": 0.2},
        {"match": "blocks.*", "kind": "adamw", "lr_scale": 2.0},
    ]
    found = treatments(NAMES, OptimizerSection(lr=1.0, kind="muon", groups=groups))
    assert [(each.kind, each.lr_scale, each.weight_decay) for each in found.values()] == [
        ("adamw", 0.5, None),
        ("adamw", 2.0, None),
        ("adamw", 1.0, 0.2),
    ]
    plain = treatments(NAMES, OptimizerSection(lr=1.0, kind="muon"))
    assert [each.kind for each in plain.values()] == ["adamw", "muon", "adamw"]
    assert plain["blocks.0.norm.weight"].weight_decay == 0.0


@pytest.mark.quick
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"match": "blocks.*.attention.*"}], "'blocks.*.attention.*': matches no parameter"),
        ([{"match": "*"}, {"match": "embedding.*"}], "'embedding.*': matches no parameter that no earlier"),
        ([{"match": "*norm*", "kind": "muon"}], r"muon takes no parameter of shape \(24,\)"),
    ],
)
def test_groups_that_do_not_fit_the_model(groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        treatments(NAMES, OptimizerSection(lr=1.0, groups=groups))


@pytest.mark.quick
def test_values_that_cannot_be() -> None:
    with pytest.raises(ValidationError, match="momentum"):
        OptimizerSection(lr=1.0, momentum=1.0)


def test_rates_and_decay_of_a_group() -> None:
    """A frozen embedding, and blocks at half the rate without decay, beside the same model without groups."""
    groups = [{"match": "embedding.*", "lr_scale": 0.0}, {"match": "blocks.*", "lr_scale": 0.5, "weight_decay": 0.0}]
    changed = []
    config = load_small()
    for section in (OptimizerSection(lr=0.1), OptimizerSection(lr=0.1, groups=groups)):
        model = fsdp.materialise(models.build(config), 1, torch.device("cpu"))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        Optimizer(model, section).step(lr=0.1)
        changed.append({name: (p.detach() - before[name]) for name, p in model.named_parameters()})
    plain, grouped = changed
    assert not grouped["embedding.weight"].any() and torch.equal(plain["head.weight"], grouped["head.weight"])
    name = "blocks.0.mlp.up.weight"
    decay = 0.1 * 0.1 * before[name]
    torch.testing.assert_close(2 * grouped[name], plain[name] + decay, rtol=1e-4, atol=1e-6)


def load_small() -> Any:
    from fsdp_pretrain.config.model import LlamaModel

    return LlamaModel(family="llama", **SMALL)


# ------------------------------------------------------------------------ in a run


def test_a_run_resumes_to_the_bit_and_on_another_mesh(lab: Any, helpers: Any) -> None:
    """Four ranks, 2 x 2; and a new optimiser where the kind changes, on purpose."""
    train = {"duration": "8 steps", "micro_batch": 1}
    options = {"train": train, "checkpoint": {"every": "4 steps"}, "record": {"statistics_every": "1 step"}}
    sections = {**options, "parallel": {"shard": 2}, "optimizer": {"kind": "muon", "lr": 1e-2}}
    half = ("train.duration=4 steps", "optimizer.decay=8 steps")
    whole, parts, elsewhere = (lab.config(name, **sections) for name in ("whole", "parts", "elsewhere"))
    lab.train(whole, ranks=4)
    for config, other in ((parts, {"ranks": 4}), (elsewhere, {"ranks": 2})):
        lab.train(config, *half, ranks=4)
        lab.train(config, **other)
    curves = {name: helpers.losses(lab.path / name) for name in ("whole", "parts", "elsewhere")}
    assert curves["parts"] == curves["whole"]
    assert [loss for _, loss, _ in curves["elsewhere"]] == pytest.approx([loss for _, loss, _ in curves["whole"]], 1e-6)
    assert curves["whole"][-1][1] < curves["whole"][0][1]
    groups = helpers.metrics(lab.path / "whole")[-1]["groups"]
    assert groups["embedding"]["second_moment_max"] and groups["mlp/0"]["second_moment_max"] is None
    flags = ("--allow", "optimizer.momentum")
    lab.train(
        elsewhere, "train.duration=9 steps", "optimizer.decay=8 steps", "optimizer.momentum=0.9", flags=flags, ranks=2
    )
    other = ("train.duration=9 steps", "optimizer.kind=adamw")
    output = lab.train(parts, *other, ranks=2, flags=("--allow", "optimizer"), expect=78)
    assert "does not fit this model and optimiser" in output and "--reset-optimizer 8" in output
    lab.train(parts, *other, ranks=2, flags=("--allow", "optimizer", "--reset-optimizer", "8"))
    assert helpers.metrics(lab.path / "parts")[-1]["step"] == 9
