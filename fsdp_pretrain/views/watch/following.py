"""Follows a run for the live view. Reading all of its record is costly, so that is done only now and then."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp_pretrain.checkpoint.listing import Row, listed
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.lines import Line
from fsdp_pretrain.run.status import Status
from fsdp_pretrain.views.gather import RunRecord, read
from fsdp_pretrain.views.status import StatusReport
from fsdp_pretrain.watchdog.notify.alarms import alarms_file

SHOWN = 8
"""Checkpoints, and evaluations, that may be shown."""
_LEAST_SECONDS, _SHARE = 2.0, 50


@dataclass(frozen=True)
class RunView:
    """A run at one moment."""

    path: Path
    record: RunRecord | None = None  # the whole record; None if it was not read yet
    report: StatusReport = field(default_factory=StatusReport)  # the report of the record, with the newest status
    checkpoints: list[Row] = field(default_factory=list)  # the last ones, newest first
    problem: str = ""  # why the record cannot be read now; the other values are then those read before

    @property
    def status(self) -> Status:
        return self.report.status

    @property
    def line(self) -> Line | None:
        """The steps of its kept line."""
        return None if self.record is None else self.record.lines.kept


def signs(run: RunDir, status: Status | None) -> object:
    """A value that changes when something happens to a run other than a step. It is cheap to read."""
    state = status and (status.state, status.pid, status.segment, run.fetched)
    return state, _size(run.journal), _size(alarms_file(run)), run.path.is_dir()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class RunFollower:
    """Follows a run. `poll` is called about once a second by one thread.

    The whole record is read again when `signs` change, and otherwise once it is older than two seconds and than fifty
    times what reading took.
    """

    def __init__(self, run: RunDir) -> None:
        self.run, self._view = run, RunView(run.path)
        self._signs: object = None
        self._next = 0.0

    def poll(self) -> RunView:
        """The run now: its status, and the rest as it was when it was last read."""
        if not self.run.begun:
            state = "holds no run any more" if self.run.path.is_dir() else "is gone"
            return replace(self._view, problem=f"{self.run.path} {state}; waiting for it")
        try:
            self.run.refresh()
            status, begun = state_files.view(self.run.status, Status), time.monotonic()
            if (new_signs := signs(self.run, status)) != self._signs or begun >= self._next:
                self._view, self._signs = read_view(self.run), new_signs
                self._next = begun + max(_LEAST_SECONDS, _SHARE * (time.monotonic() - begun))
            if status is not None:
                report = self._view.report.model_copy(update={"status": status})
                self._view = replace(self._view, report=report)
        except (UserError, OSError) as error:
            return replace(self._view, problem=error.cause if isinstance(error, UserError) else str(error))
        return self._view


def read_view(run: RunDir) -> RunView:
    """Read all that is shown of a run. Raises UserError, OSError."""
    record = read(run)
    saved = [listed(checkpoint) for checkpoint in reversed(Store(run.checkpoints).scan()[-SHOWN:])]
    return RunView(run.path, record, record.report, saved)
