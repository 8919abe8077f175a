"""Answers to requests: every request to steer a live run gets an entry of the journal, which its sender waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import journal
from .files import RunDir

_POLL_SECONDS, _LOOK_SECONDS = 0.1, 2.0


def end_of(run: RunDir) -> int:
    """Where the journal ends now, in bytes."""
    return run.journal.stat().st_size if run.journal.exists() else 0


def wait(run: RunDir, request: Path, offset: int, runs: Callable[[], bool], seconds: float) -> dict[str, Any] | None:
    """The journal entry that answers a request; None if none came in time or before the job ended.

    Args:
        request: its file.
        offset: in the journal, from before it was sent.
        runs: whether the job still runs; asked every few seconds.
        seconds: how long to wait.
    """
    begun = looked = time.monotonic()
    alive = True
    while True:
        for entry, behind in journal.entries(run.journal, offset):
            offset = behind
            if entry.get("request") == request.stem:
                return entry
        now = time.monotonic()
        if not alive or now - begun > seconds:  # looked once more since the job ended
            return None
        if now - looked > _LOOK_SECONDS:
            looked, alive = now, runs()
        time.sleep(_POLL_SECONDS)


def take_back(request: Path) -> bool:
    """Remove a request. Returns whether the job had not taken it, so that it never will."""
    try:
        request.unlink()
    except FileNotFoundError:
        return False
    return True
