"""`fsdp-pretrain plan --tune`: the fastest way to train a configuration on a device and mesh.

Free are what changes no sample: the micro-batch (and with it the accumulation), recomputation of activations, and
whether parameters are gathered again for the backward pass. The memory model says what fits, the scale model how fast
it is; on the device itself, trials measure the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.sections import Recompute
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.parallel.mesh import shard_size
from fsdp_pretrain.units import human_bytes

from . import memory
from .flops import flops_per_token
from .predict import known_device, workload
from .scale import Cluster, Step, step
from .sizes import check_declared, sizes
from .warnings import PLANNABLE

SHOWN = 8
_RECOMPUTE: tuple[Recompute, ...] = (0, "feed-forward", 4, 2, 1)
"""Values of `parallel.recompute` to try."""


@dataclass(frozen=True)
class Choice:
    """One way to train.

    Attributes:
        accumulation: micro-batches in a step of the full batch.
        recompute, reshard: `parallel.recompute`, `parallel.reshard_after_forward`.
        memory: bytes at the peak of a step, on the rank that needs most.
        step: predicted seconds by part.
        tokens: predicted, per second and device.
        mfu: predicted.
    """

    micro_batch: int
    accumulation: int
    recompute: Recompute
    reshard: bool
    memory: int
    step: Step
    tokens: float
    mfu: float

    @property
    def overrides(self) -> tuple[str, ...]:
        """As on the command line."""
        return (
            f"train.micro_batch={self.micro_batch}",
            f"parallel.recompute={self.recompute}",
            f"parallel.reshard_after_forward={str(self.reshard).lower()}",
        )


@dataclass(frozen=True)
class Tuning:
    """What was found.

    Attributes:
        budget: bytes of a rank's memory that may be planned.
        configured: the configuration as it is.
        fitting: the fastest first.
        too_large: of those that do not fit, the one that needs least, if any.
    """

    run: str
    device: str
    shards: int
    replicas: int
    batch: int
    budget: int
    configured: Choice
    fitting: list[Choice]
    too_large: Choice | None

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "overrides": list(self.fitting[0].overrides) if self.fitting else None}


def tune(
    config: Config,
    device: str | None,
    world: int,
    *,
    gpus_per_node: int = 8,
    available: int | None = None,
    link: float | None = None,
    network: float | None = None,
) -> Tuning:
    """Rank all ways to train on `world` devices.

    Args:
        device: the driver's name of the device.
        available: bytes of its memory; default: that known for it.
        link, network: as for `predict.predict`.

    Raises:
        ConfigError: the device or its rate is not known, the model is not the declared one, or the batch does not split
            over the ranks.
    """
    check_declared(config.model, sizes(config.model).total)
    kind = known_device(config, device)
    shards = shard_size(config.parallel, world, min(world, gpus_per_node))
    judge = partial(_judge, config, Cluster.of(kind, gpus_per_node, link, network), world, shards)
    budget = int(PLANNABLE * (available or kind.bytes))
    choices = _rough(micro_batches(config, world), judge)
    choices.sort(key=lambda choice: (-choice.tokens, choice.memory))
    fitting = []
    for choice in choices:  # exactly, until enough of the fastest fit
        exact = judge(choice.micro_batch, choice.recompute, choice.reshard) if choice.memory <= budget else choice
        if exact.memory <= budget:
            fitting.append(exact)
        if len(fitting) == SHOWN:
            break
    return Tuning(
        run=config.run.name,
        device=device or "",
        shards=shards,
        replicas=world // shards,
        batch=config.schedule.batch.full,
        budget=budget,
        configured=judge(config.train.micro_batch, config.parallel.recompute, config.parallel.reshard_after_forward),
        fitting=fitting,
        too_large=min(choices, key=lambda choice: choice.memory) if not fitting else None,
    )


def micro_batches(config: Config, world: int) -> list[int]:
    """Micro-batches that split every batch of the run over `world` ranks. Raises ConfigError if there is none."""
    shared = math.gcd(*config.schedule.batches())
    if shared % world:
        raise ConfigError(
            f"the global batches of the run do not split over {world} ranks",
            remedy=f"use a divisor of {shared}, or change train.global_batch or its ramp",
        )
    return [size for size in range(1, shared // world + 1) if shared // world % size == 0]


def _rough(sizes: Sequence[int], judge: Callable[..., Choice]) -> list[Choice]:
    """All choices; memory is traced for the two smallest micro-batches and the largest, in proportion for others.

    The largest needs less: without accumulation no gradients are there when a step begins.
    """
    found = []
    ways = [(recompute, reshard) for recompute in _RECOMPUTE for reshard in (True, False)]
    for recompute, reshard in tqdm(ways, desc="memory of", unit="way", leave=False, disable=None):
        traced = [judge(size, recompute, reshard) for size in sizes[:2]]
        found += traced
        for size in sizes[2:]:
            first, second = traced
            per_sample = (second.memory - first.memory) / (second.micro_batch - first.micro_batch)
            used = int(first.memory + per_sample * (size - first.micro_batch))
            found.append(judge(size, recompute, reshard, None if size == sizes[-1] else used))
    return found


def _judge(
    config: Config,
    cluster: Cluster,
    world: int,
    shards: int,
    micro_batch: int,
    recompute: Recompute,
    reshard: bool,
    used: int | None = None,
) -> Choice:
    """A choice; `used`: its memory, if that needs no trace."""
    config = config.model_copy(
        update={
            "train": config.train.model_copy(update={"micro_batch": micro_batch}),
            "parallel": config.parallel.model_copy(
                update={"recompute": recompute, "reshard_after_forward": reshard, "shard": shards}
            ),
        }
    )
    work = workload(config, cluster, world)
    if used is None:
        accumulates = work.micro_batches > 1
        used = memory.estimate(config, shards=shards, accumulates=accumulates, device=torch.device("cuda")).total
    parts = step(work, cluster)
    tokens = parts.tokens(work)
    flops = flops_per_token(work.sizes.total, config.model, config.data.sequence_length)
    mfu = tokens * flops / cluster.device.peak
    return Choice(micro_batch, work.micro_batches, recompute, reshard, used, parts, tokens, mfu)


# ---------------------------------------------------------------------------------------------------------------- text


def render(tuning: Tuning) -> str:
    """The table for people, with the reasons."""
    lines = [
        f"{tuning.run} on {tuning.replicas} x {tuning.shards} {tuning.device}: {tuning.batch} samples per step, "
        f"{human_bytes(tuning.budget)} of memory ({PLANNABLE:.0%} of a device)",
        _row(
            "", ("micro-batch", "accumulation", "recompute", "reshard", "memory", "step", "gathers", "tokens/s", "MFU")
        ),
        *(_row("", _cells(choice)) for choice in tuning.fitting),
        _row("now", _cells(tuning.configured)),
        "  step, gathers: seconds, as predicted; gathers: of them, waiting for parameters; tokens/s: per device",
    ]
    return "\n".join([*lines, *_reasons(tuning)])


def _row(mark: str, cells: Sequence[str]) -> str:
    return f"  {mark:4}" + "".join(f"{cell:>14}" for cell in cells)


_RECOMPUTED = {0: "-", 1: "all blocks", "feed-forward": "feed-forward"}


def _cells(choice: Choice) -> list[str]:
    return [
        str(choice.micro_batch),
        str(choice.accumulation),
        _RECOMPUTED.get(choice.recompute, f"1 in {choice.recompute}"),
        "yes" if choice.reshard else "no",
        human_bytes(choice.memory),
        f"{choice.step.seconds:.3f}",
        f"{choice.step.gather:.3f}",
        f"{choice.tokens:,.0f}",
        f"{choice.mfu:.1%}",
    ]


def _reasons(tuning: Tuning) -> Iterator[str]:
    """Why the first is the best."""
    if tuning.too_large is not None:
        yield (
            f"  nothing fits: the smallest way needs {human_bytes(tuning.too_large.memory)} "
            f"({' '.join(tuning.too_large.overrides)}); shard over more ranks with parallel.shard"
        )
        return
    best, now = tuning.fitting[0], tuning.configured
    yield f"  fastest: {' '.join(best.overrides)}"
    if tuning.batch % (now.micro_batch * tuning.shards * tuning.replicas):
        yield f"  the configuration as it is does not split the batch into micro-batches of {now.micro_batch}"
    elif now.memory > tuning.budget:
        yield f"  the configuration as it is does not fit: it needs {human_bytes(now.memory)}"
    else:
        yield f"  the configuration as it is reaches {now.tokens / best.tokens:.1%} of its speed"
    if best.recompute:
        yield "  recomputation: faster than the smaller micro-batch, or the gathers, that would fit without it"
    else:
        yield "  recomputation: none, since its activations fit"
    if best.reshard:
        yield f"  reshard: on, since only {best.step.gather:.3f} s of its gathers are not hidden, and it saves memory"
    else:
        yield f"  reshard: off, since all parameters fit; what is left of the gathers is {best.step.gather:.3f} s"
