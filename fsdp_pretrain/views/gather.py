"""Reads the whole record of a run once, for `report` and `watch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fsdp_pretrain.run import journal
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.goodput import GoodputReport, account
from fsdp_pretrain.run.lines import Lines, read_lines
from fsdp_pretrain.run.start_history import StartHistory, read_history

from .status import StatusReport, inspect


@dataclass(frozen=True)
class RunRecord:
    """The record of a run."""

    run: RunDir
    history: StartHistory
    lines: Lines
    account: GoodputReport | None  # how its time was spent; None if it was never started
    entries: list[dict[str, Any]]  # the journal; in a fork, of its parent only the entries up to the fork
    report: StatusReport

    @property
    def name(self) -> str:
        name = self.report.status.run
        return name if name != "?" else self.run.path.resolve().name


def read(run: RunDir, shown: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> RunRecord:
    """Read the record of a run; `shown` may wrap metrics lines in a progress bar. Raises UserError, OSError."""
    history = read_history(run, shown)
    lines = read_lines(run, history, shown)
    return RunRecord(run, history, lines, account(history), _entries(run), inspect(run, brief=True))


def _entries(run: RunDir) -> list[dict[str, Any]]:
    """The journal. A fork's begins with a copy of its parent's, whose entries of later steps are left out."""
    entries = journal.read(run)
    forks = [at for at, entry in enumerate(entries) if entry["kind"] == "fork"]
    newest_fork = forks[-1] if forks else 0
    until = entries[newest_fork].get("step") if forks else None
    return [entry for at, entry in enumerate(entries) if at >= newest_fork or (entry.get("step") or 0) <= (until or 0)]
