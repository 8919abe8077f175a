"""Llama-style decoder (arXiv 2302.13971, 2307.09288): pre-norm with RMSNorm, rotary positions, GQA, SwiGLU.

Mistral (arXiv 2310.06825) has a window in all blocks. Qwen2 (arXiv 2407.10671) adds biases on queries, keys and values,
Qwen3 (arXiv 2505.09388) an RMSNorm over each head of queries and of keys. Olmo 3 (arXiv 2512.13961) and the text model
of Gemma 3 (arXiv 2503.19786) have a window in most blocks, and other norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fsdp_pretrain.config.model import LlamaModel, RopeScaling

from .attention import Attention
from .decoder import Decoder
from .layers import CentredRMSNorm, Constant, Initial, Rotary, SwiGLU, rotary_frequencies, rotary_tables, scaled_initial
from .masks import Mask, Slots, Visible, attention_mask


@dataclass(frozen=True)
class Variant:
    """How a family differs from Llama.

    Attributes:
        bias: whether queries, keys and values have biases.
        query_key_norm: RMSNorm of queries and of keys, over each head or over all heads together.
        before, behind: whether attention and feed-forward layer have norms before and behind them.
        centred: whether weights of norms are distances from 1.
        scaled_embedding: whether embeddings are multiplied by sqrt(hidden).
        gelu: whether the gate is tanh-GELU.
    """

    bias: bool = False
    query_key_norm: Literal["head", "all"] | None = None
    before: bool = True
    behind: bool = False
    centred: bool = False
    scaled_embedding: bool = False
    gelu: bool = False


VARIANTS = {
    "qwen2": Variant(bias=True),
    "qwen3": Variant(query_key_norm="head"),
    "olmo3": Variant(query_key_norm="all", before=False, behind=True),
    "gemma3_text": Variant(query_key_norm="head", behind=True, centred=True, scaled_embedding=True, gelu=True),
}
"""By family; all others are as Llama."""


def variant_of(config: LlamaModel) -> Variant:
    """The variant of a family."""
    return VARIANTS.get(config.family, Variant())


def _norm(config: LlamaModel, width: int) -> nn.RMSNorm:
    kind = CentredRMSNorm if variant_of(config).centred else nn.RMSNorm
    return kind(width, eps=config.norm_eps)


class LlamaBlock(nn.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`; or with norms behind attention and mlp, too, or instead."""

    def __init__(self, config: LlamaModel) -> None:
        super().__init__()
        variant, kv_heads = variant_of(config), config.kv_heads or config.heads
        whole = variant.query_key_norm == "all"
        widths = [config.head_dim * (heads if whole else 1) for heads in (config.heads, kv_heads)]
        scalar = config.query_pre_attn_scalar

        def norm(wanted: bool) -> nn.Module:
            return _norm(config, config.hidden) if wanted else nn.Identity()

        self.attention_norm = norm(variant.before)
        self.attention = Attention(
            config.hidden,
            config.heads,
            kv_heads,
            config.head_dim,
            bias=variant.bias,
            norms=(_norm(config, widths[0]), _norm(config, widths[1])) if variant.query_key_norm else None,
            scale=None if scalar is None else scalar**-0.5,
        )
        self.attention_behind_norm = norm(variant.behind)
        self.mlp_norm = norm(variant.before)
        self.mlp = SwiGLU(config.hidden, config.ffn, gelu=variant.gelu)
        self.mlp_behind_norm = norm(variant.behind)

    def forward(self, x: Tensor, mask: Mask, rotary: Rotary) -> Tensor:
        x = x + self.attention_behind_norm(self.attention(self.attention_norm(x), mask, rotary))
        out: Tensor = x + self.mlp_behind_norm(self.mlp(self.mlp_norm(x)))
        return out


class Llama(Decoder):
    """See the module docstring.

    Parameter count with q = heads*d and k = kv*d for heads of size d: V*h*(1 or 2) + L*(2hq + 2hk + 3hf + 2h) + h;
    Qwen2 adds L*(q + 2k), Qwen3 L*2d, Olmo 3 L*(q + k), Gemma 3 L*(2h + 2d).
    """

    config: LlamaModel

    def block(self, index: int) -> nn.Module:
        return LlamaBlock(self.config)

    def final_norm(self) -> nn.Module:
        return _norm(self.config, self.config.hidden)

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = super().embed_tokens(tokens, positions)
        if variant_of(self.config).scaled_embedding:  # by a number that is rounded to the dtype
            x = x * torch.full((), self.config.hidden**0.5, dtype=x.dtype, device=x.device)
        return x

    def context(self, positions: Tensor) -> tuple[object, ...]:
        return self._rotary(positions, self.config.rope_base, self.config.rope_scaling)

    def _rotary(self, positions: Tensor, base: float, scaling: RopeScaling | None) -> tuple[object, ...]:
        frequencies = rotary_frequencies(self.config.head_dim, base, scaling, positions.device)
        return (rotary_tables(positions, frequencies, 1.0 if scaling is None else scaling.gain),)

    def contexts(self, slots: Slots | Visible | None, x: Tensor, positions: Tensor) -> list[tuple[object, ...]]:
        """Of blocks with a window: its mask, and with a pattern rotary positions of their own base, not scaled."""
        config, contexts = self.config, super().contexts(slots, x, positions)
        if config.sliding_window is None:
            return contexts
        rotary = contexts[0][1:]
        if config.sliding_window_pattern is not None:
            rotary = self._rotary(positions, config.rope_local_base or config.rope_base, None)
        sliding = (attention_mask(slots, x, self.backend, config.sliding_window), *rotary)
        return [sliding if config.slides(layer) else full for layer, full in enumerate(contexts)]

    def initial(self, name: str) -> Initial:
        if variant_of(self.config).centred and "norm" in f".{name}".split(".")[-2]:
            return Constant(0.0)
        return scaled_initial(name, self.config.std, self.config.layers)
