"""GPT-style decoder: pre-norm with LayerNorm, learned positions, biases, tanh-GELU, tied output matrix."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..model_sections import GPTModel
from .attention import Attention
from .decoder import Decoder
from .layers import Constant, GeluMLP, Initial, Normal, residual_std


class GPTBlock(nn.Module):
    """`x += drop(attention(norm(x))); x += drop(mlp(norm(x)))`."""

    def __init__(self, config: GPTModel) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config.hidden, config.heads, config.heads, bias=True, dropout=config.dropout)
        self.mlp_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.mlp = GeluMLP(config.hidden, config.ffn or 4 * config.hidden)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        x = x + F.dropout(self.attention(self.attention_norm(x), mask, None), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class GPT(Decoder):
    """See the module text. Parameter count with f = 4h: L*(12h^2 + 13h) + V*h*(1 or 2) + S*h + 2h."""

    def __init__(self, config: GPTModel) -> None:
        super().__init__(config.rows, config.hidden, tied_head=config.tied_head)
        self.config = config
        self.positions = nn.Embedding(int(config.positions), config.hidden)
        self.blocks.extend(GPTBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Token plus position embedding."""
        x: Tensor = self.embedding(tokens) + self.positions(positions)
        return F.dropout(x, self.config.dropout, self.training)

    def context(self, positions: Tensor, mask: Tensor | None) -> tuple[object, ...]:
        """The mask alone."""
        del positions
        return (mask,)

    def initial(self, name: str) -> Initial:
        """N(0, init_std); residual projections scaled by 1/sqrt(2L); norms 1, biases 0."""
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
