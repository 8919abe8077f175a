"""Which rank writes which part of a checkpoint, and the two files that describe the result, ours and DCP's.

In DCP rank 0 plans every save for all ranks, which takes most of a minute with hundreds of them. Here every rank
computes the same layout once, from names, shapes and the mesh; only the lengths of written pieces are exchanged.
"""

from __future__ import annotations

import functools
import heapq
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from fsdp_pretrain.parallel.mesh import World, shard_rows
from fsdp_pretrain.run import state_files

from .tensors import METADATA, TENSORS, Chunk, StoredTensor, TensorsFile

FILE_BYTES = 1 << 30
"""A rank begins another file when one has this size, so that the ranks of any mesh can share the reading."""
_PIECE_OVERHEAD = 2048
"""Upper bound of the bytes that torch.save adds to a tensor, and its entries in the descriptions."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the state."""

    path: tuple[str, ...]  # its keys in the nested state dict
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharded: bool  # whether it is sharded over dim 0 and the mesh's shard axis; else it is the same on every rank

    @property
    def name(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True)
class TensorRows:
    """Rows of a tensor, written by one rank; `first`: index of the first row."""

    tensor: TensorSpec
    first: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.tensor.dtype.itemsize

    @property
    def offsets(self) -> tuple[int, ...]:
        return (self.first, *(0 for _ in self.shape[1:])) if self.shape else ()


@dataclass(frozen=True)
class SaveLayout:
    """The pieces that each rank writes, in this order. Only one replica writes a piece."""

    tensors: tuple[TensorSpec, ...]
    pieces: tuple[tuple[TensorRows, ...], ...]

    @property
    def size(self) -> int:
        """Upper bound of the size of all files."""
        return sum(piece.size + _PIECE_OVERHEAD for pieces in self.pieces for piece in pieces)

    @property
    def files(self) -> int:
        """Upper bound of the number of files."""
        used = (sum(piece.size + _PIECE_OVERHEAD for piece in pieces) for pieces in self.pieces)
        return sum(1 + size // FILE_BYTES for size in used)

    def descriptions(self, lengths: Sequence[Sequence[int]]) -> dict[str, str | bytes]:
        """Contents of `tensors.json` and `.metadata`. `lengths`: bytes of the pieces, [rank][piece]."""
        chunks: dict[str, list[Chunk]] = {spec.name: [] for spec in self.tensors}
        for rank, (pieces, sizes) in enumerate(zip(self.pieces, lengths, strict=True)):
            for piece, (number, start, length) in zip(pieces, places(sizes), strict=True):
                rows, file = piece.shape[0] if piece.shape else 1, file_name(rank, number)
                chunk = Chunk(first=piece.first, rows=rows, file=file, start=start, length=length)
                chunks[piece.tensor.name].append(chunk)
        return {TENSORS: self._ours(chunks), METADATA: pickle.dumps(self._dcp(chunks))}

    def _ours(self, chunks: Mapping[str, list[Chunk]]) -> str:
        tensors = {
            spec.name: StoredTensor.model_construct(
                dtype=str(spec.dtype).removeprefix("torch."), shape=spec.shape, chunks=chunks[spec.name]
            )
            for spec in self.tensors
        }
        return state_files.seal(TensorsFile.model_construct(tensors=tensors))

    def _dcp(self, chunks: Mapping[str, list[Chunk]]) -> Metadata:
        tensors: dict[str, Any] = {}
        stored = {}
        for spec in self.tensors:
            tensors[spec.name] = TensorStorageMetadata(TensorProperties(dtype=spec.dtype), torch.Size(spec.shape), [])
            for number, chunk in enumerate(chunks[spec.name]):
                rest = spec.shape[1:]
                offsets = torch.Size((chunk.first, *(0 for _ in rest)) if spec.shape else ())
                sizes = torch.Size((chunk.rows, *rest) if spec.shape else ())
                tensors[spec.name].chunks.append(ChunkStorageMetadata(offsets, sizes))
                index = MetadataIndex(spec.name, offsets, number)
                stored[index] = _StorageInfo(chunk.file, chunk.start, chunk.length)
        paths = {spec.name: spec.path for spec in self.tensors}  # lets DCP rebuild the nested dictionaries
        return Metadata(tensors, planner_data=paths, storage_data=stored, version=CURRENT_DCP_VERSION)


def file_name(rank: int, number: int) -> str:
    """DCP's name of a rank's file."""
    return f"__{rank}_{number}.distcp"


def places(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(file number, start in the file, length) of each of a rank's pieces, given their lengths in bytes."""
    number = start = 0
    for length in lengths:
        yield number, start, length
        start += length
        if start >= FILE_BYTES:
            number, start = number + 1, 0


def leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """(keys, tensor) of every tensor in nested dictionaries."""
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            yield (*path, key), value
        else:
            yield from leaves(value, (*path, key))


def layout_of(state: Mapping[str, Any], world: World) -> SaveLayout:
    """The layout of nested dictionaries of tensors, plain or sharded by FSDP over the mesh of `world`."""
    specs = (
        TensorSpec(path, tuple(tensor.shape), tensor.dtype, isinstance(tensor, DTensor))
        for path, tensor in leaves(state)
    )
    return lay_out(tuple(specs), world.replicas, world.shards)


@functools.lru_cache(maxsize=2)
def lay_out(tensors: tuple[TensorSpec, ...], replicas: int, shards: int) -> SaveLayout:
    """Spread the pieces of every shard evenly over its replicas, and plain tensors over all ranks."""
    pieces: list[list[TensorRows]] = [[] for _ in range(replicas * shards)]
    queues = [[(0, replica * shards + shard) for replica in range(replicas)] for shard in range(shards)]
    for spec in (spec for spec in tensors if spec.sharded):
        for shard, queue in enumerate(queues):
            rows = shard_rows(spec.shape[0], shards, shard)
            if rows:
                piece = TensorRows(spec, rows.start, (len(rows), *spec.shape[1:]))
                load, rank = heapq.heappop(queue)
                pieces[rank].append(piece)
                heapq.heappush(queue, (load + piece.size, rank))
    everywhere = sorted(entry for queue in queues for entry in queue)
    for spec in (spec for spec in tensors if not spec.sharded):
        piece = TensorRows(spec, 0, spec.shape)
        load, rank = heapq.heappop(everywhere)
        pieces[rank].append(piece)
        heapq.heappush(everywhere, (load + piece.size + _PIECE_OVERHEAD, rank))
    return SaveLayout(tensors, tuple(map(tuple, pieces)))
