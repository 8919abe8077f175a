"""Llama-style decoder (arXiv 2302.13971, 2307.09288): pre-norm with RMSNorm, rotary positions, GQA, SwiGLU."""

from __future__ import annotations

from torch import Tensor, nn

from ..model_sections import LlamaModel
from .attention import Attention
from .decoder import Decoder
from .layers import (
    Constant,
    Initial,
    Normal,
    Rotary,
    SwiGLU,
    residual_std,
    rotary_frequencies,
    rotary_tables,
)
from .masks import Mask


class LlamaBlock(nn.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`."""

    def __init__(self, config: LlamaModel) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config.hidden, config.heads, config.kv_heads or config.heads)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = SwiGLU(config.hidden, config.ffn)

    def forward(self, x: Tensor, mask: Mask, rotary: Rotary) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        x = x + self.attention(self.attention_norm(x), mask, rotary)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(Decoder):
    """See the module text. Parameter count: V*h*(1 or 2) + L*(2h^2 + 2h^2*kv/heads + 3hf + 2h) + h."""

    def __init__(self, config: LlamaModel) -> None:
        super().__init__(config.rows, config.hidden, tied_head=config.tied_head)
        self.config = config
        self.blocks.extend(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)

    def context(self, positions: Tensor) -> tuple[object, ...]:
        """The rotary tables of the positions."""
        config = self.config
        frequencies = rotary_frequencies(config.head_dim, config.rope_base, config.rope_scaling, positions.device)
        return (rotary_tables(positions, frequencies),)

    def initial(self, name: str) -> Initial:
        """N(0, init_std); residual projections scaled by 1/sqrt(2L); norms 1."""
        kind = name.split(".")[-2]
        if "norm" in kind:
            return Constant(1.0)
        if kind in ("out", "down"):
            return Normal(residual_std(self.config.std, self.config.layers))
        if kind in ("embedding", "head", "query", "key", "value", "gate", "up"):
            return Normal(self.config.std)
        raise KeyError(name)
