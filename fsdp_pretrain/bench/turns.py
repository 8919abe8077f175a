"""Turns of a trainer that is timed beside others in one process."""

from __future__ import annotations

import time

from fsdp_pretrain.train.trainer import LAG, Trainer


def turn(trainer: Trainer, steps: int) -> tuple[float, float]:
    """(wall, processor) seconds of some steps, until the device has finished them."""
    wall, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        trainer.step()
        trainer.collect(keep=LAG)
    trainer.collect(keep=0)
    return time.perf_counter() - wall, time.process_time() - used
