"""Garbage collection at the same steps on all ranks: one rank that collects on its own holds up all others."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY = 50


@contextmanager
def collection_at_steps() -> Iterator[None]:
    """Python collects nothing on its own inside; call `collect_garbage` after each step.

    What exists at the beginning (modules, the model) is not looked at again, so that a collection takes milliseconds.
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
