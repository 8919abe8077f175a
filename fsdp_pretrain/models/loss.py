"""Cross-entropy from hidden states, without ever holding all the logits of a large vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
"""Label of positions that are not predicted."""

_LOGITS_PER_CHUNK = 2**25
"""Logits alive at once. In fp32 128 MiB of them, and at the worst moment three tensors of that size."""


def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of `hidden @ weight.T` at every position, and the logarithm of the softmax's denominator.

    The vocabulary is processed in chunks, again in the backward pass, so the peak grows neither with it nor with the
    number of positions. Both results may be weighted as one likes afterwards: the gradients are exact for any.
    (`F.linear_cross_entropy` does something similar from torch 2.13 on only.)

    Args:
        hidden: [B, S, H], any floating dtype.
        weight: output matrix [V, H], of the same dtype.
        labels: int64 [B, S], `IGNORE` where nothing is predicted.

    Returns:
        fp32 [B, S] losses, natural log; fp32 [B, S] log-normalisers. Both are zero where ignored.
    """
    losses, normalisers = _TokenLosses.apply(hidden.flatten(0, 1), weight, labels.flatten())  # type: ignore[no-untyped-call]
    return losses.view_as(labels), normalisers.view_as(labels)


class _TokenLosses(torch.autograd.Function):
    """[N, H], [V, H], [N] -> fp32 [N], fp32 [N].

    Chunks of the vocabulary rather than of the positions: every row of the weight's gradient is then one product,
    not a sum of many rounded to the weight's dtype, and the sums over chunks (normalisers, gradient of the rows) are
    small enough to be kept in fp32.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps the normalisers rather than the logits, which are made again in `backward`."""
        normalisers = torch.full((len(rows),), -torch.inf, device=rows.device)
        picked = torch.zeros_like(normalisers)
        for chunk, local, inside in _chunks(rows, weight, targets):
            logits = F.linear(rows, weight[chunk]).float()
            picked += logits.gather(1, local).squeeze(1).where(inside, 0.0)
            normalisers = torch.logaddexp(normalisers, logits.logsumexp(1))
            del logits  # before the next is made
        ctx.save_for_backward(rows, weight, targets, normalisers)
        learned = targets != IGNORE
        return (normalisers - picked).where(learned, 0.0), normalisers.where(learned, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses: Tensor, d_normalisers: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With p the softmax: d logits = (d loss + d normaliser) p - d loss [the target]."""
        rows, weight, targets, normalisers = ctx.saved_tensors
        learned = targets != IGNORE
        d_picked = d_losses.where(learned, 0.0)
        d_softmax = (d_losses + d_normalisers).where(learned, 0.0).unsqueeze(1)
        d_rows, d_weight = torch.zeros_like(rows, dtype=torch.float32), torch.empty_like(weight)
        for chunk, local, inside in _chunks(rows, weight, targets):
            d = F.linear(rows, weight[chunk]).float()
            d.sub_(normalisers.unsqueeze(1)).exp_().mul_(d_softmax)
            d.scatter_add_(1, local, -d_picked.where(inside, 0.0).unsqueeze(1))
            d = d.to(rows.dtype)
            d_rows += d @ weight[chunk]
            torch.mm(d.T, rows, out=d_weight[chunk])
            del d
        return d_rows.to(rows.dtype), d_weight, None


def _chunks(rows: Tensor, weight: Tensor, targets: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Parts of the vocabulary, with the targets [N, 1] counted from the part's start, and which [N] lie inside it."""
    size = max(1, _LOGITS_PER_CHUNK // max(1, len(rows)))
    for start in range(0, len(weight), size):
        stop = min(start + size, len(weight))
        local = targets - start
        yield slice(start, stop), local.clamp(0, stop - start - 1).unsqueeze(1), (local >= 0) & (targets < stop)
