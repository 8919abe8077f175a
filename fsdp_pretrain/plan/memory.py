"""Estimates a rank's training memory by arithmetic, without a device.

Parameters, gradients and optimiser are exact: fp32 shards. What FSDP2 gathers and reduces follows from its units. What
a block keeps for the backward pass is a closed form for kernels that keep little (fused attention, fused norms), as on
a GPU.

Not counted: the CUDA context and NCCL (about 1 to 2 GiB outside PyTorch's allocator), fragmentation. Blocks are
estimated uncompiled; compiled ones keep less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_pretrain import models
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.models.loss import KEPT_BYTES, LOGITS_PER_CHUNK
from fsdp_pretrain.models.masks import choose_backend
from fsdp_pretrain.parallel.fsdp import compute_dtype, units

from .flops import feed_forward

_MASTER_BYTES = 4
"""Bytes per fp32 element of parameters, gradients, both moments of AdamW and reduce-scatter buffers."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by part at one moment.

    Attributes:
        parameters, optimizer, gradients: fp32 shards.
        gathered: unsharded parameters in the compute dtype.
        reduce: unsharded gradients and reduce-scatter buffers.
        activations: tensors kept for backward, and working memory of blocks.
        logits: working memory of the loss.
    """

    parameters: int
    optimizer: int
    gradients: int
    gathered: int
    reduce: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def estimate(config: Config, *, shards: int, accumulates: bool, device: torch.device) -> MemoryEstimate:
    """Peak memory of a step on the rank that needs most.

    Args:
        shards: ranks per replica.
        accumulates: a step has several micro-batches per rank, so gradients exist from the start.
        device: `cuda` or `cpu`: determines the dtype of `train.precision = "auto"` and the kernels.
    """
    model, size = models.build(config.model), compute_dtype(config, device).itemsize
    parts = [
        (sum(_padded(module.parameters(), shards) for module in unit.modules), unit.reshard)
        for unit in units(model, reshard=config.parallel.reshard_after_forward)
    ]
    every = _padded(model.parameters(), shards)
    block = _padded(model.blocks[-1].parameters(), shards)
    table = _padded(model.embedding.parameters(), shards)
    shard = every // shards * _MASTER_BYTES
    resharded = max((elements for elements, reshard in parts if reshard), default=0)
    # A forward pass ends with the all-gather buffer of its last unit; later, one more unit is in flight.
    passing = resharded if shards == 1 else max(2 * resharded, parts[-1][0])
    staying = every - sum(elements for elements, reshard in parts if reshard)
    kept, working = _activations(config, size, choose_backend(config.parallel.attention, config.model, device))
    logits = _logits(config, size)
    begun = shard if accumulates else 0
    moments = (
        {"gradients": begun, "reduce": size * table, "activations": kept, "logits": logits},
        {"gradients": begun, "reduce": size * block + _MASTER_BYTES * table, "activations": kept + working},
        {"gradients": shard, "reduce": (size + _MASTER_BYTES) * table, "activations": working},
    )
    return max(
        (
            MemoryEstimate(
                **{"parameters": shard, "optimizer": 2 * shard, "gathered": size * (staying + passing), "logits": 0}
                | moment
            )
            for moment in moments  # in the loss, in the last block's backward pass, at the end
        ),
        key=lambda found: found.total,
    )


def _padded(parameters: Iterable[nn.Parameter], shards: int) -> int:
    """Elements of parameters with their rows rounded up to a multiple of `shards`, as in FSDP2."""
    return sum(math.ceil(each.shape[0] / shards) * shards * math.prod(each.shape[1:]) for each in parameters)


def _activations(config: Config, size: int, backend: str) -> tuple[int, int]:
    """Bytes that all blocks keep, and the working memory of one block's backward pass.

    Args:
        size: bytes of an element.
        backend: `flex` keeps no scores.
    """
    model, recompute, length = config.model, config.parallel.recompute, config.data.sequence_length
    tokens, (ffn, matrices) = config.train.micro_batch * length, feed_forward(model)
    inside = 2 * (matrices - 1) * ffn  # before and after the activation, and the gate
    width = 4 * model.hidden + 2 * model.query_width + 2 * model.kv_width  # norms; attention with its result
    if model.family == "qwen3":
        width += model.query_width + model.kv_width
    if model.uses_dropout:
        width += 2 * model.hidden // size
    whole = size * (width + inside) + _MASTER_BYTES * model.heads
    if getattr(model, "scores", "fused") != "fused":  # probabilities in fp32, and in another dtype
        whole += (_MASTER_BYTES + size % _MASTER_BYTES) * length * model.heads
    elif backend == "sdpa" and (config.data.attention != "causal" or config.data.objective.kind == "glm"):
        grouped = model.kv_width != model.query_width
        whole += size * length * (model.heads if grouped else 1)  # probabilities, or the mask as a bias
    small = size * model.hidden if recompute not in (0, "feed-forward") else whole - size * inside
    recomputed = model.layers if recompute == "feed-forward" else -(-model.layers // recompute) if recompute else 0
    kept = recomputed * small + (model.layers - recomputed) * whole + 3 * size * model.hidden
    working = size * (inside // 2 + 2 * model.hidden) + (whole - small if recomputed == model.layers else 0)
    return tokens * kept, tokens * working


def _logits(config: Config, size: int) -> int:
    """Working memory of the loss: kept logits, and chunks in fp32; see `models.loss`."""
    tokens = config.train.micro_batch * config.data.sequence_length
    every = tokens * config.model.rows
    kept = size * every if size * every <= KEPT_BYTES else 0
    chunks = 1 if size == _MASTER_BYTES else 2  # another dtype is copied
    return kept + _MASTER_BYTES * (chunks * min(every, LOGITS_PER_CHUNK) + tokens * config.model.hidden)
