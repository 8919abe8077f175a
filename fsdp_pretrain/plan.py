"""Preflight: what a configuration means in exact numbers, on the meta device, before a GPU is touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import advice, memory, models
from .checkpoint import upcoming
from .checkpoint.space import Need
from .config import Config
from .errors import ConfigError, UserError
from .mesh import shard_size
from .model_sections import AnyModel
from .record.files import RunDir
from .throughput import device_memory, flops_per_token, hardware_flops_per_token, speed
from .units import human_bytes, human_count

_COLUMNS = ("step", "consumed", "tokens", "batch", "lr")
"""Of the schedule's preview; the ramps that a run has come after them."""


def count_parameters(model: AnyModel) -> int:
    """Exact parameters of a model, tied ones once; builds it on the meta device."""
    return models.build(model).count_parameters()


def check_declared(model: AnyModel, exact: int) -> None:
    """Raise ConfigError if the model is not the size its configuration declares."""
    declared = model.declared_params
    if declared is not None and declared != exact:
        raise ConfigError(
            f"model.declared_params = {declared:_}, but this model has {exact:_} parameters "
            f"({(exact - declared) / declared:+.1%})",
            effect="you would train another model than you think",
            remedy="correct the shape, or the declared number",
        )


def world_sizes(config: Config, limit: int = 4096) -> Iterator[int]:
    """World sizes up to `limit` over which every global batch of the run splits into whole micro-batches."""
    batches = config.schedule.batches()
    for size in range(1, min(limit, min(batches) // config.train.micro_batch) + 1):
        if all(batch % (size * config.train.micro_batch) == 0 for batch in batches):
            yield size


def plan(
    config: Config,
    world: int | None = None,
    *,
    gpus_per_node: int = 8,
    device: str | None = None,
    available: int | None = None,
) -> dict[str, Any]:
    """Everything `fsdp-pretrain plan` shows, as JSON values.

    Args:
        world: number of ranks to plan for; None: every feasible one is listed, and memory is not estimated.
        gpus_per_node: ranks of a node, for `parallel.shard = "node"`.
        device: name of the device, as its driver calls it; `cpu`; None is some GPU.
        available: bytes of memory of a device; default: what is on file for `device`.

    Raises:
        ConfigError: the configuration contradicts itself or the world size.
    """
    model = models.build(config.model)
    parameters = model.count_parameters()
    check_declared(config.model, parameters)
    schedule, train = config.schedule, config.train
    sizes = list(world_sizes(config))
    if world is not None and world not in sizes:
        raise ConfigError(
            f"the global batches {_shorten(schedule.batches())} do not split over {world} ranks "
            f"into micro-batches of {train.micro_batch}",
            remedy=f"feasible world sizes: {_shorten(sizes)}",
        )
    checkpoint = upcoming.first(parameters, world or 1)
    kept = config.checkpoint.keep_last + 1
    length = config.data.sequence_length
    result: dict[str, Any] = {
        "run": config.run.name,
        "family": config.model.family,
        "parameters": parameters,
        "declared_params": config.model.declared_params,
        "shape": advice.shape(config.model),
        "flops_per_token": flops_per_token(parameters, config.model, length),
        "hardware_flops_per_token": hardware_flops_per_token(config.model, length, config.parallel.recompute),
        "steps": schedule.steps,
        "samples": schedule.total,
        "tokens": schedule.tokens(schedule.total),
        "global_batches": schedule.batches(),
        "world_sizes": sizes,
        "checkpoint_bytes": checkpoint.bytes,
        "checkpoints_kept": kept,
        "disk_bytes": checkpoint.bytes * kept,
        "markers": advice.markers(schedule),
        "schedule": schedule.preview(),
        "warnings": [
            *advice.warnings(config),
            *advice.ramp_warning(config, max(sizes, default=0)),
            *_space_warning(config, checkpoint),
        ],
    }
    if world is not None:
        shards = shard_size(config.parallel, world, min(world, gpus_per_node))
        micro_batches = [batch // (world * train.micro_batch) for batch in schedule.batches()]
        parts = memory.estimate(
            config,
            shards=shards,
            accumulates=micro_batches[-1] > 1,
            device=torch.device("cpu" if device == "cpu" else "cuda"),
        )
        available = available or (device_memory(device) if device else None)
        total = sum(parts.values())
        result["world"] = {
            "size": world,
            "shards": shards,
            "replicas": world // shards,
            "micro_batches_per_step": micro_batches,
            "state_bytes": 2 * parts["parameters"] + parts["optimizer"],
            "memory": {**parts, "total": total, "available": available},
        }
        result["warnings"] += advice.shard_warning(memory.shard_padding(model, shards), parameters, shards)
        if available is not None:
            result["warnings"] += advice.memory_warning(total, available, device or "the device")
        elif device not in (None, "cpu"):
            result["warnings"].append(f"the memory of a device {device!r} is not on file: say it with --device-memory")
    return result


def _space_warning(config: Config, first: Need) -> Iterator[str]:
    """Whether the next checkpoint fits, where the storage of the run can be seen from here."""
    run = RunDir(config.run.dir)
    try:
        fit = upcoming.next_fit(run, config, first) if run.path.parent.is_dir() else None
    except (UserError, OSError):  # a plan needs no storage: who starts the run is told what is wrong with it
        return
    if fit is not None and fit.severity is not None:
        yield fit.text


def measured(config: Config, *, seconds: float, devices: int, device: str | None) -> dict[str, Any]:
    """What a measured time per step at the full batch comes to; see `throughput.speed`. Raises ConfigError."""
    parameters = count_parameters(config.model)
    check_declared(config.model, parameters)
    return speed(
        parameters,
        config.model,
        config.data.sequence_length,
        batch=config.schedule.batch.full,
        seconds=seconds,
        devices=devices,
        device=device or "unknown",
        recompute=config.parallel.recompute,
    )


def render(result: dict[str, Any]) -> str:
    """The plan for people."""
    shape, run = result["shape"], result["tokens"]
    lines = [
        f"{result['run']}: {result['family']}, {result['parameters']:_} parameters "
        f"({human_count(result['parameters'])})",
        f"  shape       hidden/layers {shape['hidden_per_layer']:.0f}, head size {shape['head_size']}, "
        f"ffn/hidden {shape['ffn_per_hidden']:.2f}, {shape['rows']:_} rows",
        f"  run         {result['steps']:_} steps, {result['samples']:_} samples, {run:_} tokens "
        f"({human_count(run)}), {run * result['flops_per_token']:.3g} FLOPs",
        f"  per token   {human_count(result['flops_per_token'])} FLOPs of the model, "
        f"{human_count(result['hardware_flops_per_token'])} of the hardware",
        f"  batch       {_range(result['global_batches'])} samples",
        f"  ranks       feasible: {_shorten(result['world_sizes'])}",
        f"  checkpoint  {human_bytes(result['checkpoint_bytes'])} each; "
        f"{human_bytes(result['disk_bytes'])} of disk for {result['checkpoints_kept']} (kept and being written)",
    ]
    if "world" in result:
        lines += _render_world(result["world"])
    ramps = [key for key in result["schedule"][0] if key not in _COLUMNS]
    lines.append(
        "".join(
            (
                f"  {'step':>10} {'consumed':>14} {'tokens':>8} {'batch':>6} {'lr':>10}",
                *(f" {name:>16}" for name in ramps),
            )
        )
    )
    for row in result["schedule"]:
        lines.append(
            f"  {row['step']:>10_} {row['consumed']:>14_} {human_count(row['tokens']):>8} "
            f"{row['batch']:>6} {row['lr']:>10.3e}" + "".join(f" {row[name]:>16.4f}" for name in ramps)
        )
    for name, mark in result["markers"].items():
        lines.append(
            f"  {name:<11} after step {mark['step']:_}, {mark['samples']:_} samples, "
            f"{human_count(mark['tokens'])} tokens"
        )
    return "\n".join(lines + [f"  warning: {warning}" for warning in result["warnings"]])


def _render_world(world: dict[str, Any]) -> list[str]:
    memory = dict(world["memory"])
    total, available = memory.pop("total"), memory.pop("available")
    of = f" of {human_bytes(available)}" if available is not None else ""
    return [
        f"  on {world['size']} ranks  {_range(world['micro_batches_per_step'])} micro-batches per step, "
        f"{world['replicas']} replicas x {world['shards']} shards",
        f"  memory      {human_bytes(world['state_bytes'])} per rank for parameters, gradients and optimiser; "
        f"{human_bytes(total)}{of} at the highest point of a step:",
        *(f"              {human_bytes(size):>9}  {part}" for part, size in memory.items() if size >= 2**10),
    ]


def render_measured(result: dict[str, Any]) -> str:
    """`measured` for people."""

    def share(name: str) -> str:
        return f"{result[name]:.1%}" if result[name] is not None else "unknown (no peak on file)"

    return "\n".join(
        [
            f"{result['batch']:_} samples in {result['seconds_per_step']:g}s "
            f"on {result['devices']} x {result['device']}",
            f"  tokens/s    {human_count(result['tokens_per_second'])} "
            f"({human_count(result['tokens_per_second_per_device'])} per device)",
            f"  model       {result['model_tflops_per_device']:.2f} TFLOP/s per device, MFU {share('mfu')}",
            f"  hardware    {result['hardware_tflops_per_device']:.2f} TFLOP/s per device, HFU {share('hfu')}",
        ]
    )


def _range(values: list[int]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _shorten(values: list[int]) -> str:
    shown = [str(value) for value in values]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:11], "...", shown[-1]]) or "none"
