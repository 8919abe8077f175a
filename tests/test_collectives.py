"""What a step sends: collectives and bytes of any mesh, counted and compared with the theory of hybrid sharding."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from count_collectives import collectives
from torch import nn

from fsdp_pretrain import models
from fsdp_pretrain.config.config import load

MEASURED = ['eval.loss_on=[{name="random", path="none"}]', "eval.loss_every=1 step", "eval.loss_samples=20"]
SMALL = {"layers": 3, "hidden": 32, "heads": 2, "kv_heads": 1, "vocab": 67}


def padded(modules: list[nn.Module], shards: int) -> int:
    """Elements of all parameters, each padded to rows that divide by the shards."""
    parameters = {parameter for module in modules for parameter in module.parameters()}
    return sum(math.ceil(p.shape[0] / shards) * shards * math.prod(p.shape[1:]) for p in parameters)


def theory(
    config: Any, replicas: int, shards: int, micro_batches: int, width: int, heldout: int
) -> Counter[tuple[str, int, int]]:
    """(kind, ranks, bytes) -> how often in a step; `width` is of a parameter in bytes while it computes.

    A micro-batch gathers the blocks for its forward pass, and again for the backward pass; what stays gathered is so
    once per step, and once more for `heldout` forward passes, if any, that measure the held-out loss. It reduces the
    gradients of every unit over its shards; the last one also sums each shard over the replicas, in bf16 every one.
    """
    model = models.build(config.model)
    rest = [model.embedding, model.norm]
    ends = [rest] if model.head is None else [[model.embedding], [model.norm, model.head]]
    blocks = [[block] for block in model.blocks]
    passing = blocks[:-1] if config.parallel.reshard_after_forward else []
    times_replicas, reduced = (micro_batches, 2) if config.parallel.reduce == "bf16" else (1, 4)
    found = Counter[tuple[str, int, int]]()
    for unit in [*ends, *blocks]:
        times = 2 * micro_batches + heldout if unit in passing else 1 + (heldout > 0)
        found["_allgather_base_", shards, padded(unit, shards) * width] += times
    for unit in [*ends, *blocks]:
        found["_reduce_scatter_base_", shards, padded(unit, shards) * reduced] += micro_batches
        found["allreduce_", replicas, padded(unit, shards) // shards * reduced] += times_replicas
    return found


@pytest.mark.parametrize(
    ("replicas", "shards", "micro_batches", "overrides"),
    [
        (2, 4, 1, []),
        (2, 4, 4, []),
        (128, 8, 2, ["train.precision=bf16"]),
        (128, 8, 2, ["train.precision=bf16", "parallel.reduce=bf16"]),
        (2, 4, 4, ["parallel.reshard_after_forward=false"]),
        (2, 4, 4, ["model.tied_head=true"]),
        (2, 4, 2, MEASURED),
        (2, 4, 2, [*MEASURED, "parallel.reshard_after_forward=false"]),
    ],
    ids=str,
)
@pytest.mark.promise("no-waiting")
def test_a_step_sends_what_hybrid_sharding_must(
    lab: Any, replicas: int, shards: int, micro_batches: int, overrides: list[str]
) -> None:
    train = {"global_batch": f"{replicas * shards * micro_batches} samples", "micro_batch": 1}
    path = lab.config(model=SMALL, data={"sequence_length": 32}, train=train)
    counted = collectives(replicas, shards, path, overrides)
    everywhere = [each for each in counted if each[1] == replicas * shards]
    # All ranks: the counts before the forward pass, the sums after the backward pass, and those of the held-out loss,
    # of 20 samples in passes of one on 8 ranks. All are small.
    heldout = 3 if "eval.loss_samples=20" in overrides else 0
    assert [kind for kind, *_ in everywhere] == ["allreduce_"] * (3 if heldout else 2)
    assert (everywhere[0], everywhere[-1]) == (counted[0], counted[-1])
    assert max(size for *_, size in everywhere) < 1024
    width = 2 if "train.precision=bf16" in overrides else 4
    expected = theory(load(path, overrides), replicas, shards, micro_batches, width, heldout)
    assert Counter(each for each in counted if each not in everywhere) == expected
