"""`exit_intent.json` of a segment: how its start ended, for launchers, since torchrun turns every exit code into 1."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

from pydantic import Field

from ..errors import Exit
from . import state_files, status
from .files import RunDir, now
from .state_files import StateFile

EXIT_INTENT = "exit_intent.json"


class ExitIntent(StateFile):
    """How a start ended.

    Attributes:
        code: see `errors.Exit`.
        reason: one sentence.
        time: when that was decided.
        asked: somebody asked the run to stop.
        restart: it was no decision to end, so that torchrun may start it again.
        avoid_hosts: not to be used again, with code 76.
        lost: hosts that the watchdog has found to be gone.
        rank: that ended, if it was one.
    """

    code: int
    reason: str
    time: str | None = None
    asked: bool = False
    restart: bool = False
    avoid_hosts: list[str] = Field(default_factory=list)
    lost: list[str] = Field(default_factory=list)
    rank: int | None = None


def read(segment: Path) -> ExitIntent | None:
    """How the start of a segment ended; None if it has not, died without saying so, or said it in a file that is
    damaged: then it is for who reads it as if it had died."""
    return state_files.view(segment / EXIT_INTENT, ExitIntent)


def write(run: RunDir, segment: Path, code: int, reason: str, *, is_cause: bool = False, **facts: Any) -> None:
    """Say how this start ended. The first writer wins, but the cause of an end over an error that it led to.

    Args:
        run: the run directory.
        segment: of the start that ended.
        code, reason, facts: see `ExitIntent`; further facts are for people.
        is_cause: replaces what a rank has said that failed of something unexpected: it lost its peers.

    A disk too full for this file is no reason to end otherwise than decided.
    """
    path = segment / EXIT_INTENT
    intent = {"code": code, "reason": reason, "time": now(), "host": socket.gethostname(), **facts}
    with contextlib.suppress(OSError):
        try:
            state_files.create(path, intent)
        except FileExistsError:
            first = read(segment)
            if not is_cause or first is None or first.code != Exit.UNEXPECTED:
                return
            state_files.write(path, intent)
        if run.status.exists() and segment == run.segments[-1]:
            status.update(run, **status.ended(code, reason))
