"""What corpora in remote storage ask of a node: room in its cache, bytes, requests. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from data.fetch.process import block_sizes
from data.fetch.window import RECOMMENDED, bytes_in_use
from data.packing.opening import open_skips
from data.packing.packer import Packer
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.units import human_bytes

_REQUESTS = 2
"""For a block: the lengths of its documents, and its tokens."""


@dataclass(frozen=True)
class StorageNeed:
    """What reading from remote storage needs.

    Attributes:
        sources: bytes of each source by URL, which every node fetches once per epoch, about.
        size: of the cache, as configured.
        least: bytes of blocks that a node uses at a time; a smaller cache does not serve.
        recommended: bytes of a cache.
        node_bytes, node_requests: of one node in the whole run, at most, without retries.
        reshuffled: whether `data.reshuffle` changes the order; the numbers are those of the order without.
    """

    sources: dict[str, int]
    size: int
    least: int
    recommended: int
    node_bytes: int
    node_requests: int
    reshuffled: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def need(config: Config, packer: Packer) -> StorageNeed | None:
    """What the sources by URL ask of each node; None if there are none."""
    sizes = block_sizes(packer)
    if not sizes or config.data.cache is None:
        return None
    epochs = packer.epochs_read(open_skips(config).after(0, config.schedule.total))
    size, sources = config.data.cache.size.value, {name: int(own.sum()) for name, own in sizes.items()}
    whole, least = sum(sources.values()), bytes_in_use(packer, sizes, config.schedule.batch.full)
    # With all of it in the cache, later epochs cost nothing.
    read = {name: min(epochs[name], 1.0) if size >= whole else epochs[name] for name in sizes}
    return StorageNeed(
        sources=sources,
        size=size,
        least=least,
        recommended=min(int(RECOMMENDED * least), whole),
        node_bytes=sum(int(read[name] * sources[name]) for name in sizes),
        node_requests=sum(int(read[name] * len(sizes[name]) * _REQUESTS) for name in sizes),
        reshuffled=any(stream.reshuffles for stream in packer.streams),
    )


def warnings(found: StorageNeed | None) -> Iterator[str]:
    """About the size of the cache."""
    if found is None:
        return
    if found.reshuffled and found.size < sum(found.sources.values()):
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


def render(found: StorageNeed | None) -> list[str]:
    """Lines for people."""
    if found is None:
        return []
    sources = ", ".join(f"{name} {human_bytes(own)}" for name, own in found.sources.items())
    return [
        f"  storage     by URL: {sources}; a node fetches at most {human_bytes(found.node_bytes)} in the run, with "
        f"{found.node_requests:_} requests",
        f"  cache       {human_bytes(found.least)} in use at a time, at least {human_bytes(found.recommended)} "
        f"recommended; data.cache.size is {human_bytes(found.size)}",
    ]
