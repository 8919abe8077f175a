"""The size that a node's cache must have for corpora in remote storage."""

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
"""Recommended size of a cache, as a multiple of `bytes_in_use`: half for these, half for the steps that follow."""


@dataclass(frozen=True)
class CacheNeed:
    """The size that a cache needs, in bytes."""

    whole: int  # size of all sources by URL
    size: int  # size of the cache, as configured
    least: int  # size of the blocks that a node uses at a time; a smaller cache is refused
    recommended: int  # recommended size of the cache


def need(config: Config, packer: Packer) -> CacheNeed | None:
    """The need of the sources by URL; None if there are none. A `data.reshuffle` is not taken into account."""
    sizes = {name: corpus.cached.sizes for name, corpus in packer.corpora.items() if corpus.cached is not None}
    if not sizes or config.data.cache is None:
        return None
    whole = sum(int(of_corpus.sum()) for of_corpus in sizes.values())
    least = bytes_in_use(packer, sizes, config.schedule.batch.full)
    return CacheNeed(whole, config.data.cache.size.value, least, min(int(RECOMMENDED * least), whole))


def check(config: Config, packer: Packer) -> None:
    """Raise ConfigError if the cache, or the space on its disk, is smaller than the blocks a node uses at a time."""
    needed, cache = need(config, packer), config.data.cache
    if needed is None or cache is None:
        return
    held = sum(size for _, size in blocks_in(cache.dir).values())
    room = shutil.disk_usage(cache.dir).free + held
    if min(needed.size, room) < needed.least:
        small = needed.size < needed.least
        raise ConfigError(
            (f"data.cache.size is {cache.size}" if small else f"data.cache.dir has room for {human_bytes(room)}")
            + f", but a node uses {human_bytes(needed.least)} of blocks at a time",
            effect="blocks would be fetched again and again, and training would wait for them",
            remedy=f"set data.cache.size to {human_bytes(needed.recommended)} or more"
            if small
            else f"free space in {cache.dir}, or name another directory",
        )


def warnings(needed: CacheNeed, packer: Packer) -> Iterator[str]:
    """The warnings of `plan` about the size of the cache."""
    if needed.size < needed.whole and any(stream.reshuffles for stream in packer.streams):
        yield (
            "data.reshuffle: until the epoch ends, blocks are read in pieces far apart, and a cache that does not hold "
            "the rest of the epoch fetches each many times"
        )
    if needed.size < needed.recommended:
        refused = needed.size < needed.least
        yield (
            f"data.cache.size = {human_bytes(needed.size)}, but a node uses {human_bytes(needed.least)} of blocks at a "
            f"time: {'such a run is refused' if refused else 'little is left for fetching ahead'}; "
            f"at least {human_bytes(needed.recommended)} is recommended"
        )


def render(needed: CacheNeed) -> str:
    """The line of `plan` about the cache."""
    return (
        f"  cache       {human_bytes(needed.least)} of {human_bytes(needed.whole)} by URL in use at a time, at least "
        f"{human_bytes(needed.recommended)} recommended; data.cache.size is {human_bytes(needed.size)}"
    )


def bytes_in_use(packer: Packer, sizes: Mapping[str, Ints], batch: int) -> int:
    """Estimate of the bytes of blocks that a node uses at a time, which its cache must hold.

    While a stretch of a lane is read, all blocks that it touches are in use: 1 + stretch / block on average, and more
    by chance if there are few lanes. All lanes of a source reach their next stretch together.

    Args:
        sizes: bytes of the blocks of each source by URL, int64 [blocks], by its name.
        batch: samples of a step.
    """
    total = 0.0
    for name, stream in zip(packer.mixture.names, packer.streams, strict=True):
        if name in sizes:
            of_source, lane = sizes[name], stream.epoch_length / stream.lanes
            stretch = min(lane, (STRETCH + batch / stream.lanes) * stream.length)
            touched = stream.lanes * (1 + stretch / float(stream.block_lengths.mean())) + 2 * math.sqrt(stream.lanes)
            total += min(float(of_source.sum()), max(touched * float(of_source.mean()), 2.0 * float(np.max(of_source))))
    return int(total)
