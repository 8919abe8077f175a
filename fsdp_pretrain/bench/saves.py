"""Measures what a checkpoint costs: `python -m fsdp_pretrain.bench CONFIG --saves DIR`.

Each round writes a plain file of the same size from one process, a blocking save, and a background save during
training. They alternate, so that a busy machine or disk affects all three alike; compare the ratios, which are computed
within rounds.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_pretrain.checkpoint import dcp
from fsdp_pretrain.checkpoint.async_save import Stager, in_background
from fsdp_pretrain.checkpoint.loading import state_dict
from fsdp_pretrain.checkpoint.manager import make_facts
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.train.trainer import Trainer
from fsdp_pretrain.units import human_bytes

from . import steps as step_bench
from .measured import Spread

_BLOCK = 1 << 22
_END_SECONDS = 60.0
"""Longest wait for a save in the background after Ctrl-C: other ranks that have ended would let it wait forever."""


@dataclass(frozen=True)
class SaveRound:
    """Seconds of one round."""

    size: int  # bytes of the checkpoint
    plain: float  # seconds to write a plain file of that size and sync it
    save: float  # seconds of a verified save
    stall: float  # seconds that training waits for a background save
    excess: float  # seconds by which the steps until its end took longer than usual, including the wait


def measure(config: Config, world: World, directory: Path, *, rounds: int, steps: int, warmup: int) -> list[SaveRound]:
    """Time saves of a trainer's state. Returns the same results on every rank. Collective.

    Args:
        directory: a directory on the storage to measure; files written there are removed.
        rounds: number of rounds to measure, after one that is not counted.
        steps: undisturbed training steps before each background save.
        warmup: steps before everything else, at least one, so that there is optimiser state.
    """
    trainer = step_bench.build(config, world)
    step_bench.run_steps(trainer, max(1, warmup))
    place = directory / "bench-saves"
    stager, writers = Stager(world.device), world.with_host_group(world.new_group())
    results = []
    for number in range(rounds + 1):
        try:
            results.append(_round(trainer, world, writers, stager, place, number, steps))
        finally:  # after Ctrl-C too
            if world.is_main:
                shutil.rmtree(place, ignore_errors=True)
        world.barrier()
    return results[1:]


def _round(
    trainer: Trainer, world: World, writers: World, stager: Stager, place: Path, number: int, steps: int
) -> SaveRound:
    state, facts = state_dict(trainer.model, trainer.optimizer), make_facts(trainer.config, world, trainer.state)

    def save(where: World, step: int, tensors: dict[str, Any]) -> dcp.SaveResult:
        numbered = facts.model_copy(update={"step": 2 * number + step})
        return dcp.save(where, Store(place), numbered, state=tensors, train_state="{}\n", config="")

    saved = save(world, 1, state)
    plain = world.decide(lambda: _write_plainly(place / "plain", saved.bytes))
    usual = statistics.median(step_bench.run_steps(trainer, 1)[0] for _ in range(steps))
    start = time.perf_counter()
    copy = stager.copy(state_dict(trainer.model, trainer.optimizer))
    pending = in_background(lambda: save(writers, 2, copy))
    stall = time.perf_counter() - start
    steps_meanwhile = 0
    try:
        while not all(world.gather(pending.done())):
            step_bench.run_steps(trainer, 1)
            steps_meanwhile += 1
    except KeyboardInterrupt:
        wait([pending], _END_SECONDS)  # what it writes is removed next
        raise
    pending.result()
    excess = time.perf_counter() - start - steps_meanwhile * usual
    slowest = [max(world.gather(seconds)) for seconds in (stall, excess)]
    return SaveRound(saved.bytes, plain, saved.seconds, *slowest)


def _write_plainly(path: Path, size: int) -> float:
    """Seconds to write and fsync `size` random bytes in blocks of 4 MiB, like `dd bs=4M conv=fsync`."""
    block = os.urandom(_BLOCK)
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for done in range(0, size, _BLOCK):
            file.write(block[: size - done])
        os.fsync(file.fileno())
    return time.perf_counter() - start


def render(rounds: list[SaveRound]) -> str:
    """The results as text."""

    def spread(part: str, of: str = "") -> Spread:
        return Spread.of([getattr(result, part) / (getattr(result, of) if of else 1) for result in rounds])

    return "\n".join(
        [
            f"checkpoint of {human_bytes(rounds[0].size)}, seconds in {len(rounds)} rounds, median [least to most]:",
            f"  a plain file, synced      {spread('plain')}",
            f"  a verified save           {spread('save')}",
            f"  in the background: wait   {spread('stall')}  (share of a verified save: {spread('stall', 'save')})",
            f"    and slower steps        {spread('excess')}  (share: {spread('excess', 'save')})",
        ]
    )
