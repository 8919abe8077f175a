"""Computes what a configuration means in numbers, on the meta device, without a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fsdp_pretrain import models
from fsdp_pretrain.checkpoint import upcoming
from fsdp_pretrain.checkpoint.disk_space import SpaceNeeded
from fsdp_pretrain.config import world_sizes
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import AnyModel
from fsdp_pretrain.data.fetch import room
from fsdp_pretrain.errors import ConfigError, UserError
from fsdp_pretrain.hardware import find, names, peak_flops
from fsdp_pretrain.models.flops import Speed, flops_per_token, hardware_flops_per_token, run_flops, speed
from fsdp_pretrain.parallel import float8
from fsdp_pretrain.parallel.optimizer import checkpoint_bytes
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.step_count import StepCount
from fsdp_pretrain.units import Progress, counted, human_bytes, human_count

from . import epochs, memory, preview
from . import warnings as advice


@dataclass(frozen=True)
class Layout:
    """A run on `size` ranks; bytes are those of the rank that needs most."""

    size: int
    shards: int
    replicas: int
    micro_batches_per_step: list[int]
    state_bytes: int  # bytes of parameters, gradients and optimiser
    memory: memory.MemoryEstimate  # memory at the peak of a step
    available: int | None  # bytes of memory of a device, if known


@dataclass(frozen=True)
class HeldOut:
    """The cost of measuring the held-out loss."""

    samples: int  # samples of a measurement; fewer if a corpus has fewer
    sources: int  # number of sources that they come from
    every: str  # interval between measurements
    share: float  # share of the training time at the full batch, where a forward pass takes a third of a step


@dataclass(frozen=True)
class Plan:
    """The result of `plan`."""

    run: str
    family: str
    parameters: int
    declared_params: int | None
    flops_per_token: float
    hardware_flops_per_token: float
    steps: int
    samples: int
    tokens: int
    flops: float  # model FLOPs of the whole run
    sequence_lengths: dict[int, int]  # samples of the run by their length
    global_batches: list[int]
    world_sizes: list[int]
    checkpoint_bytes: int
    checkpoints_kept: int
    disk_bytes: int
    # how often each source is read; None if the corpora are not on this machine
    sources: dict[str, epochs.SourceEpochs] | None
    absent: list[str]  # paths of corpora that are not
    storage: room.CacheNeed | None  # the cache that sources by URL need; None if there are none
    heldout: HeldOut | None  # the cost of the held-out loss; None if it is off
    schedule: list[dict[str, Any]]  # rows of `Schedule.preview`
    timeline: list[preview.TimelineRow]  # the entries of the timeline
    warnings: list[str]
    world: Layout | None  # the layout on a given number of ranks, or None

    def to_json(self) -> dict[str, Any]:
        """JSON values; without `world` if it is None, else with total and available memory among its parts."""
        values = asdict(self)
        if self.world is None:
            del values["world"]
        else:
            available = values["world"].pop("available")
            values["world"]["memory"] |= {"total": self.world.memory.total, "available": available}
        return values


def count_parameters(model: AnyModel) -> int:
    """Number of parameters of a model, tied ones once; builds it on the meta device."""
    return models.build(model).count_parameters()


def check_declared(model: AnyModel, exact: int) -> None:
    """Raise ConfigError if the model does not have `declared_params` parameters."""
    declared = model.declared_params
    if declared is not None and declared != exact:
        raise ConfigError(
            f"model.declared_params = {declared:_}, but this model has {exact:_} parameters "
            f"({(exact - declared) / declared:+.1%})",
            effect="the run would train another model than intended",
            remedy=f"correct the shape, or set model.declared_params = {exact:_} if this one is meant",
        )


def plan(
    config: Config,
    world: int | None = None,
    *,
    gpus_per_node: int = 8,
    device: str | None = None,
    available: int | None = None,
) -> Plan:
    """Everything `fsdp-pretrain plan` shows.

    Args:
        world: number of ranks to plan for; None: memory is not estimated.
        gpus_per_node: ranks per node, for `parallel.shard = "node"`.
        device: the driver's name of the device, or `cpu`; None: an unknown GPU.
        available: bytes of memory of a device; None: those known for `device`.

    Raises:
        ConfigError: the configuration contradicts itself, the world size or the corpora.
        DataError: a corpus is damaged, or too small for its `max_epochs`.
    """
    model = models.build(config.model)
    check_declared(config.model, parameters := model.count_parameters())
    _check_float8(config, model, device)
    if world is not None:
        world_sizes.check(config, world)
    schedule, count, sizes = config.schedule, StepCount(config), [*world_sizes.feasible(config)]
    checkpoint = upcoming.first_need(checkpoint_bytes(model, config.optimizer), world or 1)
    length, kept = config.data.sequence_length, _most_kept(config)
    warnings = [*advice.warnings(config), *advice.ramp_warning(config, max(sizes, default=0))]
    warnings += _space_warning(config, checkpoint)
    sources, fetched, of_data = _corpora(config)
    warnings += of_data
    layout = None if world is None else _layout(config, world, gpus_per_node, device, available)
    warnings += [] if layout is None else _memory_warning(layout, device)
    return Plan(
        run=config.run.name,
        family=config.model.family,
        parameters=parameters,
        declared_params=config.model.declared_params,
        flops_per_token=flops_per_token(parameters, config.model, length),
        hardware_flops_per_token=hardware_flops_per_token(config.model, length, config.parallel.recompute),
        steps=count.step_at(schedule.end),
        samples=schedule.total,
        tokens=schedule.tokens(schedule.total),
        flops=run_flops(config, parameters),
        sequence_lengths=schedule.lengths.between(0, schedule.total),
        global_batches=schedule.batches(),
        world_sizes=sizes,
        checkpoint_bytes=checkpoint.bytes,
        checkpoints_kept=kept,
        disk_bytes=checkpoint.bytes * kept,
        sources=sources,
        absent=epochs.absent(source.path for source in config.data.sources),
        storage=fetched,
        heldout=_heldout(config),
        schedule=preview.rows(config, count),
        timeline=preview.entries(config, count),
        warnings=warnings,
        world=layout,
    )


def _most_kept(config: Config) -> int:
    """How many checkpoints there are at most at a time, one of them being written; about so many if the batch grows.

    With evaluations, retention also keeps the oldest few that wait, and the oldest few given up. Those of `eval.merge`
    are not counted.
    """
    checkpoint, changed = config.checkpoint, [entry.checkpoint.every for entry in config.timeline]
    permanent = _completed(config, checkpoint.kept_intervals)
    merged = None if config.eval.merge is None else config.eval.merge.every
    all_ = _completed(config, [checkpoint.every, *changed, *checkpoint.kept_intervals, config.eval.every, merged])
    last = {config.schedule.steps}
    evaluated = min(2 * checkpoint.keep_last, len(_completed(config, [config.eval.every]) - permanent - last))
    return min(checkpoint.keep_last + 1 + len(permanent) + evaluated, len(all_ | last))


def _completed(config: Config, intervals: Iterable[Progress | None]) -> set[int]:
    """The steps that complete one of these intervals."""
    schedule, steps = config.schedule, set[int]()
    for every in filter(None, intervals):
        end = schedule.length_in(every.unit)
        steps.update(round(schedule.steps * number * every.value / end) for number in range(1, end // every.value + 1))
    return steps


def _corpora(config: Config) -> tuple[dict[str, epochs.SourceEpochs] | None, room.CacheNeed | None, list[str]]:
    """The epochs of the sources, the need of those by URL for a cache, and warnings; None if a corpus is absent."""
    packer = epochs.open_corpora(config)
    if packer is None:
        return None, None, []
    sources, fetched = epochs.read_epochs(config, packer), room.need(config, packer)
    of_cache = [] if fetched is None else room.warnings(fetched, packer)
    return sources, fetched, [*epochs.warnings(sources), *of_cache]


def _heldout(config: Config) -> HeldOut | None:
    """The cost of the held-out loss; None if it is off."""
    if not config.eval.loss_on:
        return None
    every, batch = config.heldout_every, config.schedule.batch.full
    samples, sources = config.heldout_samples * len(config.eval.loss_on), len(config.eval.loss_on)
    between = every.value * batch if every.unit == "step" else config.schedule.lengths.interval(every)
    return HeldOut(samples, sources, str(every), samples / (3 * max(between, batch)))


def _check_float8(config: Config, model: models.Decoder, device: str | None) -> None:
    """Raise ConfigError if float8 is configured, and the device (if known) or the sizes do not support it."""
    if config.train.precision != "bf16+fp8":
        return
    kind = find(device or "")
    if device is not None and (device == "cpu" or (kind is not None and not kind.float8)):
        raise float8.no_float8(device)
    float8.check_sizes(model)


def _memory_warning(layout: Layout, device: str | None) -> Iterator[str]:
    if layout.available is not None:
        yield from advice.memory_warning(layout.memory.total, layout.available, device or "the device")
    elif device not in (None, "cpu"):
        yield f"the memory of a device {device!r} is not known: set it with --device-memory"


def _space_warning(config: Config, first: SpaceNeeded) -> Iterator[str]:
    """Warn if the next checkpoint does not fit, where the run's storage is accessible."""
    run = RunDir(config.run.dir)
    try:
        fit = upcoming.next_fit(run, config, first) if run.path.parent.is_dir() else None
    except (UserError, OSError):  # a plan needs no storage; the start of the run reports its problems
        return
    if fit is not None and fit.severity is not None:
        yield fit.text


