"""Preflight: what a configuration means in exact numbers, on the meta device, before a GPU is touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import models
from .config import Config
from .errors import ConfigError
from .model_sections import AnyModel
from .throughput import flops_per_token
from .units import human_bytes, human_count

_BYTES_PER_PARAMETER = 12
"""fp32 parameters and both moments of AdamW, in memory and in a checkpoint."""

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


def plan(config: Config, world: int | None = None) -> dict[str, Any]:
    """Everything `fsdp-pretrain plan` shows, as JSON values.

    Args:
        world: number of ranks to plan for; None: every feasible one is listed.

    Raises:
        ConfigError: the configuration contradicts itself or the world size.
    """
    parameters = count_parameters(config.model)
    check_declared(config.model, parameters)
    schedule, train = config.schedule, config.train
    sizes = list(world_sizes(config))
    if world is not None and world not in sizes:
        raise ConfigError(
            f"the global batches {schedule.batches()} do not split over {world} ranks "
            f"into micro-batches of {train.micro_batch}",
            remedy=f"feasible world sizes: {', '.join(map(str, sizes)) or 'none'}",
        )
    checkpoint = parameters * _BYTES_PER_PARAMETER
    kept = config.checkpoint.keep_last + 1
    result: dict[str, Any] = {
        "run": config.run.name,
        "family": config.model.family,
        "parameters": parameters,
        "declared_params": config.model.declared_params,
        "flops_per_token": flops_per_token(parameters, config.model, config.data.sequence_length),
        "steps": schedule.steps,
        "samples": schedule.total,
        "tokens": schedule.total * config.data.sequence_length,
        "global_batches": schedule.batches(),
        "world_sizes": sizes,
        "checkpoint_bytes": checkpoint,
        "checkpoints_kept": kept,
        "disk_bytes": checkpoint * kept,
        "schedule": schedule.preview(),
    }
    if world is not None:
        shards = world if config.parallel.shard == "node" else config.parallel.shard
        result["world"] = {
            "size": world,
            "micro_batches_per_step": [batch // (world * train.micro_batch) for batch in schedule.batches()],
        }
        if config.parallel.shard != "node":
            if world % shards:
                raise ConfigError(f"parallel.shard = {shards} does not divide a world of {world} ranks")
            state = -(-parameters // shards) * (_BYTES_PER_PARAMETER + 4)
            result["world"] |= {"shards": shards, "replicas": world // shards, "state_bytes_per_rank": state}
    return result


def render(result: dict[str, Any]) -> str:
    """The plan for people."""
    lines = [
        f"{result['run']}: {result['family']}, {result['parameters']:_} parameters "
        f"({human_count(result['parameters'])})",
        f"  run         {result['steps']:_} steps, {result['samples']:_} samples, {result['tokens']:_} tokens "
        f"({human_count(result['tokens'])}), {result['tokens'] * result['flops_per_token']:.3g} FLOPs",
        f"  batch       {_range(result['global_batches'])} samples",
        f"  ranks       feasible: {_shorten(result['world_sizes'])}",
        f"  checkpoint  {human_bytes(result['checkpoint_bytes'])} each; "
        f"{human_bytes(result['disk_bytes'])} of disk for {result['checkpoints_kept']} (kept and being written)",
    ]
    if "world" in result:
        world = result["world"]
        accumulation = _range(world["micro_batches_per_step"])
        lines.append(f"  on {world['size']} ranks  {accumulation} micro-batches per step")
        if "shards" in world:
            lines.append(
                f"              {world['replicas']} replicas x {world['shards']} shards, "
                f"{human_bytes(world['state_bytes_per_rank'])} per rank for parameters, gradients and optimiser"
            )
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
    return "\n".join(lines)


def _range(values: list[int]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _shorten(values: list[int]) -> str:
    shown = [str(value) for value in values]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:11], "...", shown[-1]]) or "none"
