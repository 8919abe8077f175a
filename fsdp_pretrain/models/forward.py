"""One forward pass: from a micro-batch of packed samples to the loss per position."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fsdp_pretrain.config.data_section import DataSection

from .decoder import Decoder
from .loss import IGNORE
from .masks import Slots


class PackedBatch(Protocol):
    """The inputs of one forward pass; see `fsdp_pretrain.data.packing.batch.MicroBatch`."""

    tokens: Tensor
    labels: Tensor | None
    lengths: Tensor | None
    sources: Tensor
    prefix: Tensor | None
    positions: Tensor | None


class Losses(NamedTuple):
    """The loss per position of one micro-batch, on the model's device; zero where labels are ignored."""

    losses: Tensor
    """fp32 [b, S], natural-log cross-entropy."""
    labels: Tensor
    """int64 [b, S]."""
    penalties: Tensor | None
    """fp32 [b, S], squared log-normalisers for the z-loss, if they were asked for."""


def losses(
    model: Decoder, micro: PackedBatch, data: DataSection, device: torch.device, *, with_penalties: bool = False
) -> Losses:
    """The loss per position.

    Args:
        micro: the micro-batch, in host memory; with lengths if `data.uses_lengths`.
        with_penalties: also return the squared log-normalisers for the z-loss.
    """
    tokens, slots, positions = _inputs(micro, data, device)
    labels = tokens[:, 1:] if micro.labels is None else micro.labels.to(device, non_blocking=True)
    out = model(tokens[:, :-1], labels, slots, positions, with_normalisers=with_penalties)
    return Losses(out[0], labels, out[1].square()) if with_penalties else Losses(out, labels, None)


def _inputs(micro: PackedBatch, data: DataSection, device: torch.device) -> tuple[Tensor, Slots | None, Tensor | None]:
    """Tokens [b, S + 1] (one more than positions), slots and positions, on the device."""
    tokens = micro.tokens.to(device, non_blocking=True)
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
    return tokens, slots, positions


def learning_samples(micro: PackedBatch) -> int:
    """Number of samples of a micro-batch (in host memory) with at least one target."""
    return len(micro.tokens) if micro.labels is None else int((micro.labels != IGNORE).any(1).sum())
