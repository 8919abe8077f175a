"""Kernels to choose from, at a configuration's shape: `python -m fsdp_pretrain.bench CONFIG --kernels`.

Forward and backward pass of a micro-batch: causal attention with each kernel of PyTorch that takes it, and the loss,
eager and compiled. They take turns, so that a busy machine affects all alike; compare the ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.models.loss import ChunkKernels, compiled_kernels, token_losses
from fsdp_pretrain.parallel.fsdp import compute_dtype

from .ranges import median_range, show_range

_ATTENTION = {
    "default": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""Kernels of `scaled_dot_product_attention`; `default`: what PyTorch chooses."""


def measure(config: Config, device: torch.device, *, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of one call, forward and backward, by kernel; what does not run here is named with the reason."""
    seconds: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    kernels = dict([*_attention(config, device), *_loss(config, device)])
    for name, call in kernels.items():
        try:
            _time(call, device, 2)
            seconds[name] = []
        except RuntimeError as error:  # a kernel that does not take this, a compiler that is not there
            missing[name] = str(error).splitlines()[0]
    for number in range(rounds if seconds else 0):
        names = list(seconds)
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            seconds[name].append(_time(kernels[name], device, steps))
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "kernel_seconds": {name: median_range(values) for name, values in seconds.items()},
        "ratio": {
            name: median_range([value / base for value, base in zip(values, seconds[_base(name)], strict=True)])
            for name, values in seconds.items()
            if _base(name) in seconds
        },
        "missing": missing,
    }


def _base(name: str) -> str:
    return "attention default" if name.startswith("attention") else "loss eager"


def _attention(config: Config, device: torch.device) -> Iterator[tuple[str, Callable[[], None]]]:
    model, batch, length = config.model, config.train.micro_batch, config.data.sequence_length
    kv_heads = getattr(model, "kv_heads", None) or model.heads
    dtype = compute_dtype(config, device)

    def random(heads: int) -> Tensor:
        # As the blocks make them: [B, S, heads, d] in memory.
        return torch.randn(batch, length, heads, model.head_dim, device=device, dtype=dtype).transpose(1, 2)

    query, key, value = (random(heads).requires_grad_() for heads in (model.heads, kv_heads, kv_heads))
    gradient = random(model.heads)

    def attend() -> None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=kv_heads != model.heads)
        torch.autograd.grad(out, (query, key, value), gradient)

    def with_kernel(kernel: SDPBackend) -> None:
        with sdpa_kernel(kernel):
            attend()

    for name, kernel in _ATTENTION.items():
        yield f"attention {name}", attend if kernel is None else partial(with_kernel, kernel)


def _loss(config: Config, device: torch.device) -> Iterator[tuple[str, Callable[[], None]]]:
    model, batch, length = config.model, config.train.micro_batch, config.data.sequence_length
    dtype = compute_dtype(config, device)
    hidden = torch.randn(batch, length, model.hidden, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(model.rows, model.hidden, device=device, dtype=dtype).mul_(0.02).requires_grad_()
    labels = torch.randint(model.vocab, (batch, length), device=device)

    def run(kernels: ChunkKernels | None) -> None:
        losses, _ = token_losses(hidden, weight, labels, kernels)
        torch.autograd.grad(losses.mean(), (hidden, weight))

    yield "loss eager", lambda: run(None)
    yield "loss compiled", lambda: run(compiled_kernels())


def _time(call: Callable[[], None], device: torch.device, calls: int) -> float:
    """Seconds of a call, from several in a row."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / calls


def render(result: dict[str, Any]) -> str:
    """The results as text for people."""
    rows = [
        f"  {name:20} {show_range([1000 * value for value in seconds]):30} {show_range(result['ratio'][name])}"
        for name, seconds in result["kernel_seconds"].items()
    ]
    rows += [f"  {name:20} not here: {reason}" for name, reason in result["missing"].items()]
    head = (
        f"forward and backward on {result['device']}, torch {result['torch']}: ms, and ratio to the first of its kind"
    )
    return "\n".join([head, *rows])
