"""The process group, the 2-D HSDP mesh, and joint decisions of all ranks.

There is one code path for all sizes: the mesh always has the axes (replicate, shard), either of which may be 1.
"""

from __future__ import annotations

import copy
import math
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_pretrain import open_files
from fsdp_pretrain.config.sections import ParallelSection
from fsdp_pretrain.errors import ConfigError, UserError
from fsdp_pretrain.hardware import gpu_count
from fsdp_pretrain.ranks import RankInfo
from fsdp_pretrain.run.environment import WorldShape
from fsdp_pretrain.units import counted

T = TypeVar("T")
REPLICATE, SHARD = "dp_replicate", "dp_shard"


class World:
    """All ranks: the mesh with the axes `REPLICATE` and `SHARD`, this rank's device, reductions and joint decisions.

    Two ways to agree: `decide` runs a call on rank 0 only and broadcasts its result; `together` runs it on every rank.
    With both, a UserError on one rank is raised on all.
    """

    def __init__(self, ranks: RankInfo, device: torch.device, mesh: DeviceMesh, timeout: timedelta) -> None:
        self.rank, self.size, self.local_world = ranks.rank, ranks.world, ranks.local_world
        self.device, self.mesh = device, mesh
        self.replicas, self.shards = mesh.shape
        self.host_group: dist.ProcessGroup | None = None  # the default group, whose CPU backend is gloo
        self._timeout = timeout

    def with_host_group(self, host_group: dist.ProcessGroup) -> World:
        """The same world with another gloo group for joint decisions, for use in another thread."""
        other = copy.copy(self)
        other.host_group = host_group
        return other

    @property
    def shape(self) -> WorldShape:
        """The shape for checkpoints and the record."""
        return WorldShape(size=self.size, replicas=self.replicas, shards=self.shards)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that writes the record."""
        return self.rank == 0

    def sum_(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place, on the device; no host synchronisation on CUDA."""
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
        return values

    def gather_shards(self, values: Tensor) -> Tensor:
        """`values` of every rank that holds a part of this replica: [shards, ...] on the device, without waiting."""
        parts = [torch.empty_like(values) for _ in range(self.shards)]
        dist.all_gather(parts, values, group=self.mesh.get_group(SHARD))
        return torch.stack(parts)

    def new_group(self) -> dist.ProcessGroup:
        """Create another gloo group of all ranks. Collective."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self._timeout)
        # Connect all ranks now: else a rank with nothing left to do could end while others still connect to it.
        dist.all_reduce(torch.zeros(()), group=group)
        return group

    def decide(self, choose: Callable[[], T]) -> T:
        """Rank 0 calls `choose`; every rank returns its result, or raises its UserError. Collective.

        So all ranks act on rank 0's view of the file system.
        """
        box: list[Any] = [None, None]
        if self.is_main:
            try:
                box[0] = choose()
            except UserError as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0, group=self.host_group)
        if box[1] is not None:
            raise box[1].on_all_ranks()
        result: T = box[0]
        return result

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order, on every rank. Collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def together(self, act: Callable[[], T]) -> T:
        """Call `act` on every rank, and return its result. If any rank raises UserError, all raise that of the lowest
        such rank. Collective."""
        result, error = None, None
        try:
            result = act()
        except UserError as raised:
            error = raised
        for rank, raised_there in enumerate(self.gather(error)):
            if raised_there is not None:
                if rank:
                    raised_there.cause = f"rank {rank}: {raised_there.cause}"
                raise raised_there.on_all_ranks()
        return result  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.gather(None)


class SingleProcess(World):
    """A single process without process group or mesh, for commands that write a checkpoint.

    Does not call `World.__init__`, which needs a mesh; methods that use the mesh or a group do not work.
    """

    def __init__(self) -> None:
        self.rank, self.size, self.local_world = 0, 1, 1
        self.replicas, self.shards = 1, 1
        self.device, self.host_group = torch.device("cpu"), None

    def decide(self, choose: Callable[[], T]) -> T:
        return choose()

    def gather(self, value: T) -> list[T]:
        return [value]


@contextmanager
def connect(parallel: ParallelSection) -> Iterator[World]:
    """Join the process group and build the mesh; destroy the group on a normal exit. Raises ConfigError if the world
    does not fit the configuration or the machine."""
    ranks = RankInfo.from_environment()
    shards = parallel.shard_size(ranks.world, ranks.local_world)
    device = device_of(ranks)
    open_files.raise_limit(open_files.files_needed(ranks.world, shards))
    timeout = timedelta(seconds=parallel.timeout.value)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=_store(ranks, timeout),
        rank=ranks.rank,
        world_size=ranks.world,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    mesh = init_device_mesh(device.type, (ranks.world // shards, shards), mesh_dim_names=(REPLICATE, SHARD))
    for axis in (REPLICATE, SHARD):  # a mesh group does not inherit the timeout of init_process_group
        dist.distributed_c10d._set_pg_timeout(timeout, mesh.get_group(axis))
    yield World(ranks, device, mesh, timeout)
    # Not in a `finally`: after an error peers may have ended, and this would wait for them.
    dist.destroy_process_group()


def _store(ranks: RankInfo, timeout: timedelta) -> dist.Store:
    """The rendezvous store.

    torchrun's agents keep one store over all restarts (unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and the c10d
    rendezvous are used), so a restarted rank would read addresses of dead peers. On one node the restart count
    separates the attempts; between nodes it can differ, and only the variable helps.
    """
    if ranks.world == 1 and "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master = ranks.rank == 0 and not shared
    store: dist.Store = dist.TCPStore(address, port, ranks.world, master, timeout, multi_tenant=True)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if shared and ranks.local_world == ranks.world:
        store = dist.PrefixStore(f"attempt-{restarts}", store)
    elif shared and restarts != "0" and ranks.local_rank == 0:
        warnings.warn(
            "torchrun restarted this node, but its agents share one store over all restarts: the ranks may not find "
            "each other. Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend c10d.",
            stacklevel=2,
        )
    return store


def device_of(ranks: RankInfo) -> torch.device:
    """The GPU of this rank, made current, or the CPU without GPUs. Raises ConfigError."""
    if not torch.cuda.is_available():
        if present := gpu_count():
            raise ConfigError(
                f"{socket.gethostname()} has {counted(present, 'GPU')}, and torch {torch.__version__} can use none",
                effect="this rank would train on the CPU, and the others wait for it",
                remedy="check driver and fabric manager (nvidia-smi), or install torch with CUDA; to train on the CPU, "
                "set CUDA_VISIBLE_DEVICES to nothing",
            )
        return torch.device("cpu")
    if ranks.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {ranks.local_rank} has no GPU: {socket.gethostname()} shows {torch.cuda.device_count()}",
            effect="the job would hang, or two ranks would share a device",
            remedy="start as many ranks per node as there are GPUs, or check CUDA_VISIBLE_DEVICES and the driver",
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, plain or a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_rows(rows: int, shards: int, shard: int) -> range:
    """The rows of a tensor that FSDP gives to a shard; the last shards may have fewer, or none."""
    size = math.ceil(rows / shards)
    return range(min(shard * size, rows), min((shard + 1) * size, rows))


def local_rows(tensor: Tensor) -> range:
    """The rows of this rank's part of a tensor, plain or a DTensor sharded over dim 0."""
    if not isinstance(tensor, DTensor):
        return range(tensor.shape[0] if tensor.ndim else 1)
    axis = tensor.device_mesh[SHARD]
    return shard_rows(tensor.shape[0], axis.size(), axis.get_local_rank())
