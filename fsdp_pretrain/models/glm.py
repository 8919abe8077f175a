"""GLM-style decoder (GLM-130B, arXiv 2210.02414): DeepNorm, rotary positions in one or two dimensions, GeGLU, biases.

DeepNorm (arXiv 2203.00555) is Post-LN with alpha times the residual; here each LayerNorm is at the start of the next
sub-layer, so the residual branch is alpha times the *normalised* stream, the first norm acts on the embeddings, and
there are 2L + 1 norms. Attention is causal, or full over a slot's prefix (see `masks`).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_pretrain.config.model import GLMModel

from .attention import biased_attention
from .decoder import Decoder
from .layers import Constant, GeGLU, Initial, NormalInit, Rotary, rotary_frequencies, rotary_tables
from .masks import Mask


def deepnorm_constants(layers: int) -> tuple[float, float]:
    """DeepNorm's (alpha, beta) as in GLM-130B: the factor of the residual, and the initial gain of some matrices."""
    return (2 * layers) ** 0.5, (2 * layers) ** -0.5


class GLMBlock(nn.Module):
    """`u = norm(x); x = alpha u + drop(attention(u)); v = norm(x); x = alpha v + drop(mlp(v))`."""

    def __init__(self, config: GLMModel, layer: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.alpha, _ = deepnorm_constants(config.layers)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attention = biased_attention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.mlp = GeGLU(config.hidden, config.ffn_width)

    def forward(self, x: Tensor, mask: Mask, rotary: Rotary) -> Tensor:
        u = self.attention_norm(x)
        x = self.alpha * u + F.dropout(self.attention(u, mask, rotary), self.dropout, self.training)
        v = self.mlp_norm(x)
        out: Tensor = self.alpha * v + F.dropout(self.mlp(v), self.dropout, self.training)
        return out


class GLM(Decoder):
    """See the module docstring. Parameter count: L*(4h^2 + 3hf + 9h + 2f) + V*h*(1 or 2) + 2h."""

    config: GLMModel

    def block(self, index: int) -> nn.Module:
        return GLMBlock(self.config, index)

    def final_norm(self) -> nn.Module:
        return nn.LayerNorm(self.config.hidden, eps=self.config.norm_eps)

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return F.dropout(super().embed_tokens(tokens, positions), self.config.dropout, self.training)

    def context(self, positions: Tensor) -> tuple[object, ...]:
        """The rotary tables; two pairs with `positions = "rope-2d"`."""
        size = self.config.head_dim
        if self.config.positions == "rope-2d":
            size //= 2
            if positions.ndim < 3:  # plain text: the position within a blank is 0
                positions = torch.atleast_2d(positions)
                positions = torch.stack((positions, torch.zeros_like(positions)), 1)
        elif positions.ndim == 3:
            raise ValueError('positions of two dimensions need a model with positions = "rope-2d"')
        return (rotary_tables(positions, rotary_frequencies(size, self.config.rope_base, None, positions.device)),)

    def initial(self, name: str) -> Initial:
        """Xavier normal (std = gain * sqrt(2 / (in + out))) with gain beta for value, output and MLP matrices.

        As in GLM-130B, whose code however splits the fused query-key-value matrix wrongly; the separate matrices here
        all follow the paper's rule.
        """
        kind, leaf = f".{name}".split(".")[-2:]
        if leaf == "bias":
            return Constant(0.0)
        if "norm" in kind:
            return Constant(1.0)
        config = self.config
        _, beta = deepnorm_constants(config.layers)
        gain, width = {
            "query": (1.0, config.hidden),
            "key": (1.0, config.hidden),
            "value": (beta, config.hidden),
            "out": (beta, config.hidden),
            "up": (beta, config.ffn_width),
            "gate": (beta, config.ffn_width),
            "down": (beta, config.ffn_width),
            "embedding": (1.0, config.rows),
            "head": (1.0, config.rows),
        }[kind]
        return NormalInit(gain * math.sqrt(2 / (config.hidden + width)))
