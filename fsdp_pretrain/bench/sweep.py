"""Finds the fastest way to train on this node: `python -m fsdp_pretrain.bench CONFIG --sweep`.

Only keys that change no sample are tried: `train.micro_batch`, in powers of two until it does not fit;
`parallel.recompute`; and, if parameters are sharded, `parallel.reshard_after_forward`. A key that the command line sets
stays as it is. Every way is a job of its own, so one that does not fit does not end the others. Steps have at most four
micro-batches: with more, the update would weigh less, and the sweep would take longer.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.hardware import gpu_count

from . import measured
from .measured import MeasuredSteps

_MICRO, _RECOMPUTE, _RESHARD = "train.micro_batch", "parallel.recompute", "parallel.reshard_after_forward"
_ACCUMULATION = 4


@dataclass(frozen=True)
class TriedWay:
    """One way to train."""

    overrides: list[str]  # the keys it sets, as on the command line
    times: MeasuredSteps | None  # the measurement; None if it failed
    problem: str = ""  # why it failed

    def __str__(self) -> str:
        return f"{' '.join(self.overrides):92} {self.times or self.problem}"


def sweep(
    config: Config, command: Sequence[str], overrides: Sequence[str], *, ranks: int | None, limit: float
) -> list[TriedWay]:
    """Try all ways, and print each result to standard error; an interrupt ends the sweep with the results so far.

    Args:
        command: arguments of the benchmark.
        overrides: the arguments in `command` that set keys.
        ranks: ranks on this node; None: as many as it has GPUs, or one.
        limit: seconds after which a way is ended.

    Returns:
        The fastest first, then those that failed.

    Raises:
        ConfigError: the batch does not split over the ranks.
    """
    ranks = ranks or max(1, gpu_count())
    batch = config.schedule.batch.full
    if batch % ranks:
        raise ConfigError(f"train.global_batch of {batch} samples does not split over {ranks} ranks")
    sizes = [2**power for power in range((batch // ranks).bit_length())]
    micro = [str(size) for size in sizes if all(each % (ranks * size) == 0 for each in config.schedule.batches())]
    fixed = {override.partition("=")[0]: override.partition("=")[2] for override in overrides}
    ways: dict[str, tuple[str, ...]] = {_RECOMPUTE: ("0", "feed-forward", "1")}
    if config.parallel.shard_size(ranks, ranks) > 1:
        ways[_RESHARD] = ("true", "false")
    ways = {key: (fixed[key],) if key in fixed else values for key, values in ways.items()}
    tried: list[TriedWay] = []
    with contextlib.suppress(KeyboardInterrupt):
        for values in product(*ways.values()):
            for size in [fixed[_MICRO]] if _MICRO in fixed else micro:
                keys = [
                    f"{key}={value}" for key, value in ({_MICRO: size} | dict(zip(ways, values, strict=True))).items()
                ]
                accumulation = str(min(_ACCUMULATION, max(1, batch // ranks // int(size))))
                result = measured.measure([*command, *keys, "--accumulation", accumulation], limit=limit, ranks=ranks)
                way = TriedWay(keys, None, result) if isinstance(result, str) else TriedWay(keys, result)
                tried.append(way)
                print(way, file=sys.stderr, flush=True)
                if way.times is None:
                    break  # larger ones will not fit either
    return sorted(tried, key=lambda way: -(way.times.speed.tokens_per_second if way.times else 0.0))


def render(tried: Sequence[TriedWay]) -> Iterator[str]:
    """The ways as lines of text."""
    best = tried[0].times if tried else None
    if best is None:
        yield "nothing fits: shard over more ranks (parallel.shard), or look at the reasons below"
    else:
        yield f"{best.run} on {best.replicas} x {best.shards} {best.speed.device}, fastest first:"
    yield from (f"  {way}" for way in tried)
    if best is not None:
        yield f"fastest: {' '.join(tried[0].overrides)}"
