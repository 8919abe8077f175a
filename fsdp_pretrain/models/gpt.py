"""Megatron-GPT-style decoder (tr1, tr8, tr11/BLOOM): pre-LayerNorm, biases, tanh-GELU.

Positions are learned or ALiBi. Embeddings may be normalised (BLOOM); residual projections have initial std / sqrt(2L).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_pretrain.config.model import GPTModel

from .attention import biased_attention
from .decoder import Decoder
from .layers import GeluMLP, Initial, scaled_initial
from .masks import Mask, Slots, Visible, add_alibi, block_mask, dense_mask


class GPTBlock(nn.Module):
    """`x += drop(attention(norm(x))); x += drop(mlp(norm(x)))`."""

    def __init__(self, config: GPTModel, layer: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attention = biased_attention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.mlp = GeluMLP(config.hidden, config.ffn_width)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        x = x + F.dropout(self.attention(self.attention_norm(x), mask, None), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class GPT(Decoder):
    """See the module docstring.

    Parameter count with f = 4h: L*(12h^2 + 13h) + V*h*(1 or 2) + S*h + 2h; ALiBi drops S*h, embedding_norm adds 2h.
    """

    config: GPTModel

    def __init__(self, config: GPTModel) -> None:
        super().__init__(config)
        self.embedding_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps) if config.embedding_norm else None
        alibi = config.positions == "alibi"
        self.positions = None if alibi else nn.Embedding(int(config.positions), config.hidden)

    def block(self, index: int) -> nn.Module:
        return GPTBlock(self.config, index)

    def final_norm(self) -> nn.Module:
        return nn.LayerNorm(self.config.hidden, eps=self.config.norm_eps)

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Token embedding, optionally normalised, plus the position embedding unless ALiBi."""
        x: Tensor = self.embedding(tokens)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.positions is not None:
            x = x + self.positions(positions)
        return F.dropout(x, self.config.dropout, self.training)

    def context(self, positions: Tensor) -> tuple[object, ...]:
        del positions
        return ()

    def mask(self, slots: Slots | Visible | None, x: Tensor) -> Mask:
        """The attention mask; with ALiBi a bias for the scores, unless the blocks add it."""
        if self.positions is not None:
            return super().mask(slots, x)
        length = x.shape[1]
        if isinstance(slots, Visible):
            distance = slots.key_positions.unsqueeze(1) - slots.query_positions.unsqueeze(2)
            return add_alibi(slots.keys.unsqueeze(1), self.config.heads, x.dtype, distance.unsqueeze(1))
        if self.backend == "flex":  # the blocks add ALiBi
            return block_mask(slots or Slots(torch.full((len(x), 1), length, device=x.device)), length)
        return add_alibi(dense_mask(slots, length, x.device), self.config.heads, x.dtype)

    def initial(self, name: str) -> Initial:
        return scaled_initial(name, self.config.std, self.config.layers)
