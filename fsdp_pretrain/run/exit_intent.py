"""`exit_intent.json` of a segment: how its start ended. Launchers need it, since torchrun turns exit codes into 1."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

from pydantic import Field

from fsdp_pretrain.errors import Exit

from . import state_files, status
from .files import RunDir, now
from .state_files import StateFile

EXIT_INTENT = "exit_intent.json"


class ExitIntent(StateFile):
    """How a start ended."""

    code: int  # see `errors.Exit`
    reason: str
    time: str | None = None  # when the end was decided
    asked: bool = False  # the stop was requested
    restart: bool = False  # torchrun may start it again
    avoid_hosts: list[str] = Field(default_factory=list)  # hosts not to use again, with code 76
    lost: list[str] = Field(default_factory=list)  # hosts that the watchdog reported lost
    rank: int | None = None  # the rank that ended, if it was a single one
    own: bool = False  # an unexpected error of that rank itself, which the loss of another rank does not explain
    by: str | None = None  # `watchdog` if that decided it, not the ranks
    unexplained: bool = False  # ranks ended without a reason; a lost node is one, since NCCL aborts their processes

    @property
    def is_effect(self) -> bool:
        """Whether a rank failed as ranks do that lose another one, so that the cause may still be unknown."""
        return self.code == Exit.UNEXPECTED and not self.own


def read(segment: Path) -> ExitIntent | None:
    """How the start of a segment ended; None if it is running, died without recording it, or the file is damaged."""
    return state_files.view(segment / EXIT_INTENT, ExitIntent)


def write(run: RunDir, segment: Path, code: int, reason: str, *, is_cause: bool = False, **facts: Any) -> None:
    """Record how a start ended; `facts` are further keys of `ExitIntent`, or keys for people.

    The first writer wins, but a cause (`is_cause`) replaces an unexpected error of a rank, which may have failed only
    because it lost its peers; one of its `own` is replaced only if a host is broken (`avoid_hosts` in `facts`). A lost
    node (`lost`) replaces one that is `unexplained`. Errors of the file system are ignored.
    """
    path = segment / EXIT_INTENT
    intent = {"code": code, "reason": reason, "time": now(), "host": socket.gethostname(), **facts}
    with contextlib.suppress(OSError):
        try:
            state_files.create(path, intent)
        except FileExistsError:
            first = read(segment)
            if first is None or not (
                (is_cause and (first.is_effect or (first.own and facts.get("avoid_hosts"))))
                or (facts.get("lost") and first.unexplained)
            ):
                return
            state_files.write(path, intent)
        if run.status.exists() and segment == run.segments[-1]:
            status.update(run, **status.ended(code, reason))
