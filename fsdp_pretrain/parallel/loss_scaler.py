"""Dynamic loss scaling for fp16."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_pretrain.config.sections import SMALLEST_SCALE, LossScaleSection

_HYSTERESIS = 2
"""Overflows within a window before the loss scale is halved."""


class LossScaler:
    """Dynamic loss scaling for fp16 with Megatron-DeepSpeed's rule, in device tensors, so no step synchronises.

    A step overflows if loss or gradients of any rank are not finite; all ranks then skip it. An overflow uses up
    hysteresis; once one is left, it halves the scale. Good steps in between do not restore hysteresis; after `window`
    good steps in a row the scale doubles and hysteresis is full again.

    `state`: the `state()` of another scaler to continue from.
    """

    def __init__(self, section: LossScaleSection, device: torch.device, state: list[float] | None = None) -> None:
        self._window = section.window
        start = [section.first, _HYSTERESIS, 0.0]
        self._state = torch.tensor(state or start, dtype=torch.float32, device=device)

    @property
    def scale(self) -> Tensor:
        """Factor of the next step's loss, fp32, 0-dim."""
        return self._state[0]

    def state(self) -> list[float]:
        """[scale, hysteresis left, good steps in a row]; synchronises with the device."""
        values: list[float] = self._state.tolist()
        return values

    def advance(self, overflow: Tensor) -> None:
        """Update the scale after a step. `overflow`: 0-dim, equal on all ranks, 1 if the step was skipped, else 0."""
        scale, left, good = self._state.unbind()
        halved = torch.where(left > 1, scale, (scale / 2).clamp(min=SMALLEST_SCALE))
        after_overflow = torch.stack((halved, (left - 1).clamp(min=1), torch.zeros_like(good)))
        doubled = torch.stack((scale * 2, torch.full_like(left, _HYSTERESIS), torch.zeros_like(good)))
        after_good = torch.where(good + 1 >= self._window, doubled, torch.stack((scale, left, good + 1)))
        self._state = torch.where(overflow > 0, after_overflow, after_good)
