"""`RUN/status.json`: the current state of the run, rewritten about once a second. Readers ignore a damaged one."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from fsdp_pretrain.errors import Exit

from . import state_files
from .files import RunDir
from .state_files import StateFile

_STOPPED = (Exit.RESUME, Exit.RESUME_AVOIDING_HOSTS)


class SavedCheckpoint(BaseModel):
    """The newest checkpoint that the job knows of."""

    step: int | None = None
    consumed: int | None = None


class MeasuredHeldOut(BaseModel):
    """The newest held-out loss of this start, by source; None where it is not finite."""

    step: int
    loss: dict[str, float | None]


class RunPause(BaseModel):
    """Who holds the ranks idle, and since when."""

    since: str
    by: str
    reason: str


class RunEnding(BaseModel):
    """How the job ended."""

    code: int
    reason: str


class Status(StateFile):
    """The contents of `status.json`, written by the job or what ended it. None: not known yet."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    run: str = "?"  # name of the run
    segment: int | None = None
    host: str | None = None
    pid: int | None = None
    started: str | None = None
    state: str = "unknown"  # starting, running, saving, paused, complete, stopped, failed
    step: int | None = None
    total_steps: int | None = None
    consumed: int | None = None
    tokens: int | None = None
    loss: float | None = None  # of the last step, as are the next two
    iteration_seconds: float | None = None
    tokens_per_second: float | None = None
    heldout: MeasuredHeldOut | None = None
    checkpoint: SavedCheckpoint | None = None
    paused: RunPause | None = None  # in the state of this name
    overrides: str | None = None  # of the run directory, in words
    heartbeat: str | None = None  # when this was written
    exit_intent: RunEnding | None = None

    def entries(self) -> dict[str, Any]:
        """The entries of the file, JSON values."""
        return self.model_dump(exclude_unset=True)


def ended(code: int, reason: str) -> dict[str, Any]:
    """The entries for an ended start: complete (exit code 0), stopped (75, 76) or failed."""
    state = "complete" if code == Exit.COMPLETE else "stopped" if code in _STOPPED else "failed"
    return {"state": state, "exit_intent": {"code": code, "reason": reason}}


def update(run: RunDir, /, **fields: Any) -> None:
    """Update entries; a damaged file is replaced. Raises OSError."""
    known = state_files.view(run.status, Status)
    state_files.write(run.status, {**(known.entries() if known is not None else {}), **fields})
