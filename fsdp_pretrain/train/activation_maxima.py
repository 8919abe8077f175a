"""The largest logit, and the largest attention score of every block, of one micro-batch.

Both grow before a run diverges. Fused attention does not return its scores, so they are computed beside it, in a
forward pass of their own: without gradients, dropout or compiled code. The step trains as if it had not been there.
"""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.models import Decoder, forward
from fsdp_pretrain.models.attention import Attention
from fsdp_pretrain.models.masks import Mask
from fsdp_pretrain.parallel import fsdp
from fsdp_pretrain.parallel.mesh import World

_VALUES = 2**25
"""Scores or logits that are in memory at a time, in fp32."""


@torch.no_grad()
def measure(model: Decoder, micro: forward.PackedBatch, config: Config, world: World) -> Tensor:
    """The maxima over all ranks: fp32 [1 + blocks] on the device, logit first, without waiting.

    Args:
        model: sharded; in training mode before and after.
        micro: this rank's micro-batch, in host memory.
        config: the run's configuration.
        world: all ranks.
    """
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    found: list[Tensor] = []
    backend = model.backend
    with ExitStack() as after:
        if fsdp.compiles(config, world.device):
            after.enter_context(torch.compiler.set_stance("force_eager"))
        model.eval()
        model.backend = "sdpa"  # a block mask alone cannot say which scores count
        for attention in attentions:
            attention.observe = lambda query, key, mask: found.append(highest_score(query, key, mask))
        try:
            logit = forward.read(model, micro, config.data, world.device, highest_logit)
        finally:
            for attention in attentions:
                attention.observe = None
            model.backend = backend
            model.train()
            fsdp.reshard(model)
    return world.max_(torch.stack([logit, *found]))


def highest_logit(hidden: Tensor, weight: Tensor) -> Tensor:
    """The largest logit of hidden states [B, S, H] with the output matrix [V, H]: fp32 0-dim."""
    rows = hidden.flatten(0, 1)
    size = max(1, _VALUES // len(rows))
    return torch.stack([F.linear(rows, part).amax() for part in weight.split(size)]).amax().float()


def highest_score(query: Tensor, key: Tensor, mask: Mask) -> Tensor:
    """The largest attention score before the softmax, among those that count: fp32 0-dim.

    Args:
        query: [B, heads, S, d].
        key: [B, kv_heads, S, d].
        mask: None (causal) or dense, see `masks.Mask`; what it adds to scores counts.
    """
    length = query.shape[2]
    query = query.float() / math.sqrt(query.shape[-1])
    key = key.float().repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(2, 3)
    rows = max(1, _VALUES // (query.shape[0] * query.shape[1] * length))
    positions, found = torch.arange(length, device=query.device), []
    for start in range(0, length, rows):
        scores = query[:, :, start : start + rows] @ key
        if mask is None:
            ahead = positions > positions[start : start + rows].unsqueeze(1)
            scores = scores.masked_fill(ahead, -math.inf)
        elif isinstance(mask, Tensor):
            part = mask[:, :, start : start + rows]
            scores = scores.masked_fill(~part, -math.inf) if part.dtype == torch.bool else scores + part
        found.append(scores.amax())
    return torch.stack(found).amax()
