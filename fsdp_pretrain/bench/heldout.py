"""What the held-out loss costs: `python -m fsdp_pretrain.bench CONFIG --heldout`.

Two trainers in one process take turns, in alternating order: one that measures the loss of the default number of
held-out samples once in its turn, and one that never does. The tokens are random; what they are does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.packing.loader import MicroBatch
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.sections import HeldOutSource
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.train.heldout_loss import HeldOutLoss
from fsdp_pretrain.train.trainer import DataStream, Trainer
from fsdp_pretrain.units import Progress

from .ranges import median_range, show_percent, show_range
from .turns import turn

_NEVER = Progress(10**9, "step")


def random_samples(config: Config, world: World, batches: DataStream) -> HeldOutLoss:
    """The held-out loss of a configuration, of random tokens from `batches` instead of the corpora it names."""
    ranks, size = world.size, config.train.micro_batch
    passes = -(-config.heldout_samples * len(config.eval.loss_on) // (ranks * size))
    micro: list[MicroBatch] = []
    while len(micro) < passes:
        micro += next(batches).micro
    return HeldOutLoss(config, world, micro[:passes])


def measure(
    build: Callable[..., tuple[Trainer, Any]],
    config: Config,
    world: World,
    batches: DataStream,
    *,
    rounds: int,
    steps: int,
    warmup: int,
) -> dict[str, Any]:
    """Time turns with and without a measurement. Collective.

    Args:
        build: returns a trainer and its recorder, see `steps.build`.
        batches: of random tokens.
        rounds: to measure, after one that is not counted.
        steps: of each turn.
        warmup: steps of both trainers before.
    """
    default = _with_heldout(config, None)
    often = _with_heldout(config, Progress(steps, "step"))
    interval = default.schedule.samples(default.heldout_every(0)) / default.schedule.batch.full
    off, _ = build(often, world)
    on, records = build(often, world, heldout=random_samples(often, world, batches))
    for trainer in (off, on):
        turn(trainer, warmup)
    found = []
    for number in range(rounds + 1):
        turns = {trainer is on: turn(trainer, steps) for trainer in ((off, on) if number % 2 else (on, off))}
        (wall, used), (_, used_with) = turns[False], turns[True]
        (took,) = (record.seconds.heldout for record in records.records[-steps:] if record.heldout)
        found.append((wall / steps, took, steps * (used_with / used - 1)))
    found = found[1:]
    return {
        "rounds": rounds,
        "steps": steps,
        "samples": often.heldout_samples,
        "interval": interval,
        "step_seconds": median_range([step for step, _, _ in found]),
        "measurement_seconds": median_range([took for _, took, _ in found]),
        "measurement_steps": median_range([took / step for step, took, _ in found]),
        "measurement_processor_steps": median_range([more for _, _, more in found]),
        "share": median_range([took / (interval * step) for step, took, _ in found]),
        "processor_share": median_range([more / interval for _, _, more in found]),
    }


def _with_heldout(config: Config, every: Progress | None) -> Config:
    """One held-out source, with the default number of samples; a run that does not end."""
    source = HeldOutSource(name="random", path=Path())
    changes = {
        "eval": config.eval.model_copy(update={"loss_on": [source], "loss_every": every, "loss_samples": None}),
        "train": config.train.model_copy(update={"duration": _NEVER}),
    }
    # Not `model_copy`, which would also copy the schedule of the other duration.
    return Config(**{name: getattr(config, name) for name in Config.model_fields} | changes)


def render(result: dict[str, Any]) -> str:
    """The results as text for people."""
    processor = result["measurement_processor_steps"]
    return "\n".join(
        [
            f"{result['rounds']} rounds of {result['steps']} steps, median [least to most]:",
            f"  step                 {show_range(result['step_seconds'])}s",
            f"  measurement          {show_range(result['measurement_seconds'])}s for {result['samples']:_} samples: "
            f"{show_range(result['measurement_steps'])} steps; processor {show_range(processor)}",
            f"  once in {result['interval']:g} steps    {show_percent(result['share'])} of the time of training; "
            f"processor {show_percent(result['processor_share'])}",
        ]
    )
