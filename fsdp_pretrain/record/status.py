"""`RUN/status.json`: how the run stands right now. A view, rewritten every second: nothing is decided by it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from ..errors import Exit
from . import state_files
from .files import RunDir
from .state_files import StateFile

_STOPPED = (Exit.RESUME, Exit.RESUME_AVOIDING_HOSTS)


class Saved(BaseModel):
    """The newest checkpoint, as the job knows it."""

    step: int | None = None
    consumed: int | None = None


class Ending(BaseModel):
    """How the job ended: exit code and reason."""

    code: int
    reason: str


class Status(StateFile):
    """What the job, or who ended it, says. None: not said yet.

    Attributes:
        run: name of the run.
        segment, host, pid, started: of the job.
        state: starting, running, saving, complete, stopped, failed.
        step, total_steps, consumed, tokens: progress.
        loss, iteration_seconds, tokens_per_second: of the last step.
        checkpoint: the newest.
        overrides: of the run directory, in words.
        heartbeat: when this was written.
        exit_intent: how it ended.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    run: str = "?"
    segment: int | None = None
    host: str | None = None
    pid: int | None = None
    started: str | None = None
    state: str = "unknown"
    step: int | None = None
    total_steps: int | None = None
    consumed: int | None = None
    tokens: int | None = None
    loss: float | None = None
    iteration_seconds: float | None = None
    tokens_per_second: float | None = None
    checkpoint: Saved | None = None
    overrides: str | None = None
    heartbeat: str | None = None
    exit_intent: Ending | None = None

    def said(self) -> dict[str, Any]:
        """What the file says, JSON values."""
        return self.model_dump(exclude_unset=True)


def ended(code: int, reason: str) -> dict[str, Any]:
    """The entries that say that a start has ended: by its exit code it is complete (0), stopped (75, 76), or failed."""
    state = "complete" if code == Exit.COMPLETE else "stopped" if code in _STOPPED else "failed"
    return {"state": state, "exit_intent": {"code": code, "reason": reason}}


def update(run: RunDir, /, **fields: Any) -> None:
    """Change entries; a damaged file has none. Raises OSError."""
    known = state_files.view(run.status, Status)
    state_files.write(run.status, {**(known.said() if known is not None else {}), **fields})
