"""The room that corpora in remote storage need in the cache of a node. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from data.fetch.process import block_sizes
from data.fetch.window import RECOMMENDED, bytes_in_use
from data.packing.packer import Packer
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.units import human_bytes


@dataclass(frozen=True)
class StorageNeed:
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


def need(config: Config, packer: Packer) -> StorageNeed | None:
    """What the sources by URL need; None if there are none. It is that of the order without `data.reshuffle`."""
    sizes = block_sizes(packer)
    if not sizes or config.data.cache is None:
        return None
    whole, least = (
        sum(int(own.sum()) for own in sizes.values()),
        bytes_in_use(packer, sizes, config.schedule.batch.full),
    )
    return StorageNeed(whole, config.data.cache.size.value, least, min(int(RECOMMENDED * least), whole))


def warnings(found: StorageNeed, packer: Packer) -> Iterator[str]:
    """About the size of the cache."""
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


def render(found: StorageNeed) -> str:
    """A line for people."""
    return (
        f"  cache       {human_bytes(found.least)} of {human_bytes(found.whole)} by URL in use at a time, at least "
        f"{human_bytes(found.recommended)} recommended; data.cache.size is {human_bytes(found.size)}"
    )
