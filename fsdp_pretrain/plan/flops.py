"""Peak FLOP/s of devices, FLOPs of models, MFU, days of a run, memory in use."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import AnyModel, GPTModel, LlamaModel

from . import devices

if TYPE_CHECKING:  # the formulas are also for commands without torch
    import torch

DAY = 86_400.0


def device_name(device: torch.device) -> str:
    """The driver's name of a device; `cpu` for the CPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_flops(name: str) -> float | None:
    """Dense bf16 peak of a device by name, or None if unknown."""
    device = devices.find(name)
    return device.peak if device else None


def run_flops(config: Config, parameters: int) -> float:
    """FLOPs of the model for the whole run."""
    lengths = config.schedule.lengths.between(0, config.schedule.total)
    return sum(n * length * flops_per_token(parameters, config.model, length) for length, n in lengths.items())


def flops_per_token(parameters: int, model: AnyModel, sequence_length: int) -> float:
    """Training FLOPs per token, 6 P + 12 L q S: PaLM's formula (appendix B), which the published 7B FSDP figures use.

    q is the width of the queries of all heads, in most models h.

    Counts all parameters (embedding included) and full, not causal, attention, but no recomputation.
    """
    return 6.0 * parameters + 12.0 * model.layers * model.query_width * sequence_length


def feed_forward(model: AnyModel) -> tuple[int, int]:
    """Width f of the feed-forward layer, and the number of its h x f matrices: 2, or 3 with a gate."""
    return (model.ffn if isinstance(model, LlamaModel) else model.ffn_width), 2 if isinstance(model, GPTModel) else 3


@dataclass(frozen=True)
class Speed:
    """Throughput of a measured step.

    Attributes:
        mfu: model FLOPs utilisation; None if the device's peak is unknown.
        days: of the whole run, if all its steps compute at this rate; without saves and failures.
    """

    batch: int
    seconds_per_step: float
    devices: int
    device: str
    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float | None
    days: float


def speed(config: Config, parameters: int, *, batch: int, seconds: float, devices: int, device: str) -> Speed:
    """Throughput of a step of `batch` samples in `seconds` on `devices`."""
    length = config.data.sequence_length
    tokens = batch * length / seconds
    flops = tokens * flops_per_token(parameters, config.model, length) / devices
    peak = peak_flops(device)
    return Speed(
        batch=batch,
        seconds_per_step=seconds,
        devices=devices,
        device=device,
        tokens_per_second=tokens,
        tokens_per_second_per_device=tokens / devices,
        tflops_per_device=flops / 1e12,
        mfu=flops / peak if peak else None,
        days=run_flops(config, parameters) / (flops * devices) / DAY,
    )


def memory_in_use(device: torch.device) -> int:
    """Peak bytes allocated on the GPU, or peak resident bytes of a CPU process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
