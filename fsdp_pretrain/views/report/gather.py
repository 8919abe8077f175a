"""Reads everything that a page shows of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run import journal
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.goodput import GoodputReport, account
from fsdp_pretrain.run.lines import Lines, read_lines
from fsdp_pretrain.run.start_history import StartHistory, read_history
from fsdp_pretrain.views.status import StatusReport, inspect

from .curves import Curve, reduce
from .evaluations import ScorePoint, read_scores
from .events import Event, read_events

_VALUES = 160_000
"""Points of all curves of a page, summed over their columns."""
_LEFT = 0.25
"""Largest share of a run's points that is spent on what was left behind."""


@dataclass(frozen=True)
class RunRecord:
    """The record of a run, read once."""

    run: RunDir
    history: StartHistory
    lines: Lines
    account: GoodputReport
    entries: list[dict[str, Any]]
    status: StatusReport

    @cached_property
    def name(self) -> str:
        return self.status.status.run if self.status.status.run != "?" else self.run.path.resolve().name

    @cached_property
    def events(self) -> tuple[list[Event], int]:
        return read_events(self.entries, self.history.nodes, self.lines, self.account.incidents)

    @cached_property
    def scores(self) -> dict[tuple[str, str], list[ScorePoint]]:
        return read_scores(self.entries, self.lines)

    def curves(self, columns: list[str]) -> tuple[Curve, Curve]:
        """The kept line and what was left behind, with these columns."""
        kept, left = self.lines.kept, self.lines.left
        points = _VALUES // (sum(name in kept.columns for name in columns) or 1)
        rest = min(int(points * _LEFT), len(left))
        return reduce(kept, columns, points - rest), reduce(left, columns, rest)


def read(run: RunDir, shown: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> RunRecord:
    """Read the record of a run; `shown` may wrap metrics lines in a progress bar.

    Raises:
        ConfigError: it was never started.
        UserError: the lineage is damaged.
    """
    history = read_history(run, shown)
    found = account(history)
    if found is None:
        raise ConfigError(
            f"there is nothing to show: {run.path} was never started",
            effect="no page was written",
            remedy=f"start its training, or see why that failed: fsdp-pretrain journal {run.path}",
        )
    lines = read_lines(run, history, shown)
    return RunRecord(run, history, lines, found, _entries(run), inspect(run, brief=True))


def _entries(run: RunDir) -> list[dict[str, Any]]:
    """The journal. That of a fork begins with a copy of the parent's, of which what came later is left out."""
    entries = journal.read(run)
    forks = [place for place, entry in enumerate(entries) if entry["kind"] == "fork"]
    place = forks[-1] if forks else 0
    until = entries[place].get("step") if forks else None
    return [e for number, e in enumerate(entries) if number >= place or (e.get("step") or 0) <= (until or 0)]
