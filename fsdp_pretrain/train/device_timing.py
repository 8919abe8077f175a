"""Device timestamps, device-to-host copies and energies that do not block the host."""

from __future__ import annotations

import contextlib
import importlib
import math
import threading
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


class EnergyCounter:
    """The energy counter of an NVIDIA GPU. A thread reads it every second, since a broken driver hangs."""

    def __init__(self, device: torch.device) -> None:
        self._read_at, self._counted = -math.inf, 0
        self._taken: int | None = None
        if device.type == "cuda":
            threading.Thread(target=self._follow, args=(device,), daemon=True).start()

    def _follow(self, device: torch.device) -> None:
        with contextlib.suppress(Exception):  # no such library, or no such counter: the energy is not known
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            while True:
                self._counted = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
                self._read_at = time.monotonic()
                time.sleep(1.0)

    def take(self) -> int | None:
        """Millijoules since the last call; None if the counter had not been read for half a minute at one of both."""
        known = time.monotonic() - self._read_at <= 30.0
        before, self._taken = self._taken, self._counted if known else None
        return None if before is None or self._taken is None else self._taken - before
