"""Cross-entropy from hidden states, without ever holding all the logits of a large vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORE = -100
"""Label of positions that are not predicted."""

_LOGITS_PER_CHUNK = 2**26
"""fp32 logits alive at once: 256 MiB of them, and as much again for their gradient."""


def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of `hidden @ weight.T` at every position.

    Positions are processed in chunks, recomputed in the backward pass when there is more than one, so the peak does
    not grow with the number of positions. (`F.linear_cross_entropy` does the same from torch 2.13 on only.)

    Args:
        hidden: [B, S, H], any floating dtype.
        weight: output matrix [V, H].
        labels: int64 [B, S], `IGNORE` where nothing is predicted.

    Returns:
        fp32 [B, S], natural log, zero where ignored.
    """
    rows, targets = hidden.flatten(0, 1), labels.flatten()
    size = max(256, _LOGITS_PER_CHUNK // weight.shape[0])
    if len(rows) <= size:
        losses = _losses(rows, weight, targets)
    else:
        chunks = zip(rows.split(size), targets.split(size), strict=True)
        losses = torch.cat([checkpoint(_losses, part, weight, label, use_reentrant=False) for part, label in chunks])
    return losses.view_as(labels).clone()  # FSDP hooks the output; a view of it would be fragile


def _losses(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(rows, weight).float(), targets, ignore_index=IGNORE, reduction="none")
