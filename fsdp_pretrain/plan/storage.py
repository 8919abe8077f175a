"""What `plan` says of the cache for corpora in remote storage. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from data.fetch.room import CacheNeed
from data.packing.packer import Packer
from fsdp_pretrain.units import human_bytes


def warnings(found: CacheNeed, packer: Packer) -> Iterator[str]:
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


def render(found: CacheNeed) -> str:
    """A line for people."""
    return (
        f"  cache       {human_bytes(found.least)} of {human_bytes(found.whole)} by URL in use at a time, at least "
        f"{human_bytes(found.recommended)} recommended; data.cache.size is {human_bytes(found.size)}"
    )