def _layout(config: Config, world: int, gpus_per_node: int, device: str | None, available: int | None) -> Layout:
    shards = config.parallel.shard_size(world, min(world, gpus_per_node))
    micro_batches = [batch // (world * config.train.micro_batch) for batch in config.schedule.batches()]
    parts = memory.estimate(
        config,
        shards=shards,
        micro_batches=micro_batches[-1],
        device=torch.device("cpu" if device == "cpu" else "cuda"),
    )
    known = find(device or "")
    available = available or (known.bytes if known is not None else None)
    state = 2 * parts.parameters + parts.optimizer
    return Layout(world, shards, world // shards, micro_batches, state, parts, available)


def measured(
    config: Config, *, devices: int, device: str | None, seconds: float | None = None, mfu: float | None = None
) -> Speed:
    """Throughput and days of the run, from a measured time of a step at the full batch or a measured MFU. Raises
    ConfigError if the size is not the declared one, or `mfu` is given for a device whose peak is not known."""
    parameters = count_parameters(config.model)
    check_declared(config.model, parameters)
    batch, peak = config.schedule.batch.full, peak_flops(device or "")
    if mfu is not None:
        if peak is None:
            raise ConfigError(
                f"--mfu is a share of the peak of a device, and that of {device!r} is not known",
                remedy=f"name one of these with --device: {', '.join(names())}",
            )
        length = config.data.sequence_length
        seconds = batch * length * flops_per_token(parameters, config.model, length) / (devices * peak * mfu)
    assert seconds is not None
    return speed(config, parameters, batch=batch, seconds=seconds, devices=devices, device=device or "unknown")


def render(plan: Plan) -> str:
    """The plan as text."""
    lines = [
        f"{plan.run}: {plan.family}, {plan.parameters:_} parameters ({human_count(plan.parameters)})",
        f"  run         {plan.steps:_} steps, {plan.samples:_} samples, {plan.tokens:_} tokens "
        f"({human_count(plan.tokens)}), {plan.flops:.3g} FLOPs",
        f"  per token   {human_count(plan.flops_per_token)} FLOPs of the model, "
        f"{human_count(plan.hardware_flops_per_token)} of the hardware (which looks the embedding up)",
        f"  batch       {_range(plan.global_batches)} samples",
        f"  ranks       feasible: {world_sizes.shorten(plan.world_sizes)}",
        f"  checkpoint  {human_bytes(plan.checkpoint_bytes)} each; "
        f"{human_bytes(plan.disk_bytes)} of disk for {plan.checkpoints_kept} (kept, evaluations included, or written)",
    ]
    if len(plan.sequence_lengths) > 1:
        lengths = (f"{samples:_} samples of {length} tokens" for length, samples in plan.sequence_lengths.items())
        lines.append(f"  lengths     {', then '.join(lengths)}")
    lines += _render_sources(plan)
    if plan.storage is not None:
        lines.append(room.render(plan.storage))
    if plan.heldout is not None:
        lines.append(
            f"  held-out    loss of {plan.heldout.samples:_} samples of {counted(plan.heldout.sources, 'source')} "
            f"every {plan.heldout.every}: about {plan.heldout.share:.2%} of the time of training"
        )
    if plan.world is not None:
        lines += _render_layout(plan.world)
    lines += preview.render_rows(plan.schedule)
    lines += preview.render_entries(plan.timeline)
    return "\n".join(lines + [f"  warning: {warning}" for warning in plan.warnings])


def _render_sources(plan: Plan) -> list[str]:
    if plan.sources is None:
        where = f"no corpus at {', '.join(plan.absent)}" if plan.absent else "their storage does not answer"
        return [f"  data        how often the corpora are read is not known: {where}"]
    return [
        f"  data        {name}: {human_count(source.tokens)} tokens, read {source.epochs:.3g} times"
        for name, source in plan.sources.items()
    ]


def _render_layout(layout: Layout) -> list[str]:
    parts = vars(layout.memory).items()
    of = f" of {human_bytes(layout.available)}" if layout.available is not None else ""
    return [
        f"  on {counted(layout.size, 'rank')}  micro-batches per step: {_range(layout.micro_batches_per_step)}; "
        f"{counted(layout.replicas, 'replica')} x {counted(layout.shards, 'shard')}",
        f"  memory      {human_bytes(layout.state_bytes)} per rank for parameters, gradients and optimiser; "
        f"{human_bytes(layout.memory.total)}{of} at the highest point of a step (tensors alone):",
        *(f"              {human_bytes(size):>9}  {part}" for part, size in parts if size >= 2**10),
    ]


def render_measured(speed: Speed) -> str:
    """The result of `measured` as text."""

    def share(value: float | None) -> str:
        return f"{value:.1%}" if value is not None else "unknown (no peak on file)"

    return "\n".join(
        [
            f"{speed.batch:_} samples in {speed.seconds_per_step:g}s on {speed.devices} x {speed.device}",
            f"  tokens/s    {human_count(speed.tokens_per_second)} "
            f"({human_count(speed.tokens_per_second_per_device)} per device)",
            f"  model       {speed.model_tflops_per_device:.2f} TFLOP/s per device, MFU {share(speed.mfu)}",
            f"  hardware    {speed.hardware_tflops_per_device:.2f} TFLOP/s per device, HFU {share(speed.hfu)}",
            f"  time        {speed.days:.3g} days for the whole run at this rate, without saves and failures",
        ]
    )


def _range(values: list[int]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"
