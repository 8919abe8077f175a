"""FLOPs of models, MFU and HFU, and the days that a run takes."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import AnyModel, GPTModel, LlamaModel
from fsdp_pretrain.config.sections import Recompute
from fsdp_pretrain.hardware import peak_flops

DAY = 86_400.0


def run_flops(config: Config, parameters: int) -> float:
    """Model FLOPs of the whole run."""
    lengths = config.schedule.lengths.between(0, config.schedule.total)
    return sum(n * length * flops_per_token(parameters, config.model, length) for length, n in lengths.items())


def flops_per_token(parameters: int, model: AnyModel, sequence_length: int) -> float:
    """Training FLOPs per token, 6 P + 12 L q S: PaLM's formula (appendix B), which the published 7B FSDP figures use.

    q is the width of the queries of all heads, in most models h. All parameters count (embedding included), and full,
    not causal, attention, but no recomputation: these are model FLOPs (for MFU), not hardware FLOPs. In blocks with a
    window the sample's S is the window, if that is less.
    """
    seen = sum(model.seen(layer, sequence_length) for layer in range(model.layers))
    return 6.0 * parameters + 12.0 * model.query_width * seen


def feed_forward(model: AnyModel) -> tuple[int, int]:
    """Width f of the feed-forward layer, and the number of its h x f matrices: 2, or 3 with a gate."""
    return (model.ffn if isinstance(model, LlamaModel) else model.ffn_width), 2 if isinstance(model, GPTModel) else 3


def hardware_flops_per_token(model: AnyModel, sequence_length: int, recompute: Recompute = 0) -> float:
    """Hardware FLOPs per token: Megatron-LM's formula (arXiv 2104.04473, eq. 3) for any f and number of KV heads.

    Only matrix products count: 3 times the forward pass of the blocks, 4 times if recomputed; 3 times that of the
    output matrix, V being the padded rows of the table; full, not causal, attention. With f = 4h (or 8h/3 and a gate),
    as many KV heads as heads and full recomputation this is 24 * 4 * L * h^2 * (1 + S/(6h) + V/(16Lh)) per token.
    """
    h, q, (ffn, matrices) = model.hidden, model.query_width, feed_forward(model)
    products = 4 * h * q + 4 * h * model.kv_width + 2 * matrices * h * ffn
    blocks = [products + 4 * q * model.seen(layer, sequence_length) for layer in range(model.layers)]
    if recompute == "feed-forward":  # all but the last product of the layer
        again = model.layers * 2 * (matrices - 1) * h * ffn
    else:
        again = sum(blocks[::recompute]) if recompute else 0
    return float(3 * sum(blocks) + again + 6 * h * model.rows)


@dataclass(frozen=True)
class Speed:
    """Throughput of a measured step, in model FLOPs and in hardware FLOPs (with recomputation).

    Attributes:
        batch: samples of the step.
        mfu, hfu: model and hardware FLOPs utilisation; None if the device's peak is unknown.
        days: duration of the whole run if all its steps compute at this rate; without saves and failures.
    """

    batch: int
    seconds_per_step: float
    devices: int
    device: str
    tokens_per_second: float
    tokens_per_second_per_device: float
    model_tflops_per_device: float
    hardware_tflops_per_device: float
    mfu: float | None
    hfu: float | None
    days: float


def speed(config: Config, parameters: int, *, batch: int, seconds: float, devices: int, device: str) -> Speed:
    """Throughput of a step of `batch` samples in `seconds` on `devices`."""
    length = config.data.sequence_length
    tokens = batch * length / seconds
    model = tokens * flops_per_token(parameters, config.model, length) / devices
    hardware = tokens * hardware_flops_per_token(config.model, length, config.parallel.recompute) / devices
    peak = peak_flops(device)
    return Speed(
        batch=batch,
        seconds_per_step=seconds,
        devices=devices,
        device=device,
        tokens_per_second=tokens,
        tokens_per_second_per_device=tokens / devices,
        model_tflops_per_device=model / 1e12,
        hardware_tflops_per_device=hardware / 1e12,
        mfu=model / peak if peak else None,
        hfu=hardware / peak if peak else None,
        days=run_flops(config, parameters) / (model * devices) / DAY,
    )
