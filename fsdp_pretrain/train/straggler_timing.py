"""Compute time of a rank without communication, which tells a slow rank from the ranks that wait for it.

Measured around each block's forward pass, between all-gather and reshard of its parameters, plus the wait for data.
Uses device times where possible, since the host runs ahead. A recomputation that stops early inside a block has a start
but no end, and does not count.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import nn

from fsdp_pretrain.heartbeat import Heartbeat
from fsdp_pretrain.models import Decoder

from .device_timing import between, mark

_EVERY = 10
"""On a GPU, every tenth step is measured."""
WINDOW = 50
"""Steps over which the compute times of ranks are compared."""


class ComputeTime:
    """Measures the compute time of one rank's steps, and reports the median of every `WINDOW` steps to its heartbeat.

    Adds hooks to the blocks of the model, which must be sharded. `compiled`: the blocks are compiled, and their graphs
    must not contain the hooks.
    """

    def __init__(self, model: Decoder, device: torch.device, heartbeat: Heartbeat, *, compiled: bool) -> None:
        self._device, self._every = device, _EVERY if device.type == "cuda" else 1
        self._window, self._heartbeat = max(1, WINDOW // self._every), heartbeat
        self._marks: list[tuple[Any, Any]] | None = None  # start and end of each block, if this step is measured
        self._begun: Any = None
        self._steps = 0
        self._number = 0  # of windows reported
        self._measured: list[float] = []
        if type(heartbeat) is Heartbeat:
            return  # no watchdog
        before, after = self._before, self._after
        if compiled:  # else left alone: `disable` imports torch._dynamo, half a second
            before, after = torch.compiler.disable(before), torch.compiler.disable(after)
        for block in model.blocks:  # after the hooks that gather parameters, before those that free them
            block.register_forward_pre_hook(before)
            block.register_forward_hook(after, prepend=True)

    def begin(self) -> None:
        """Called when the forward passes of a step start."""
        self._steps += 1
        self._marks = [] if self._steps % self._every == 0 else None

    def end(self) -> list[tuple[Any, Any]] | None:
        """Called when the step was issued; returns an argument of `add`, to be called when the device has finished."""
        marks, self._marks = self._marks, None
        return marks

    def add(self, marks: list[tuple[Any, Any]] | None, waited: float) -> None:
        """Add a complete step. `waited`: seconds that it waited for its data."""
        if marks is None:
            return
        self._measured.append(waited + sum(between(start, end) for start, end in marks))
        if len(self._measured) == self._window:
            self._number += 1
            self._heartbeat.measured(self._number, median(self._measured))
            self._measured = []

    def _before(self, module: nn.Module, args: Any) -> None:
        del module, args
        if self._marks is not None:
            self._begun = mark(self._device)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        if self._marks is not None:
            self._marks.append((self._begun, mark(self._device)))
