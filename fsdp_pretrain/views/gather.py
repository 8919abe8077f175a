"""The whole record of a run, read once: what `report` and `watch` show."""

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
    """The record of a run.

    Attributes:
        account: where its time went; None if it was never started.
        entries: the journal; of the parent of a fork only what was before it.
    """

    run: RunDir
    history: StartHistory
    lines: Lines
    account: GoodputReport | None
    entries: list[dict[str, Any]]
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
    """The journal. That of a fork begins with a copy of the parent's, of which what came later is left out."""
    entries = journal.read(run)
    forks = [place for place, entry in enumerate(entries) if entry["kind"] == "fork"]
    place = forks[-1] if forks else 0
    until = entries[place].get("step") if forks else None
    return [e for number, e in enumerate(entries) if number >= place or (e.get("step") or 0) <= (until or 0)]
