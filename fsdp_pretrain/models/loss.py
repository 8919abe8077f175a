"""Cross-entropy from hidden states without materialising all logits of a large vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
"""Label of positions without a target."""

_LOGITS_PER_CHUNK = 2**25
"""Logits per chunk: 128 MiB in fp32; at the peak there are three tensors of that size."""
_KEPT_BYTES = 2**30
"""Logits of a micro-batch are kept for the backward pass if they all take at most this, in the dtype of the hidden
states; else they are computed again, which is a third of the output matrix's work."""


@dataclass(frozen=True)
class ChunkKernels:
    """How a chunk is computed: `_forward_chunk` and `_backward_chunk`, or compiled forms of them."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Tensor]


def token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, kernels: ChunkKernels | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of `hidden @ weight.T` per position, and the log-normaliser of the softmax.

    The vocabulary is processed in chunks, also in the backward pass, so that logits never take more memory than
    `_KEPT_BYTES` and a few chunks. Gradients are exact for any weighting of both results.
    (`F.linear_cross_entropy`, which is similar, needs torch 2.13.)

    Args:
        hidden: [B, S, H], any floating dtype.
        weight: output matrix [V, H], of the same dtype.
        labels: int64 [B, S], `IGNORE` where there is no target.
        kernels: default: eager ones.

    Returns:
        fp32 [B, S] losses, natural log; fp32 [B, S] log-normalisers. Both are zero where ignored.
    """
    rows, targets, kernels = hidden.flatten(0, 1), labels.flatten(), kernels or _EAGER
    size = len(rows) * len(weight) * rows.element_size()
    keep = torch.is_grad_enabled() and size <= _KEPT_BYTES
    losses, normalisers = _TokenLosses.apply(rows, weight, targets, kernels, keep)  # type: ignore[no-untyped-call]
    return losses.view_as(labels), normalisers.view_as(labels)


class _TokenLosses(torch.autograd.Function):
    """[N, H], [V, H], [N] -> fp32 [N], fp32 [N].

    Chunks are over the vocabulary, not over positions: each row of the weight's gradient is then a single product, not
    a sum of terms rounded to the weight's dtype, and the accumulators over chunks (normalisers, gradient of the rows)
    are small enough for fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, kernels: ChunkKernels, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """Save the normalisers, and the logits if `keep`; else `backward` computes them again."""
        kept: list[Tensor] = []
        normalisers = torch.full((len(rows),), -torch.inf, device=rows.device)
        picked = torch.zeros_like(normalisers)
        for chunk, local, inside in _chunks(rows, weight, targets):
            logits = F.linear(rows, weight[chunk])
            normalisers, picked = kernels.forward(logits, local, inside, normalisers, picked)
            if keep:
                kept.append(logits)
            del logits  # free before the next chunk
        ctx.kernels = kernels
        ctx.save_for_backward(rows, weight, targets, normalisers, *kept)
        learned = targets != IGNORE
        return (normalisers - picked).where(learned, 0.0), normalisers.where(learned, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses: Tensor, d_normalisers: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of rows and weight; p being the softmax, d logits = (d loss + d normaliser) p - d loss onehot."""
        rows, weight, targets, normalisers, *kept = ctx.saved_tensors
        learned = targets != IGNORE
        d_picked = d_losses.where(learned, 0.0)
        d_softmax = (d_losses + d_normalisers).where(learned, 0.0).unsqueeze(1)
        d_rows, d_weight = torch.zeros_like(rows, dtype=torch.float32), torch.empty_like(weight)
        for number, (chunk, local, inside) in enumerate(_chunks(rows, weight, targets)):
            logits = kept[number] if kept else F.linear(rows, weight[chunk])
            d = ctx.kernels.backward(logits, local, inside, normalisers, d_softmax, d_picked)
            d_rows += d @ weight[chunk]
            torch.mm(d.T, rows, out=d_weight[chunk])
            del logits, d  # free before the next chunk
        return d_rows.to(rows.dtype), d_weight, None, None, None


def _forward_chunk(
    logits: Tensor, local: Tensor, inside: Tensor, normalisers: Tensor, picked: Tensor
) -> tuple[Tensor, Tensor]:
    """Update the normalisers [N] and the logits of the targets [N] with a chunk's logits."""
    logits = logits.float()
    picked = picked + logits.gather(1, local).squeeze(1).where(inside, 0.0)
    return torch.logaddexp(normalisers, logits.logsumexp(1)), picked


def _backward_chunk(
    logits: Tensor, local: Tensor, inside: Tensor, normalisers: Tensor, d_softmax: Tensor, d_picked: Tensor
) -> Tensor:
    """Gradient of the chunk's logits [N, rows of the chunk], in their dtype; may overwrite them."""
    d = logits.float()
    d.sub_(normalisers.unsqueeze(1)).exp_().mul_(d_softmax)
    d.scatter_add_(1, local, -d_picked.where(inside, 0.0).unsqueeze(1))
    return d.to(logits.dtype)


def _fused_backward_chunk(
    logits: Tensor, local: Tensor, inside: Tensor, normalisers: Tensor, d_softmax: Tensor, d_picked: Tensor
) -> Tensor:
    """`_backward_chunk` as one formula of an element, which compiles to one kernel; eager it would take more memory."""
    d = (logits.float() - normalisers.unsqueeze(1)).exp() * d_softmax
    target = (torch.arange(logits.shape[1], device=logits.device) == local) & inside.unsqueeze(1)
    return torch.where(target, d - d_picked.unsqueeze(1), d).to(logits.dtype)


_EAGER = ChunkKernels(_forward_chunk, _backward_chunk)


def compiled_kernels() -> ChunkKernels:
    """Kernels fused by torch.compile: one pass over the logits instead of several (0.7 of the time on an H100, measured
    when the backward pass still was three kernels).

    Every shape is compiled on its own, so that a result does not depend on what was computed before.
    """
    return ChunkKernels(
        torch.compile(_forward_chunk, dynamic=False), torch.compile(_fused_backward_chunk, dynamic=False)
    )


def _chunks(rows: Tensor, weight: Tensor, targets: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Vocabulary chunks: slice, clamped targets [N, 1] relative to its start, and which targets [N] are in it."""
    size = max(1, _LOGITS_PER_CHUNK // max(1, len(rows)))
    for start in range(0, len(weight), size):
        stop = min(start + size, len(weight))
        local = targets - start
        yield slice(start, stop), local.clamp(0, stop - start - 1).unsqueeze(1), (local >= 0) & (targets < stop)
