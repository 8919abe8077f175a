"""One forward pass over packed samples: from a micro-batch to the loss at every position, as the configuration says."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..sections import DataSection
from .attention import document_mask, document_positions
from .decoder import Decoder


class MicroBatch(Protocol):
    """What the model sees in one forward pass; see `data.loader.MicroBatch`."""

    tokens: Tensor
    labels: Tensor | None
    lengths: Tensor | None
    sources: Tensor


def losses(model: Decoder, micro: MicroBatch, data: DataSection, device: torch.device) -> tuple[Tensor, Tensor]:
    """The loss at every position.

    Args:
        model: on `device`.
        micro: in host memory; with document lengths if `data.uses_lengths`.
        data: for attention and positions.

    Returns:
        fp32 [b, S], natural-log cross-entropy, zero where ignored; int64 [b, S], the labels, on `device`.
    """
    tokens = micro.tokens.to(device, non_blocking=True)
    labels = tokens[:, 1:] if micro.labels is None else micro.labels.to(device, non_blocking=True)
    mask = positions = None
    if data.uses_lengths:
        assert micro.lengths is not None
        lengths, size = micro.lengths.to(device, non_blocking=True), tokens.shape[1] - 1
        mask = document_mask(lengths, size) if data.attention == "document" else None
        positions = document_positions(lengths, size) if data.positions == "document" else None
    return model(tokens[:, :-1], labels, mask, positions), labels
