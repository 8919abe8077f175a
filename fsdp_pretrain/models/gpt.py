"""Megatron-GPT-style decoder (tr1, tr8, tr11/BLOOM): LayerNorm before each part, biases, tanh-GELU.

Positions are learned, or ALiBi. Embeddings may be normalised (BLOOM); residual projections start with std / sqrt(2L).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..model_sections import GPTModel
from .attention import Attention
from .decoder import Decoder
from .layers import Constant, GeluMLP, Initial, Normal, residual_std
from .masks import Mask, Slots, add_alibi, dense_mask


class GPTBlock(nn.Module):
    """`x += drop(attention(norm(x))); x += drop(mlp(norm(x)))`."""

    def __init__(self, config: GPTModel, layer: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(
            config.hidden,
            config.heads,
            config.heads,
            bias=True,
            dropout=config.attention_rate,
            scores=config.scores,
            layer=layer,
        )
        self.mlp_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.mlp = GeluMLP(config.hidden, config.ffn_width)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        x = x + F.dropout(self.attention(self.attention_norm(x), mask, None), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class GPT(Decoder):
    """See the module text.

    Parameter count with f = 4h: L*(12h^2 + 13h) + V*h*(1 or 2) + S*h + 2h; ALiBi drops S*h, embedding_norm adds 2h.
    """

    def __init__(self, config: GPTModel) -> None:
        super().__init__(config.rows, config.hidden, tied_head=config.tied_head)
        self.config = config
        self.embedding_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps) if config.embedding_norm else None
        alibi = config.positions == "alibi"
        self.positions = None if alibi else nn.Embedding(int(config.positions), config.hidden)
        self.blocks.extend(GPTBlock(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Token embedding, normalised if so configured, plus position embedding if there is one."""
        x: Tensor = self.embedding(tokens)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.positions is not None:
            x = x + self.positions(positions)
        return F.dropout(x, self.config.dropout, self.training)

    def context(self, positions: Tensor) -> tuple[object, ...]:
        """Nothing."""
        del positions
        return ()

    def mask(self, slots: Slots | None, x: Tensor) -> Mask:
        """Dense where ALiBi or the scaling of scores needs it."""
        if self.positions is None:
            return add_alibi(dense_mask(slots, x.shape[1], x.device), self.config.heads, x.dtype)
        if self.config.scores != "fused":
            return dense_mask(slots, x.shape[1], x.device)
        return super().mask(slots, x)

    def initial(self, name: str) -> Initial:
        """N(0, std); residual projections scaled by 1/sqrt(2L); norms 1, biases 0."""
        kind, leaf = name.split(".")[-2:]
        if leaf == "bias":
            return Constant(0.0)
        if "norm" in kind:
            return Constant(1.0)
        if kind in ("out", "down"):
            return Normal(residual_std(self.config.std, self.config.layers))
        if kind in ("embedding", "positions", "head", "query", "key", "value", "up"):
            return Normal(self.config.std)
        raise KeyError(name)
