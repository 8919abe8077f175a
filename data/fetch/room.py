"""The room that corpora in remote storage need in the cache of a node."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.corpus.cached import blocks_in
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.source import STRETCH, Ints
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.units import human_bytes

RECOMMENDED = 2.0
"""Size of a cache in `bytes_in_use`: half of it then holds them, and the window moves on while they are read."""


@dataclass(frozen=True)
class CacheNeed:
    """What a cache must hold.

    Attributes:
        whole: bytes of all sources by URL.
        size: of the cache, as configured.
        least: bytes of blocks that a node uses at a time; a smaller cache does not serve.
        recommended: bytes of a cache.
    """

    whole: int
    size: int
    least: int
    recommended: int


def need(config: Config, packer: Packer) -> CacheNeed | None:
    """What the sources by URL need; None if there are none. It is that of the order without `data.reshuffle`."""
    sizes = {name: corpus.cached.sizes for name, corpus in packer.corpora.items() if corpus.cached is not None}
    if not sizes or config.data.cache is None:
        return None
    whole = sum(int(own.sum()) for own in sizes.values())
    least = bytes_in_use(packer, sizes, config.schedule.batch.full)
    return CacheNeed(whole, config.data.cache.size.value, least, min(int(RECOMMENDED * least), whole))


def check(config: Config, packer: Packer) -> None:
    """Raise ConfigError if the cache, or the room on its disk, is smaller than what a node uses at a time."""
    found, cache = need(config, packer), config.data.cache
    if found is None or cache is None:
        return
    held = sum(size for _, size in blocks_in(cache.dir).values())
    room = shutil.disk_usage(cache.dir).free + held
    if min(found.size, room) < found.least:
        small = found.size < found.least
        raise ConfigError(
            (f"data.cache.size is {cache.size}" if small else f"data.cache.dir has room for {human_bytes(room)}")
            + f", but a node uses {human_bytes(found.least)} of blocks at a time",
            effect="blocks would be fetched again and again, and training would wait for them",
            remedy=f"set data.cache.size to {human_bytes(found.recommended)} or more"
            if small
            else f"free space in {cache.dir}, or name another directory",
        )


def warnings(found: CacheNeed, packer: Packer) -> Iterator[str]:
    """What `plan` says about the size of the cache."""
    if found.size < found.whole and any(stream.reshuffles for stream in packer.streams):
        yield (
            "data.reshuffle: until the epoch ends, blocks are read in pieces far apart, and a cache that does not hold "
            "the rest of the epoch fetches each many times"
        )
    if found.size < found.recommended:
        refused = found.size < found.least
        yield (
            f"data.cache.size = {human_bytes(found.size)}, but a node uses {human_bytes(found.least)} of blocks at a "
            f"time: {'such a run is refused' if refused else 'little is left for fetching ahead'}; "
            f"at least {human_bytes(found.recommended)} is recommended"
        )


def render(found: CacheNeed) -> str:
    """A line of `plan`."""
    return (
        f"  cache       {human_bytes(found.least)} of {human_bytes(found.whole)} by URL in use at a time, at least "
        f"{human_bytes(found.recommended)} recommended; data.cache.size is {human_bytes(found.size)}"
    )


def bytes_in_use(packer: Packer, sizes: Mapping[str, Ints], batch: int) -> int:
    """About how many bytes of blocks a node uses at a time: the least that a cache must hold.

    While a stretch of a lane is read, all blocks that it touches are in use: 1 + stretch / block on average, and more
    by chance if the lanes are few. All lanes of a source reach their next stretch together.

    Args:
        sizes: bytes of the blocks of each source by URL, int64 [blocks], by its name.
        batch: samples of a step.
    """
    found = 0.0
    for name, stream in zip(packer.mixture.names, packer.streams, strict=True):
        if name in sizes:
            own, lane = sizes[name], stream.epoch_length / stream.lanes
            stretch = min(lane, (STRETCH + batch / stream.lanes) * stream.length)
            touched = stream.lanes * (1 + stretch / float(stream.block_lengths.mean())) + 2 * math.sqrt(stream.lanes)
            found += min(float(own.sum()), max(touched * float(own.mean()), 2.0 * float(np.max(own))))
    return int(found)
