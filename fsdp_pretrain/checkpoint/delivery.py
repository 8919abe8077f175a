"""Reads every file of a checkpoint on one rank only, checks it on the way, and delivers its tensors to the ranks.

With DCP's loader every replica reads the whole checkpoint. Here one rank reads a file, if possible one that needs its
contents. They are sent to other shards in the reader's replica, and from there to the other replicas. The checkpoint
may have been written by any mesh.
"""

from __future__ import annotations

import math
import mmap
import struct
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_pretrain.parallel.mesh import REPLICATE, SHARD, World, local_part, local_rows, shard_rows

from .manifest import FileEntry
from .store import HashedFile, difference
from .tensors import Chunk, StoredTensor

_AHEAD = 2
"""Chunks that a reader holds beside the one being delivered."""
_END = object()


@dataclass(frozen=True)
class _Part:
    """A chunk of a tensor. `rows`: by shard, the rows of the tensor that the shard takes from the chunk."""

    name: str
    tensor: StoredTensor
    chunk: Chunk
    rows: Mapping[int, range]


def read_archive(file: Any, length: int) -> mmap.mmap:
    """Read `length` bytes of a file, or what is left of it, into memory that `parse_chunk` uses without a copy."""
    content = mmap.mmap(-1, length)  # anonymous: for `zipfile` a file, for torch a buffer that it may keep
    file.readinto(content)
    return content


def parse_chunk(content: mmap.mmap, tensor: StoredTensor, chunk: Chunk) -> Tensor:
    """The values of a chunk, from the archive that `torch.save` wrote: an uncompressed zip file with one storage.

    The pickle beside the storage is not opened. Raises ValueError or BadZipFile if it is another kind of file.
    """
    shape, dtype = tensor.shape_of(chunk), getattr(torch, tensor.dtype)
    with zipfile.ZipFile(cast(IO[bytes], content)) as archive:
        storages = [entry for entry in archive.infolist() if entry.filename.partition("/")[2].startswith("data/")]
    stored, size = sum(entry.file_size for entry in storages), math.prod(shape) * dtype.itemsize
    if len(storages) != 1 or stored != size or storages[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"has {stored} bytes where {tuple(shape)} {dtype} has {size}")
    if not size:
        return torch.empty(shape, dtype=dtype)
    header = storages[0].header_offset  # 30 bytes, a name and padding, whose lengths are its last two numbers
    start = header + 30 + sum(struct.unpack_from("<HH", content, header + 26))
    return torch.frombuffer(content, dtype=dtype, count=math.prod(shape), offset=start).view(shape)


def place(target: Tensor, first: int, values: Tensor) -> None:
    """Copy `values` into the rows of `target` from `first` on, or into a scalar."""
    (target.narrow(0, first, len(values)) if values.dim() else target).copy_(values)


