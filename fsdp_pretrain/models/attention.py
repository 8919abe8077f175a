"""Self-attention over packed samples, and the masks that say which documents may see each other.

A mask is `None` (causal over the whole sample) or a boolean tensor [B, 1, S, S], True where a query (row) may look
at a key (column). It is built once per micro-batch from document lengths, never from token values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import rotate


def document_ids(lengths: Tensor, sequence_length: int) -> Tensor:
    """Which document of its sample each position belongs to.

    Args:
        lengths: int [B, D], lengths of the documents in each sample, zero-padded; each row sums to `sequence_length`.
        sequence_length: S.

    Returns:
        int64 [B, S], counting from 0.
    """
    ends = lengths.cumsum(1)
    positions = torch.arange(sequence_length, device=lengths.device).expand(lengths.shape[0], -1)
    return torch.searchsorted(ends, positions.contiguous(), right=True)


def document_positions(lengths: Tensor, sequence_length: int) -> Tensor:
    """Positions that start again at 0 in each document: int64 [B, S] (see `document_ids` for the arguments).

    A document that began in an earlier sample starts at 0 too: what the model cannot see does not count.
    """
    starts = lengths.cumsum(1) - lengths
    positions = torch.arange(sequence_length, device=lengths.device)
    return positions - starts.gather(1, document_ids(lengths, sequence_length))


def document_mask(lengths: Tensor, sequence_length: int) -> Tensor:
    """Causal attention inside each document only: bool [B, 1, S, S] (see `document_ids` for the arguments)."""
    ids = document_ids(lengths, sequence_length)
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    causal = torch.ones(sequence_length, sequence_length, dtype=torch.bool, device=lengths.device).tril()
    return (same & causal).unsqueeze(1)


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values.

    Args:
        hidden: width of the residual stream.
        heads: query heads, head size is hidden / heads.
        kv_heads: key/value heads; each serves heads / kv_heads query heads.
        bias: biases on all four projections.
        dropout: on attention probabilities, in training mode.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, *, bias: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.dropout = heads, kv_heads, hidden // heads, dropout
        self.query = nn.Linear(hidden, heads * self.head_dim, bias=bias)
        self.key = nn.Linear(hidden, kv_heads * self.head_dim, bias=bias)
        self.value = nn.Linear(hidden, kv_heads * self.head_dim, bias=bias)
        self.out = nn.Linear(heads * self.head_dim, hidden, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, S, H] -> [B, S, H]; `mask` as in the module text, `rotary` from `rotary_table` or None."""
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, self.head_dim)
        key = self.key(x).view(batch, length, self.kv_heads, self.head_dim)
        value = self.value(x).view(batch, length, self.kv_heads, self.head_dim)
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.kv_heads != self.heads,
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out
