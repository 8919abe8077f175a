"""Devices: a table of data sheets by the driver's name, and queries of the device itself."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands without torch use the table too
    import torch


@dataclass(frozen=True)
class Device:
    """Data sheet of a kind of device."""

    peak: float  # FLOP/s of dense bf16 matrix products, without sparsity
    memory: int  # size in GiB, as the driver shows it
    float8: bool = True  # whether its matrix products support float8 as `train.precision = "bf16+fp8"` uses it

    @property
    def bytes(self) -> int:
        """Size of its memory in bytes."""
        return self.memory * 2**30


_DEVICES = {
    "NVIDIA A100-SXM4-40GB": Device(312e12, 40, float8=False),
    "NVIDIA A100-PCIE-40GB": Device(312e12, 40, float8=False),
    "NVIDIA A100-SXM-64GB": Device(358e12, 63, float8=False),
    "NVIDIA A100": Device(312e12, 80, float8=False),
    "NVIDIA A800": Device(312e12, 80, float8=False),
    "NVIDIA A40": Device(149.7e12, 48, float8=False),
    "NVIDIA L40S": Device(362e12, 48),
    "NVIDIA H100 PCIe": Device(756e12, 80),
    "NVIDIA H100 NVL": Device(835e12, 94),
    "NVIDIA H100": Device(989e12, 80),
    "NVIDIA H800": Device(989e12, 80),
    "NVIDIA H200 NVL": Device(835e12, 140),
    "NVIDIA H200": Device(989e12, 140),
    "NVIDIA GH200": Device(989e12, 95),
    "NVIDIA B200": Device(2250e12, 180),
    "NVIDIA GB200": Device(2500e12, 185),
    "AMD Instinct MI250X": Device(191.5e12, 64, float8=False),
    "AMD Instinct MI300X": Device(1307e12, 192, float8=False),
}
"""Devices by prefix of the name. An MI250X is one of its two dies, which torch sees as a device."""


def find(name: str) -> Device | None:
    """The device with this name, or None if unknown; the longest matching prefix counts."""
    matches = [prefix for prefix in _DEVICES if name.startswith(prefix)]
    return _DEVICES[max(matches, key=len)] if matches else None


def names() -> list[str]:
    """The prefixes by which devices are known."""
    return list(_DEVICES)


def gpu_count() -> int:
    """GPUs that the driver of this node shows and CUDA_VISIBLE_DEVICES allows."""
    present = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def device_name(device: torch.device) -> str:
    """The driver's name of a device; `cpu (MODEL)` for the CPU, as the last digits depend on its model."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({_processor()})"


def _processor() -> str:
    """The model of this machine's processor; its architecture if the system does not tell."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE):
            return found[1].strip()
    return platform.machine()


def peak_flops(name: str) -> float | None:
    """Dense bf16 peak of a device by name, or None if unknown."""
    device = find(name)
    return device.peak if device else None


def memory_in_use(device: torch.device) -> int:
    """Peak bytes allocated on the GPU, or peak resident bytes of a CPU process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
