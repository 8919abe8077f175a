"""How ranks wait for work of rank 0 that may take hours."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from fsdp_pretrain.checkpoint.async_save import in_background
from fsdp_pretrain.heartbeat import Heartbeat, Phase
from fsdp_pretrain.parallel.mesh import World

T = TypeVar("T")

_TURN = 1.0
"""Seconds that ranks wait for rank 0 between two heartbeats."""


def decide_in_turns(world: World, heartbeat: Heartbeat, phase: Phase, work: Callable[[], T]) -> T:
    """`World.decide` for work that may take hours. Collective.

    Rank 0 does it in a thread, and all ranks meet in turns: no collective times out, and the watchdog sees that they
    wait. The thread ends with the process; the work must survive that.
    """
    running: list[Future[T]] = []
    world.decide(lambda: running.append(in_background(work)))
    while not world.decide(lambda: bool(wait(running, _TURN).done)):
        heartbeat.beat(phase)
    return world.decide(lambda: running[0].result())
