"""All runs under a directory, worst first: a line each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fsdp_pretrain.errors import UserError
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.status import ALERT, OK, WARN, StatusReport, inspect

from .following import open_alarms
from .page import INK, LEVEL, one_line

_DEPTH = 4
"""Levels below the directory that are searched."""
_ORDER = ("running", "saving", "paused", "starting", "incomplete", "stopped", "unknown", "complete")


@dataclass(frozen=True)
class FleetRow:
    """A run in the list: what `status` finds, and the keys of its open alarms."""

    path: Path
    report: StatusReport
    alarms: tuple[str, ...] = ()


def find_runs(directory: Path) -> Iterator[RunDir]:
    """The runs in a directory and below; inside a run is not searched, nor where a link leads."""
    for folder, below, files in os.walk(directory):
        if "segments" in below or "status.json" in files:
            yield RunDir(Path(folder))
            below.clear()
        deep = len(Path(folder).relative_to(directory).parts) >= _DEPTH
        below[:] = [] if deep else sorted(name for name in below if name[0] != ".")


def read_rows(directory: Path) -> list[FleetRow]:
    """A row for each run under a directory, worst first."""
    return sort_rows(map(describe, find_runs(directory)))


def describe(run: RunDir) -> FleetRow:
    """The row of a run."""
    try:
        return FleetRow(run.path, inspect(run, brief=True), tuple(alarm.key for alarm in open_alarms(run)))
    except (UserError, OSError) as error:
        text = error.cause if isinstance(error, UserError) else str(error)
        return FleetRow(run.path, StatusReport(state="unreadable", problems=[(ALERT, text)]))


def sort_rows(rows: Iterable[FleetRow]) -> list[FleetRow]:
    """Worst first; of the same level, those that train before those that are complete."""

    def badness(row: FleetRow) -> tuple[int, int, str]:
        state = row.report.headline
        return -row.report.level, _ORDER.index(state) if state in _ORDER else 0, str(row.path)

    return sorted(rows, key=badness)


def render(directory: Path, rows: list[FleetRow], width: int) -> Group:
    """The list."""
    title = Text(f"  {len(rows)} run{'s' * (len(rows) != 1)}")
    for level, name in ((ALERT, "alert"), (WARN, "warning"), (OK, "ok")):
        if count := sum(row.report.level == level for row in rows):
            title.append("  ").append(f" {count} {name} ", LEVEL[level])
    place, room = str(directory), width - title.cell_len
    title = Text.assemble((place if len(place) <= room else "…" + place[1 - room :], "bold"), title)
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("run", no_wrap=True, max_width=width // 3)
    table.add_column("state", no_wrap=True)
    for name in ("step", "ETA", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", ratio=1, no_wrap=True)
    for row in rows:
        alarms = f"{len(row.alarms)} alarm{'s' * (len(row.alarms) != 1)}: {', '.join(row.alarms)}" if row.alarms else ""
        status, saved, ink = row.report.status, row.report.verified_checkpoint, INK[row.report.level]
        _, worst = max(row.report.problems, key=lambda each: each[0], default=(OK, ""))
        pace, step, total = status.iteration_seconds, status.step, status.total_steps
        table.add_row(
            Text(_below(directory, row), overflow="ellipsis"),
            Text(row.report.headline, ink),
            "-" if step is None else f"{step:_}/{total or 0:_}",
            human_time((total - step) * pace) if row.report.running and pace and step and total else "-",
            human_time(saved.age_seconds) if saved else "never",
            Text(one_line(alarms or worst), ink, overflow="ellipsis"),
        )
    return Group(title, table if rows else Text("no run yet", "dim"))


def _below(directory: Path, row: FleetRow) -> str:
    path = os.path.relpath(row.path, directory)
    return row.path.resolve().name if path == "." else path
