"""Which numbers of ranks a configuration can be trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_pretrain.errors import ConfigError

from .config import Config

_MOST = 4096


def feasible(config: Config) -> Iterator[int]:
    """World sizes up to 4096 that split every global batch of the run into whole micro-batches, and into whole replicas
    of `parallel.shard` ranks."""
    batches, shard = config.schedule.batches(), config.parallel.shard
    for size in range(1, min(_MOST, min(batches) // config.train.micro_batch) + 1):
        whole = shard == "node" or size % shard == 0
        if whole and all(batch % (size * config.train.micro_batch) == 0 for batch in batches):
            yield size


def check(config: Config, world: int) -> None:
    """Raise ConfigError, with all that does not fit, if a run cannot be trained on `world` ranks."""
    shard, micro_batch, problems = config.parallel.shard, config.train.micro_batch, list[str]()
    if shard != "node" and world % shard:
        problems.append(f"parallel.shard = {shard} does not divide the world size {world}")
    batches = config.schedule.batches()
    if any(batch % (world * micro_batch) for batch in batches):
        which = f"batches {shorten(batches)} do" if len(batches) > 1 else f"batch {batches[0]} does"
        problems.append(f"the global {which} not split over {world} ranks into micro-batches of {micro_batch}")
    if problems:
        raise ConfigError("; ".join(problems), remedy=f"feasible world sizes: {shorten([*feasible(config)])}")


def shorten(values: Sequence[int]) -> str:
    """The values as text, of many the first and the last; `none` if there are none."""
    shown = [str(value) for value in values]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:11], "...", shown[-1]]) or "none"
