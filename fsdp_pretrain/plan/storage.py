"""What corpora in remote storage ask of a node: room in its cache, bytes, requests. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from data.fetch import working_set
from data.fetch.costs import REQUESTS, epoch_reads
from data.packing.opening import open_skips
from data.packing.packer import Packer
from data.packing.source import Ints, SourceStream
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.remote import Url
from fsdp_pretrain.units import human_bytes, human_count

from .flops import DAY

_MARGIN = 1.5
"""Recommended sizes, in working sets: a cache also holds what is fetched ahead."""


@dataclass(frozen=True)
class RemoteSource:
    """What a node reads of a source in remote storage.

    Attributes:
        bytes, blocks: of the corpus.
        epoch_bytes, epoch_blocks: that the node fetches in an epoch, see `EpochReads`.
        epochs: of the run.
    """

    bytes: int
    blocks: int
    epoch_bytes: int
    epoch_blocks: int
    epochs: float


@dataclass(frozen=True)
class StorageNeed:
    """What reading from remote storage needs.

    Attributes:
        nodes: that share every batch.
        size: of the cache, as configured.
        working_set: bytes of blocks that a node uses at a time; a smaller cache does not serve.
        recommended: bytes of a cache.
        node_bytes, node_requests: of one node in the whole run, at most, without retries.
        bytes_per_second: of one node, on average; None if the time of the run is not known.
        requests_per_day: of all nodes; None likewise.
        reshuffled: whether `data.reshuffle` changes the order; the numbers are those of the order without.
    """

    nodes: int
    sources: dict[str, RemoteSource]
    size: int
    working_set: int
    recommended: int
    node_bytes: int
    node_requests: int
    bytes_per_second: float | None
    requests_per_day: float | None
    reshuffled: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def need(config: Config, packer: Packer, nodes: int, days: float | None) -> StorageNeed | None:
    """What the sources by URL ask of each of `nodes` nodes, in a run of `days`; None if there are none."""
    opened = {name: (corpus.directory, corpus.copies) for name, corpus in packer.corpora.items()}
    sizes = {
        name: copies[place].corpus.sizes
        for name, (place, copies) in opened.items()
        if isinstance(place, Url) and place in copies
    }
    if not sizes or config.data.cache is None:
        return None
    samples = open_skips(config).after(0, config.schedule.total)
    epochs, size = packer.epochs_read(samples), config.data.cache.size.value
    sources = {
        name: _source(stream, sizes[name], epochs[name], 1 / nodes)
        for name, stream in zip(packer.mixture.names, packer.streams, strict=True)
        if name in sizes
    }
    batch = config.schedule.batch.full
    live = working_set.predict(packer, sizes, world=nodes, ranks=range(1), batch=batch, samples=samples)
    whole = sum(source.bytes for source in sources.values())
    # With all of it in the cache, later epochs cost nothing.
    read = {name: min(source.epochs, 1.0) if size >= whole else source.epochs for name, source in sources.items()}
    node_bytes = sum(int(read[name] * source.epoch_bytes) for name, source in sources.items())
    requests = sum(int(read[name] * source.epoch_blocks * REQUESTS) for name, source in sources.items())
    return StorageNeed(
        nodes=nodes,
        sources=sources,
        size=size,
        working_set=live,
        recommended=min(int(_MARGIN * live), whole),
        node_bytes=node_bytes,
        node_requests=requests,
        bytes_per_second=None if days is None else node_bytes / (days * DAY),
        requests_per_day=None if days is None else nodes * requests / days,
        reshuffled=any(stream.reshuffles for stream in packer.streams),
    )


def _source(stream: SourceStream, sizes: Ints, epochs: float, share: float) -> RemoteSource:
    reads = epoch_reads(stream, sizes, share)
    return RemoteSource(int(sizes.sum()), len(sizes), round(reads.bytes), round(reads.blocks), epochs)


def warnings(found: StorageNeed | None) -> Iterator[str]:
    """About the size of the cache."""
    if found is None:
        return
    if found.reshuffled and found.size < sum(source.bytes for source in found.sources.values()):
        yield (
            "data.reshuffle: until the epoch ends, blocks are read in pieces far apart, and a cache that does not hold "
            "the rest of the epoch fetches each many times"
        )
    if found.size >= found.recommended:
        return
    short = found.size < found.working_set
    yield (
        f"data.cache.size = {human_bytes(found.size)}, but a node uses {human_bytes(found.working_set)} of blocks at a "
        f"time: {'such a run is refused' if short else 'little is left for fetching ahead'}; "
        f"at least {human_bytes(found.recommended)} is recommended"
    )


def render(found: StorageNeed | None) -> list[str]:
    """Lines for people."""
    if found is None:
        return []
    lines = [
        f"  storage     {name}: {human_bytes(source.bytes)} in {source.blocks:_} blocks; "
        f"a node of {found.nodes} fetches {human_bytes(source.epoch_bytes)} in an epoch"
        for name, source in found.sources.items()
    ]
    lines.append(
        f"              {human_bytes(found.node_bytes)} and {human_count(found.node_requests)} requests per node "
        "in the run, at most"
        + ("" if found.bytes_per_second is None else f": {human_bytes(found.bytes_per_second)}/s per node")
        + ("" if found.requests_per_day is None else f", {human_count(found.requests_per_day)} requests a day of all")
    )
    lines.append(
        f"  cache       {human_bytes(found.working_set)} in use at a time, at least {human_bytes(found.recommended)} "
        f"recommended; data.cache.size is {human_bytes(found.size)}"
    )
    return lines
