"""Llama-style decoder (arXiv 2302.13971, 2307.09288): pre-norm with RMSNorm, rotary positions, GQA, SwiGLU.

Mistral (arXiv 2310.06825) is the same for sequences up to the length of its window. Qwen2 (arXiv 2407.10671) adds
biases on queries, keys and values, Qwen3 (arXiv 2505.09388) an RMSNorm over each head of queries and of keys.
"""

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
        self.attention = Attention(
            config.hidden,
            config.heads,
            config.kv_heads or config.heads,
            config.head_dim,
            bias=config.family == "qwen2",
            head_norm=config.norm_eps if config.family == "qwen3" else None,
        )
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = SwiGLU(config.hidden, config.ffn)

    def forward(self, x: Tensor, mask: Mask, rotary: Rotary) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask, rotary)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(Decoder):
    """See the module docstring.

    Parameter count with q = heads*d and k = kv*d for heads of size d: V*h*(1 or 2) + L*(2hq + 2hk + 3hf + 2h) + h;
    Qwen2 adds L*(q + 2k), Qwen3 L*2d.
    """

    config: LlamaModel

    def block(self, index: int) -> nn.Module:
        return LlamaBlock(self.config)

    def final_norm(self) -> nn.Module:
        return nn.RMSNorm(self.config.hidden, eps=self.config.norm_eps)

    def context(self, positions: Tensor) -> tuple[object, ...]:
        config = self.config
        frequencies = rotary_frequencies(config.head_dim, config.rope_base, config.rope_scaling, positions.device)
        return (rotary_tables(positions, frequencies),)

    def initial(self, name: str) -> Initial:
        return scaled_initial(name, self.config.std, self.config.layers)
