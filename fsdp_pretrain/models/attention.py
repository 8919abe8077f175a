"""Self-attention: PyTorch's kernels, or unfused with the score scaling of Megatron and GLM."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fsdp_pretrain.config.model import GLMModel, GPTModel, Scores

from .cache import LayerCache
from .layers import Rotary, rotate
from .masks import Mask, alibi_score_mod


@cache
def _flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)  # uncompiled it materialises all scores


class Attention(nn.Module):
    """Grouped-query attention; each of `kv_heads` serves heads / kv_heads query heads.

    Args:
        bias: whether the projections to queries, keys and values have biases.
        out_bias: whether the output projection has one.
        norms: of queries and of keys, before rotation; each as wide as a head, or as all heads together.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        dropout: on attention probabilities, in training mode.
        scores: how attention scores are computed, see `scaled_attention`.
        layer: index of the block from 0, for score scaling.
        alibi: whether to add ALiBi if the mask is a block mask; a dense mask includes it already.

    Attributes:
        cache: keys and values of earlier passes, see `Decoder.caching`; None in training.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        out_bias: bool = False,
        norms: tuple[nn.RMSNorm, nn.RMSNorm] | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        scores: Scores = "fused",
        layer: int = 0,
        alibi: bool = False,
    ) -> None:
        super().__init__()
        self._score_mod = alibi_score_mod(heads) if alibi else None
        self.cache: LayerCache | None = None
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scores, self.layer, self.dropout, self.scale = scores, layer, dropout, scale
        self.query = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.key = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.out = nn.Linear(heads * head_dim, hidden, bias=out_bias)
        self.query_norm: nn.RMSNorm | None
        self.key_norm: nn.RMSNorm | None
        self.query_norm, self.key_norm = norms or (None, None)

    def forward(self, x: Tensor, mask: Mask, rotary: Rotary | None) -> Tensor:
        """[B, S, H] -> [B, S, H]; `rotary` from `layers.rotary_tables`, or None."""
        batch, length, _ = x.shape
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = _normalise(query, self.query_norm), _normalise(key, self.key_norm)
        shape = batch, length, -1, self.head_dim
        query, key, value = query.view(shape), key.view(shape), value.view(shape)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if self.cache is not None:
            key, value = self.cache.extend(key, value)
        mixed = self._attend(query, key, value, mask)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Query [B, heads, S, d], key and value [B, kv_heads, T, d] -> [B, heads, S, d]."""
        dropout = self.dropout if self.training else 0.0
        options: dict[str, Any] = {"scale": self.scale, "enable_gqa": self.kv_heads != self.heads}
        if isinstance(mask, BlockMask):
            out: Tensor = _flex()(query, key, value, self._score_mod, mask, **options)
            return out
        if self.scores != "fused":
            assert isinstance(mask, Tensor)
            return scaled_attention(query, key, value, mask, self.layer, dropout)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, **options
        )


def _normalise(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """Each stretch of `x [B, S, width of all heads]` that is as wide as the norm."""
    out: Tensor = norm(x.unflatten(-1, (-1, norm.normalized_shape[0]))).flatten(-2)
    return out


def biased_attention(config: GPTModel | GLMModel, layer: int) -> Attention:
    """Multi-head attention with biases."""
    return Attention(
        config.hidden,
        config.heads,
        config.heads,
        config.head_dim,
        bias=True,
        out_bias=True,
        dropout=config.dropout,
        scores=config.scores,
        layer=layer,
        alibi=config.positions == "alibi",
    )


def scaled_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, layer: int, dropout: float) -> Tensor:
    """Attention whose scores do not overflow fp16: divided by c = max(1, layer), multiplied by c again in fp32.

    Megatron's query-key layer scaling with an fp32 softmax, also used by GLM-130B; c cancels.

    Args:
        query, key, value: [B, heads, S, d].
        mask: dense, see `masks.Mask`.

    Returns:
        [B, heads, S, d] in the dtype of the values.
    """
    scale = max(1, layer)
    scores = ((query / (scale * math.sqrt(query.shape[-1]))) @ key.transpose(2, 3)).float() * scale
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = F.dropout(scores.softmax(-1).to(value.dtype), dropout, training=dropout > 0)
    return weights @ value