def root_cause(error: BaseException) -> str:
    """The first line of the innermost error behind another, or of the OSError among them."""
    while not isinstance(error, OSError) and (below := error.__cause__ or error.__context__) is not None:
        error = below
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class Delivery:
    """Fills the tensors of a state from the files of a checkpoint.

    Args:
        folder: directory of the checkpoint.
        entries: manifest entries of its files with tensors. All are read as a whole, to be checked.
        stored: the tensors in these files, by name.
        state: tensors to fill, by name: some of the stored ones, of the same shapes, in any dtype; plain, or sharded by
            FSDP over the mesh.
    """

    def __init__(
        self,
        world: World,
        folder: Path,
        entries: Sequence[FileEntry],
        stored: Mapping[str, StoredTensor],
        state: Mapping[str, Tensor],
    ) -> None:
        self._world, self._folder, self._state = world, folder, state
        self._entries = {entry.name: entry for entry in entries}
        self._parts = self._parts_by_file(stored)
        self._readers = self._choose_readers()
        self._shard = world.rank % world.shards
        self._wrong: list[str] = []
        self._plain: list[tuple[_Part, Tensor]] = []

    @torch.no_grad()
    def run(self) -> list[str]:
        """Read and deliver everything. Returns the defects of all files, the same on every rank. Collective."""
        orders = [[part for file in files for part in self._parts[file]] for files in self._readers]
        with ThreadPoolExecutor(1, "checkpoint-reader") as pool:
            chunks = _ahead(pool, self._read(self._readers[self._world.rank]))
            for number in range(max(map(len, orders))):  # in turns, so that all readers read at the same time
                mine = next(chunks) if number < len(orders[self._world.rank]) else None
                for reader, order in enumerate(orders):
                    if number < len(order):
                        self._deliver(reader, order[number], mine)
                if self._world.device.type == "cuda":  # NCCL counts its timeout from when it was asked
                    torch.cuda.current_stream(self._world.device).synchronize()
            next(chunks, None)  # the check of the last file
        wrong = []
        for texts, plain in self._world.gather((self._wrong, self._plain)):
            wrong += texts
            for part, values in plain:
                place(self._state[part.name], part.chunk.first, values)
        return wrong

    # ------------------------------------------------------------------ which rank reads which file

    def _parts_by_file(self, stored: Mapping[str, StoredTensor]) -> dict[str, list[_Part]]:
        """The parts of each file, in file order."""
        parts: dict[str, list[_Part]] = {name: [] for name in self._entries}
        for name, target in self._state.items():
            tensor, sharded = stored[name], isinstance(target, DTensor)
            for chunk in tensor.chunks:
                rows = self._rows_by_shard(tensor, chunk) if sharded else {}
                parts[chunk.file].append(_Part(name, tensor, chunk, rows))
        return {name: sorted(own, key=lambda part: part.chunk.start) for name, own in parts.items()}

    def _rows_by_shard(self, tensor: StoredTensor, chunk: Chunk) -> dict[int, range]:
        shards, first, stop = self._world.shards, chunk.first, chunk.first + chunk.rows
        rows = {}
        if math.prod(tensor.shape_of(chunk)):
            per_shard = math.ceil(tensor.shape[0] / shards)
            for shard in range(first // per_shard, (stop - 1) // per_shard + 1):
                held = shard_rows(tensor.shape[0], shards, shard)
                rows[shard] = range(max(first, held.start), min(stop, held.stop))
        return rows

    def _choose_readers(self) -> list[list[str]]:
        """The files that each rank reads: those that its shard needs much of, with bytes spread evenly."""
        files: list[list[str]] = [[] for _ in range(self._world.size)]
        load, shards = [0] * self._world.size, self._world.shards
        for name, parts in sorted(self._parts.items()):
            needs = [0.0] * shards
            for part in parts:
                for shard, rows in part.rows.items():
                    needs[shard] += part.chunk.length * len(rows) / part.chunk.rows
            most = max(needs)
            able = (rank for rank in range(self._world.size) if 2 * needs[rank % shards] >= most)
            reader = min(able, key=load.__getitem__)
            files[reader].append(name)
            load[reader] += self._entries[name].bytes
        return files

    # ------------------------------------------------------------------ reading

    def _read(self, files: Sequence[str]) -> Iterator[Tensor | None]:
        """The chunks of files in order, None for those that cannot be read. Notes the defects of files."""
        for name in files:
            parts, done, problem = self._parts[name], 0, ""
            try:
                with HashedFile(self._folder / name) as file:
                    for part in parts:
                        chunk = None
                        try:
                            content = _slice(file, part.chunk, self._entries[name])
                            chunk = parse_chunk(content, part.tensor, part.chunk)
                        except OSError:
                            raise
                        except Exception as error:  # `zipfile` has many for damaged content
                            problem = problem or f"{name}, {part.name}: {root_cause(error)}"
                        done += 1
                        yield chunk
                    problem = difference(self._entries[name], file.finish()) or problem
            except Exception as error:  # every rank must learn of any failure
                problem = f"{name}: {error.strerror if isinstance(error, OSError) else root_cause(error)}"
            if problem:
                self._wrong.append(problem)
            yield from (None for _ in parts[done:])

    # ------------------------------------------------------------------ delivering

    def _deliver(self, reader: int, part: _Part, chunk: Tensor | None) -> None:
        """Send a part from its reader to every rank whose shard needs it. `chunk`: its values, on the reader."""
        target, world = self._state[part.name], self._world
        if not isinstance(target, DTensor):
            if world.size == 1 and chunk is not None:
                place(target, part.chunk.first, chunk)
            elif world.rank == reader and chunk is not None:  # small, and the same on every rank: all at the end
                self._plain.append((part, chunk))
            return
        for shard, rows in part.rows.items():
            source = reader - reader % world.shards + shard  # in the reader's replica
            if world.rank not in (reader, source) and shard != self._shard:
                continue
            values = torch.zeros((len(rows), *part.tensor.shape[1:]), dtype=target.dtype, device=world.device)
            if world.rank == reader and chunk is not None:
                values.copy_(chunk.narrow(0, rows.start - part.chunk.first, len(rows)))
            data = values.view(torch.uint8)
            if world.rank == reader != source:
                dist.send(data, source, group=world.mesh.get_group(SHARD))
            elif world.rank == source != reader:
                dist.recv(data, reader, group=world.mesh.get_group(SHARD))
            if shard == self._shard:
                if world.replicas > 1:
                    dist.broadcast(data, source, group=world.mesh.get_group(REPLICATE))
                place(local_part(target), rows.start - local_rows(target).start, values)


def _slice(file: HashedFile, chunk: Chunk, entry: FileEntry) -> mmap.mmap:
    """The bytes of a chunk. Raises ValueError if they do not lie in the rest of the file."""
    if chunk.start < file.size or chunk.start + chunk.length > entry.bytes:
        raise ValueError(f"bytes {chunk.start:_} to {chunk.start + chunk.length:_} are not its own")
    file.skip_to(chunk.start)
    return read_archive(file, chunk.length)


def _ahead(pool: ThreadPoolExecutor, items: Iterator[Any]) -> Iterator[Any]:
    """The items of an iterator, computed in the pool's thread `_AHEAD` items before they are used."""
    waiting: deque[Future[Any]] = deque(pool.submit(next, items, _END) for _ in range(_AHEAD))
    while (item := waiting.popleft().result()) is not _END:
        waiting.append(pool.submit(next, items, _END))
        yield item
