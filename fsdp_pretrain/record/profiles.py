"""Traces of a live run's steps: limits of a request, and where its files are. No torch."""

from __future__ import annotations

from pathlib import Path

from .files import RunDir

MOST_STEPS, MOST_RANKS = 20, 16
"""Of one request: a trace holds every kernel of its steps, megabytes each."""
LARGEST_SHARE = 0.1
"""Of the free space that one trace may take: the next checkpoint matters more."""


def trace_file(run: RunDir, step: int, rank: int) -> Path:
    """The trace of a rank whose first step is `step`."""
    return run.path / "profiles" / f"step-{step:08d}-rank-{rank}.json.gz"
