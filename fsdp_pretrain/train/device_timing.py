"""Device timestamps and device-to-host copies that do not block the host."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor


def mark(device: torch.device) -> Any:
    """A timestamp for `between`: a recorded CUDA event, or the host's clock on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Seconds between two marks that have been reached."""
    return float(end - start) if isinstance(end, float) else float(start.elapsed_time(end)) / 1000


def to_host(device: torch.device, *tensors: Tensor) -> tuple[list[Tensor], torch.cuda.Event | None]:
    """Start copying to the host. Returns the copies, and an event to wait for before they are read (None: at once)."""
    if device.type != "cuda":
        return [*tensors], None
    copies = [_copy(tensor) for tensor in tensors]
    event = torch.cuda.Event()
    event.record()
    return copies, event


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
