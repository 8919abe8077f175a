"""Llama-style decoder (arXiv 2302.13971, 2307.09288): pre-norm with RMSNorm, rotary positions, GQA, SwiGLU."""

from __future__ import annotations

from torch import Tensor, nn

from fsdp_pretrain.config.model import LlamaModel

from .attention import Attention
from .decoder import Decoder
from .layers import Initial, Rotary, SwiGLU, rotary_frequencies, rotary_tables, scaled_initial
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
        x = x + self.attention(self.attention_norm(x), mask, rotary)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(Decoder):
    """See the module docstring. Parameter count: V*h*(1 or 2) + L*(2h^2 + 2h^2*kv/heads + 3hf + 2h) + h."""

    def __init__(self, config: LlamaModel) -> None:
        super().__init__(config, lambda _: LlamaBlock(config), nn.RMSNorm(config.hidden, eps=config.norm_eps))
        self.config = config

    def context(self, positions: Tensor) -> tuple[object, ...]:
        config = self.config
        frequencies = rotary_frequencies(config.head_dim, config.rope_base, config.rope_scaling, positions.device)
        return (rotary_tables(positions, frequencies),)

    def initial(self, name: str) -> Initial:
        return scaled_initial(name, self.config.std, self.config.layers)
