"""What the hardware could do and what the model needs: peaks, FLOPs per token, memory in use."""

from __future__ import annotations

import resource
import sys

import torch

from .model_sections import AnyModel

DENSE_BF16_PEAK: dict[str, float] = {
    "NVIDIA A100": 312e12,
    "NVIDIA A800": 312e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H800": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "AMD Instinct MI250X": 383e12,
    "AMD Instinct MI300X": 1307e12,
}
"""FLOP/s of dense bf16 matrix products by device name prefix, from the vendors' data sheets (without sparsity)."""


def device_name(device: torch.device) -> str:
    """The device as its driver calls it; `cpu` for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_flops(name: str) -> float | None:
    """Dense bf16 peak of a device by name, or None if it is not one we know: an unknown peak is not guessed."""
    matches = [prefix for prefix in DENSE_BF16_PEAK if name.startswith(prefix)]
    return DENSE_BF16_PEAK[max(matches, key=len)] if matches else None


def flops_per_token(parameters: int, model: AnyModel, sequence_length: int) -> float:
    """Training FLOPs per token, 6 P + 12 L h S: the PaLM appendix B formula that the published 7B FSDP figures use.

    Counts every parameter (embedding included) and full, not causal, attention; recomputation is not counted, so
    the result measures model FLOPs (MFU), not hardware FLOPs.
    """
    return 6.0 * parameters + 12.0 * model.layers * model.hidden * sequence_length


def memory_in_use(device: torch.device) -> int:
    """Peak bytes: allocated on the GPU, or resident for a CPU process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
