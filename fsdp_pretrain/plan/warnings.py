"""Compares a configuration with published models, and warns of what is legal but probably unintended.

Every warning is based on a real run or on a kernel; none is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdp_pretrain.config.base import Section
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import AnyModel, GLMModel, LlamaModel
from fsdp_pretrain.models.flops import feed_forward
from fsdp_pretrain.units import human_bytes, human_count

PLANNABLE = 0.9
"""Share of a device's memory that may be planned: the rest is for NCCL, the CUDA context and fragmentation."""

_WIDEST = 300
"""Largest hidden / layers without a warning: trained models have 30 to 200; the 104B that diverged five times 512."""

_LARGEST_FUSED_HEAD = 256
"""Largest head size of flash attention."""

_LARGE_SCORES = 2**30
"""Bytes of a layer's unfused scores above which there is a warning."""


def warnings(config: Config) -> list[str]:
    """Sentences about what is legal but probably unintended."""
    return [*_shape_warnings(config.model), *_score_warning(config), *_schedule_warnings(config), *in_vain(config)]


def in_vain(config: Config) -> Iterator[str]:
    """Sentences about keys that are set but have no effect. Every start shows them."""
    for key, why in _without_effect(config):
        section, _, name = key.rpartition(".")
        holder: Any = config
        for part in section.split("."):
            holder = getattr(holder, part)
        if (value := getattr(holder, name)) != type(holder).model_fields[name].default:
            shown = "" if isinstance(value, Section) else f" = {value}"
            yield f"{key}{shown} has no effect {why}: leave it out"


def _without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """Keys without effect in the rest of the configuration, and why."""
    optimizer, model = config.optimizer, config.model
    if optimizer.curve == "constant":
        yield from ((f"optimizer.{key}", "with optimizer.curve = constant") for key in ("min_lr", "decay"))
    if optimizer.kind == "adamw" and all(group.kind in (None, "adamw") for group in optimizer.groups):
        yield from ((f"optimizer.{key}", "with optimizer.kind = adamw") for key in ("momentum", "update_scale"))
    if config.eval.every is None:
        yield "eval.merge", "without eval.every"
    if not optimizer.warmup.value:
        yield "optimizer.warmup_shape", "without optimizer.warmup"
    if optimizer.embedding_shrink == 1.0 and all(entry.optimizer.embedding_shrink is None for entry in config.timeline):
        yield "optimizer.shrink_paths", "without optimizer.embedding_shrink"
    if config.train.precision != "fp16":
        yield "train.loss_scale", f"with train.precision = {config.train.precision}"
    if isinstance(model, LlamaModel) and model.rope_scaling is not None and model.rope_scaling.kind == "linear":
        yield "model.rope_scaling.original_length", "with model.rope_scaling.kind = linear"
    if not config.eval.loss_on:
        for name in ("loss_every", "loss_samples"):
            yield f"eval.{name}", "without eval.loss_on"


def _shape_warnings(model: AnyModel) -> Iterator[str]:
    ffn, matrices = feed_forward(model)
    if (ratio := model.hidden / model.layers) > _WIDEST:
        yield (
            f"hidden / layers is {ratio:.0f}; models that were trained have 30 to 200, "
            "and a 104B with 512 diverged at every attempt"
        )
    size = model.head_dim
    if size > _LARGEST_FUSED_HEAD:
        yield f"flash attention takes heads up to {_LARGEST_FUSED_HEAD}, not {size}"
    elif size % 8 or (size > 64 and size % 64):
        yield f"a head size of {size} is not a multiple of {8 if size % 8 else 64}: attention pads it"
    usual = 4.0 if matrices == 2 or model.family in ("qwen2", "gemma3_text") else 8 / 3
    if not 0.6 < ffn / model.hidden / usual < 1.6:
        yield (
            f"ffn / hidden is {ffn / model.hidden:.2f}, where the family has about {usual:.2f}: is ffn = {ffn} left "
            "over from another model? (A run planned as 104B trained 57B parameters this way.)"
        )
    if model.rows % 64:
        yield f"the embedding has {model.rows} rows, not a multiple of 64; model.vocab_multiple = 64 is faster on a GPU"
    std, largest = None if isinstance(model, GLMModel) else model.std, (2 / (5 * model.hidden)) ** 0.5
    if std is not None and std > 3 * largest:
        yield (
            f"init_std = {std:g} is {std / largest:.1f} times sqrt(2/(5h)) = {largest:.4f}; at that a 104B model "
            "diverged until it was lowered to the rule"
        )


def _score_warning(config: Config) -> Iterator[str]:
    """Warn if the scores of a layer take much memory, since no fused kernel computes them."""
    model, length = config.model, config.data.sequence_length
    size = 4 * config.train.micro_batch * model.heads * length**2
    if not isinstance(model, LlamaModel) and model.scores != "fused" and size > _LARGE_SCORES:
        yield (
            f"model.scores = {model.scores} computes the scores of a layer in fp32, {human_bytes(size)} for a "
            "micro-batch, and several tensors of that size: bf16 does not need it"
        )


def _schedule_warnings(config: Config) -> Iterator[str]:
    schedule = config.schedule
    batch, warmup = schedule.batch, schedule.warmup
    steps, at_full = batch.step_at(warmup), -(-warmup // batch.full)
    if at_full and steps >= 2 * at_full and steps - at_full > 10:
        yield (
            f"the warm-up of {warmup:_} samples ({human_count(schedule.tokens(warmup))} tokens) takes "
            f"{steps:_} steps because of the batch ramp; at the full batch it would be {at_full:_}"
        )
    if schedule.decays and schedule.decay < 0.5 * schedule.total:
        yield (
            f"the learning rate is at its floor from {schedule.decay:_} of {schedule.total:_} samples on: is the run "
            "longer than the decay was made for?"
        )
    if schedule.decays and schedule.decay > schedule.total:
        yield (
            f"the learning rate ends at {schedule.lr_at(schedule.total):.3g}, above its floor of "
            f"{config.optimizer.min_lr:.3g}: optimizer.decay is longer than the run; leave it out to end with the run"
        )
    for placed in schedule.timeline:
        if placed.at >= schedule.total:
            yield f"timeline, {placed.entry}: the run has ended by then"
    saves = config.schedule.save_every(0)
    if saves.value > schedule.length_in(saves.unit):
        yield f"checkpoint.every = {saves} is longer than the run: only its end is saved"


def ramp_warning(config: Config, largest: int) -> Iterator[str]:
    """Warn if the batch ramp, not the full batch, limits the world size; `largest` is the largest feasible one."""
    alone = config.schedule.batch.full // config.train.micro_batch
    if config.schedule.batch.ramp is not None and largest < alone:
        yield (
            f"the batch ramp limits the run to {largest} ranks, where the full batch of {config.schedule.batch.full} "
            f"would allow {alone}; larger `train.batch_ramp.first` and `by` lift that"
        )


def memory_warning(total: int, available: int, device: str) -> Iterator[str]:
    """Warn if a rank needs more than may be planned."""
    if total > available:
        yield (
            f"a rank needs {human_bytes(total)}, {device} has {human_bytes(available)}: shard over more ranks, "
            'recompute (parallel.recompute = "feed-forward", or 1) or use a smaller micro-batch'
        )
    elif total > PLANNABLE * available:
        yield (
            f"a rank needs {human_bytes(total)} of the {human_bytes(available)} of {device}: little is left for NCCL, "
            "the CUDA context and fragmentation"
        )
