"""`RUN/status.json`: the current state of the run, rewritten about once a second. Readers ignore a damaged one."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from fsdp_pretrain.errors import Exit

from . import state_files
from .files import RunDir
from .state_files import StateFile

_STOPPED = (Exit.RESUME, Exit.RESUME_AVOIDING_HOSTS)
ENDED = ("complete", "stopped", "failed")
"""States of a run whose newest start recorded how it ended."""
_OF_A_START = ("segment", "host", "pid", "started", "state", "exit_intent", "paused", "heartbeat", "before")
"""Entries that each start writes anew; all others are the progress of the run, which the next start takes over."""


class SavedCheckpoint(BaseModel):
    """The newest checkpoint that the job knows of."""

    step: int | None = None
    consumed: int | None = None
    tokens: int | None = None


class MeasuredHeldOut(BaseModel):
    """The newest held-out loss, by source; None where it is not finite."""

    step: int
    loss: dict[str, float | None]


class RunPause(BaseModel):
    """A pause by `control pause`: who requested it, when and why."""

    since: str
    by: str
    reason: str


class RunEnding(BaseModel):
    """How the job ended."""

    code: int
    reason: str


class RunBefore(BaseModel):
    """The state of a run before a start: entries of its status then."""

    state: str  # one of `ENDED`
    segment: int | None = None
    heartbeat: str | None = None
    exit_intent: RunEnding | None = None


class Status(StateFile):
    """The contents of `status.json`, written by the job or by what ended it. None: not known yet."""

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
    loss: float | None = None  # of the last step; the next two are means of recent ones
    iteration_seconds: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None  # until the last step, at the pace of recent steps with all that they waited for
    heldout: MeasuredHeldOut | None = None
    checkpoint: SavedCheckpoint | None = None
    paused: RunPause | None = None  # in the state `paused`
    overrides: str | None = None  # the overrides of the run directory, as text
    heartbeat: str | None = None  # when this was written
    exit_intent: RunEnding | None = None
    before: RunBefore | None = None  # until the first step of a start, if the run had ended

    @property
    def of_run(self) -> Status:
        """The status of the run once this start has ended: a start that trained nothing leaves the earlier status."""
        if self.before is None or (self.state == "complete" and not self.was_complete):
            return self
        return self.model_copy(update=dict(self.before))

    @property
    def was_complete(self) -> bool:
        """Whether the run was complete before this start, which has trained nothing yet."""
        return self.before is not None and self.before.state == "complete"

    def entries(self) -> dict[str, Any]:
        """The entries of the file, JSON values."""
        return self.model_dump(exclude_unset=True)


def read(run: RunDir) -> Status:
    """The status of a run; empty if the file is missing or damaged."""
    return state_files.view(run.status, Status) or Status()


def ended(code: int, reason: str) -> dict[str, Any]:
    """The entries for an ended start: complete (exit code 0), stopped (75, 76) or failed."""
    state = "complete" if code == Exit.COMPLETE else "stopped" if code in _STOPPED else "failed"
    return {"state": state, "exit_intent": {"code": code, "reason": reason}}


def taken_over(run: RunDir) -> dict[str, Any]:
    """The entries that a new start takes over from the last status: the run's progress, and how it had ended."""
    known = read(run)
    progress = {key: value for key, value in known.entries().items() if key not in _OF_A_START}
    if (left := known.of_run).state in ENDED:
        progress["before"] = left.model_dump(include=set(RunBefore.model_fields))
    return progress


def update(run: RunDir, /, **fields: Any) -> None:
    """Update entries; a damaged file is replaced. Raises OSError."""
    state_files.write(run.status, {**read(run).entries(), **fields})
