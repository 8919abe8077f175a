"""Cost of a checkpoint: `python -m fsdp_pretrain.bench CONFIG --saves DIR`.

Each round writes a plain file of the same size from one process, a blocking save, and a background save during
training. They alternate, so that a busy machine or disk affects all three alike; compare the ratios, which are computed
within rounds.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_pretrain.checkpoint import dcp
from fsdp_pretrain.checkpoint.async_save import Pending, Stager
from fsdp_pretrain.checkpoint.loading import state_dict
from fsdp_pretrain.checkpoint.manager import make_facts
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.train.trainer import Trainer
from fsdp_pretrain.units import human_bytes

from .ranges import median_range, show_range

_BLOCK = 1 << 22


@dataclass(frozen=True)
class _Round:
    """Bytes of the checkpoint, and seconds of each part."""

    bytes: int
    plain: float
    write: float
    save: float
    stall: float
    excess: float


def measure(trainer: Trainer, world: World, directory: Path, *, rounds: int, steps: int) -> dict[str, Any]:
    """Time saves of a trainer's state. Returns the same results on every rank. Collective.

    Args:
        trainer: after at least one step, so that there is optimiser state.
        directory: on the storage to measure; what is written there is removed.
        rounds: to measure, after one warmup round.
        steps: undisturbed training steps before each background save.
    """
    place = directory / "bench-saves"
    stager, writers = Stager(world.device), world.on(world.new_group())
    found = []
    for number in range(rounds + 1):
        found.append(_round(trainer, world, writers, stager, place, number, steps))
        if world.is_main:
            shutil.rmtree(place, ignore_errors=True)
        world.barrier()
    found = found[1:]
    parts = ("plain", "write", "save", "stall", "excess")
    return {
        "rounds": rounds,
        "bytes": found[0].bytes,
        "seconds": {name: median_range([getattr(each, name) for each in found]) for name in parts},
        "bandwidth_ratio": median_range([each.plain / each.write for each in found]),
        "stall_share": median_range([each.stall / each.save for each in found]),
        "excess_share": median_range([each.excess / each.save for each in found]),
    }


def _round(
    trainer: Trainer, world: World, writers: World, stager: Stager, place: Path, number: int, steps: int
) -> _Round:
    state, facts = state_dict(trainer.model, trainer.optimizer), make_facts(trainer.config, world, trainer.state)

    def save(where: World, step: int, tensors: dict[str, Any], *, read_back: bool = True) -> dcp.SaveResult:
        now = facts.model_copy(update={"step": 3 * number + step})
        store = Store(place)
        return dcp.save(where, store, now, state=tensors, train_state="{}\n", config="", read_back=read_back)

    written = save(world, 1, state, read_back=False)
    saved = save(world, 2, state)
    plain = world.decide(lambda: _write_plainly(place / "plain", saved.bytes))
    usual = statistics.median(_step(trainer) for _ in range(steps))
    start = time.perf_counter()
    copy = stager.copy(state_dict(trainer.model, trainer.optimizer))
    pending = Pending(lambda: save(writers, 3, copy))
    stall = time.perf_counter() - start
    beside = 0
    while not all(world.gather(pending.done)):
        _step(trainer)
        beside += 1
    pending.result()
    excess = time.perf_counter() - start - beside * usual
    slowest = [max(world.gather(seconds)) for seconds in (stall, excess)]
    return _Round(saved.bytes, plain, written.seconds, saved.seconds, *slowest)


def _step(trainer: Trainer) -> float:
    start = time.perf_counter()
    trainer.step()
    trainer.collect(keep=0)
    return time.perf_counter() - start


def _write_plainly(path: Path, size: int) -> float:
    """Seconds to write and fsync `size` random bytes in blocks of 4 MiB, like `dd bs=4M conv=fsync`."""
    block = os.urandom(_BLOCK)
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for done in range(0, size, _BLOCK):
            file.write(block[: size - done])
        os.fsync(file.fileno())
    return time.perf_counter() - start


def render(result: dict[str, Any]) -> str:
    """The results as text for people."""
    spreads = {**result["seconds"], **{name: result[name] for name in result if name.endswith(("_ratio", "_share"))}}
    show = {name: show_range(found) for name, found in spreads.items()}
    size, rounds = human_bytes(result["bytes"]), result["rounds"]
    return "\n".join(
        [
            f"checkpoint of {size}, seconds in {rounds} rounds, median [least to most]:",
            f"  a plain file, synced      {show['plain']}",
            f"  save, not read back       {show['write']}  (bandwidth / plain: {show['bandwidth_ratio']})",
            f"  save, verified            {show['save']}",
            f"  in the background: wait   {show['stall']}  (share of a verified save: {show['stall_share']})",
            f"    and slower steps        {show['excess']}  (share: {show['excess_share']})",
        ]
    )
