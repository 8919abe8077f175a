"""Garbage collection at the same steps on all ranks, because a rank that collects alone makes all others wait."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY = 50


@contextmanager
def collection_at_steps() -> Iterator[None]:
    """Turn Python's own garbage collection off inside; call `collect_garbage` after each step.

    Objects that exist at the beginning (modules, the model) are frozen, so that a collection takes milliseconds.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def collect_garbage(step: int) -> None:
    """Collect, if it is due after this step."""
    if step % _EVERY == 0:
        gc.collect()
