"""One forward pass over packed samples: from a micro-batch to the loss at every position, as the configuration says."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..sections import DataSection
from .decoder import Decoder
from .masks import Slots


class MicroBatch(Protocol):
    """What the model sees in one forward pass; see `data.loader.MicroBatch`."""

    tokens: Tensor
    labels: Tensor | None
    lengths: Tensor | None
    sources: Tensor
    prefix: Tensor | None
    positions: Tensor | None


def losses(model: Decoder, micro: MicroBatch, data: DataSection, device: torch.device) -> tuple[Tensor, Tensor]:
    """The loss at every position.

    Args:
        model: on `device`.
        micro: in host memory; with lengths if `data.uses_lengths`.
        data: for attention and positions.

    Returns:
        fp32 [b, S], natural-log cross-entropy, zero where ignored; int64 [b, S], the labels, on `device`.
    """
    tokens = micro.tokens.to(device, non_blocking=True)
    labels = tokens[:, 1:] if micro.labels is None else micro.labels.to(device, non_blocking=True)
    slots = positions = None
    if micro.lengths is not None:
        prefix = None if micro.prefix is None else micro.prefix.to(device, non_blocking=True)
        slots = Slots(micro.lengths.to(device, non_blocking=True), prefix)
    if micro.positions is not None:
        positions = micro.positions.to(device, non_blocking=True)
    elif data.positions == "document":
        assert slots is not None
        positions = slots.positions(tokens.shape[1] - 1)
    if data.attention == "causal" and micro.prefix is None:
        slots = None
    return model(tokens[:, :-1], labels, slots, positions), labels
