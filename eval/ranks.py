"""An evaluation by all ranks of a torchrun job, each holding a part of the model. Rank 0 leads."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from fsdp_pretrain.config.sections import ParallelSection
from fsdp_pretrain.parallel import mesh
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.units import Seconds

T = TypeVar("T")
_M_MMAP_THRESHOLD = -3
_TIMEOUT = Seconds(24 * 3600)
"""For collectives: ranks wait while rank 0 prepares tasks and judges answers. If one dies, torchrun ends the others."""


@contextmanager
def join() -> Iterator[World | None]:
    """Join the ranks of this process's torchrun job; yields None if the process is alone.

    The model is sharded inside a node and replicated between nodes. Raises ConfigError if the ranks do not fit the
    configuration or the machine.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    # Else each part of the model that is gathered and freed leaves holes in the heap, many times as large in all.
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 17)
    with mesh.connect(ParallelSection(timeout=_TIMEOUT)) as world:
        yield world


def together(world: World | None, act: Callable[[], T]) -> T:
    """Call `act` on every rank; if any raises UserError, all do."""
    return act() if world is None else world.together(act)


def lead(world: World | None, act: Callable[[], T]) -> T:
    """On rank 0: call `act`, without sending its result; the others, in `follow`, raise its UserError too."""
    if world is None:
        return act()
    results: list[T] = []
    world.decide(lambda: results.append(act()))
    return results[0]


def follow(world: World) -> None:
    """On ranks other than 0: wait for the end of the call of rank 0 in `lead`. Raises its UserError."""
    world.decide(lambda: None)
