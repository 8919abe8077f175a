"""What the live view shows of a run: read once, then only what was added.

The costly parts (checkpoints, goodput) are read again when something happened, and otherwise so seldom that they take
about a hundredth of the time each.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from fsdp_pretrain.checkpoint.locations import stores
from fsdp_pretrain.checkpoint.store import Checkpoint
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.record import goodput, journal, state_files
from fsdp_pretrain.record.files import RunDir, age
from fsdp_pretrain.record.goodput import GoodputReport
from fsdp_pretrain.record.start_history import read_history
from fsdp_pretrain.record.status import Status
from fsdp_pretrain.watchdog.notify.alarms import Alarm, read_alarms
from fsdp_pretrain.watchdog.notify.operator import alarms_file
from fsdp_pretrain.watchdog.status import StatusReport, inspect

from .step_table import StepTable

_JOURNAL, _SHOWN = 200, 8
_LEAST_SECONDS, _SHARE = 5.0, 100
T = TypeVar("T")


class Costly(Generic[T]):
    """A value that is expensive to read: read again when its `signs` change, and otherwise when it is older than
    `least` seconds and than a hundred times what reading took."""

    def __init__(self, read: Callable[[], T], least: float = _LEAST_SECONDS) -> None:
        self._read, self._least = read, least
        self._signs: object = None
        self._next = -math.inf
        self._value: T

    def get(self, signs: object) -> T:
        """The value. Raises what reading raises."""
        begun = time.monotonic()
        if signs != self._signs or begun >= self._next:
            self._value = self._read()
            self._signs, took = signs, time.monotonic() - begun
            self._next = begun + max(self._least, _SHARE * took)
        return self._value


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint as shown."""

    step: int
    age_seconds: float
    state: str  # verified, written (not read back), or damaged
    pinned: bool


@dataclass(frozen=True)
class RunView:
    """A run at one moment.

    Attributes:
        table: grows in the background; each of its answers is consistent in itself.
        problem: why the record cannot be read now; the rest is then from before.
    """

    path: Path
    table: StepTable
    report: StatusReport = field(default_factory=StatusReport)
    checkpoints: list[ListedCheckpoint] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    account: GoodputReport | None = None
    problem: str = ""

    @property
    def status(self) -> Status:
        return self.report.status

    @property
    def problems(self) -> list[tuple[int, str]]:
        """Problems that are not alarms, worst first."""
        keys = tuple(f"{alarm.key}: " for alarm in self.alarms)
        found = [each for each in self.report.problems if not each[1].startswith(keys)]
        return sorted(found, key=lambda each: -each[0])


def open_alarms(run: RunDir) -> list[Alarm]:
    """Alarms that are not over: unacknowledged first, then by severity, then the newest first."""
    found = [alarm for alarm in read_alarms(alarms_file(run)) if alarm.state != "resolved"]
    newest = sorted(found, key=lambda alarm: alarm.opened, reverse=True)
    return sorted(newest, key=lambda alarm: (alarm.state != "open", -alarm.severity))


class RunFollower:
    """Follows a run; writes nothing. `poll` is called about once a second by one thread."""

    def __init__(self, run: RunDir) -> None:
        self.run, self._table = run, StepTable(run)
        self._journal_read, self._journal_file = 0, 0
        self._entries: deque[dict[str, Any]] = deque(maxlen=_JOURNAL)
        self._evaluations: deque[dict[str, Any]] = deque(maxlen=_SHOWN)
        self._report = Costly(lambda: (inspect(run, brief=True), open_alarms(run)))
        self._checkpoints = Costly(self._find_checkpoints)
        self._account = Costly(self._divide_time, least=10.0)
        self._view = RunView(run.path, self._table)

    def poll(self) -> tuple[RunView, bool]:
        """The run now, and whether all of its record has been read: if not, poll again at once."""
        if not self.run.begun:
            there = "holds no run any more" if self.run.path.is_dir() else "is gone"
            self._view = RunView(**{**vars(self._view), "problem": f"{self.run.path} {there}; waiting for it"})
            return self._view, True
        try:
            whole = self._table.read()
            self._read_journal()
            self._view = self._look(whole)
        except (UserError, OSError) as error:
            text = error.cause if isinstance(error, UserError) else str(error)
            self._view = RunView(**{**vars(self._view), "problem": text})
            return self._view, True
        return self._view, whole

    def _look(self, whole: bool) -> RunView:
        status = state_files.view(self.run.status, Status)
        happened = (self._journal_read, len(self.run.segments))
        signs = (happened, status and (status.state, status.pid, status.segment), size_of(alarms_file(self.run)))
        report, alarms = self._report.get(signs)
        return RunView(
            self.run.path,
            self._table,
            report=report if status is None else report.model_copy(update={"status": status}),
            checkpoints=self._checkpoints.get(happened),
            alarms=alarms,
            entries=list(self._entries),
            evaluations=list(self._evaluations),
            account=self._account.get(happened) if whole else self._view.account,
        )

    def _read_journal(self) -> None:
        file = self.run.journal.stat() if self.run.journal.exists() else None
        if file is None or file.st_ino != self._journal_file or file.st_size < self._journal_read:
            self._entries.clear()
            self._evaluations.clear()
            self._journal_read, self._journal_file = 0, file.st_ino if file is not None else 0
        if file is None or file.st_size == self._journal_read:
            return
        for entry, behind in journal.entries(self.run.journal, self._journal_read):
            self._journal_read = behind
            self._entries.append(entry)
            if entry["kind"] == "eval" and journal.is_whole(entry):
                self._evaluations.append(entry)

    def _find_checkpoints(self) -> list[ListedCheckpoint]:
        return [_describe(found) for found in stores(self.run).scan()[-_SHOWN:]]

    def _divide_time(self) -> GoodputReport | None:
        found = goodput.account(self.run, read_history(self.run, columns=self._table.history))
        return None if found is None else found[0]


def _describe(found: Checkpoint) -> ListedCheckpoint:
    if found.problem is not None:
        return ListedCheckpoint(found.step, math.inf, "damaged", found.pinned)
    state = "verified" if found.verified else "written"
    return ListedCheckpoint(found.step, age(found.manifest().committed), state, found.pinned)


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
