"""Traces of a live run's steps: the request for one, its limits, and where its files are. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .files import RunDir

MOST_STEPS, MOST_RANKS = 20, 16
"""Of one request: a trace holds every kernel of its steps, megabytes each."""
LARGEST_SHARE = 0.1
"""Of the free space that one trace may take: the next checkpoint matters more."""


@dataclass(frozen=True)
class ProfileRequest:
    """Steps to trace.

    Attributes:
        steps: how many.
        at: the first, if it is still ahead; 0: the next that all ranks have before them.
        ranks: which ranks write a trace.
        by: who asked.
    """

    steps: int
    at: int = 0
    ranks: tuple[int, ...] = (0,)
    by: str = "?"


def trace_file(run: RunDir, step: int, rank: int) -> Path:
    """The trace of a rank whose first step is `step`."""
    return run.path / "profiles" / f"step-{step:08d}-rank-{rank}.json.gz"
