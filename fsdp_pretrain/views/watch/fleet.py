"""All runs under a directory, worst first: a line each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fsdp_pretrain.errors import UserError
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.units import counted, human_time
from fsdp_pretrain.views.status import ALERT, OK, WARN, StatusReport, inspect

from .page import INK, LEVEL, one_line

_DEPTH = 4
"""Levels below the directory that are searched."""
_ORDER = ("running", "saving", "paused", "starting", "incomplete", "stopped", "unknown", "complete")


FleetRow = tuple[Path, StatusReport]
"""A run directory in the list, and its status."""


def find_runs(directory: Path) -> Iterator[RunDir]:
    """The runs in a directory and below, without unfinished forks; neither run directories nor links are searched
    further."""
    for folder, below, files in os.walk(directory):
        if {"segments", "checkpoints"}.intersection(below) or "status.json" in files:
            yield RunDir(Path(folder))
            below.clear()
        deep = len(Path(folder).relative_to(directory).parts) >= _DEPTH
        below[:] = [] if deep else sorted(name for name in below if name[0] != "." and not name.endswith(".forking"))


def read_rows(runs: Iterable[RunDir]) -> list[FleetRow]:
    """The status of runs, worst first; of the same level, running ones before complete ones."""

    def badness(row: FleetRow) -> tuple[int, int, str]:
        state = row[1].headline
        return -row[1].level, _ORDER.index(state) if state in _ORDER else 0, str(row[0])

    return sorted(((run.path, _look(run)) for run in runs), key=badness)


def _look(run: RunDir) -> StatusReport:
    try:
        return inspect(run, brief=True)
    except (UserError, OSError) as error:
        text = error.cause if isinstance(error, UserError) else str(error)
        return StatusReport(state="unreadable", problems=[(ALERT, text)])


def render(directory: Path, rows: list[FleetRow], width: int) -> Group:
    """The list of runs as a table."""
    title = Text(f"  {counted(len(rows), 'run')}")
    for level, name in ((ALERT, "alert"), (WARN, "warning"), (OK, "ok")):
        if count := sum(report.level == level for _, report in rows):
            title.append("  ").append(f" {count} {name} ", LEVEL[level])
    place, room = str(directory), width - title.cell_len
    title = Text.assemble((place if len(place) <= room else "…" + place[1 - room :], "bold"), title)
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("run", no_wrap=True, max_width=width // 3)
    table.add_column("state", no_wrap=True)
    for name in ("step", "ETA", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", ratio=1, no_wrap=True)
    for path, report in rows:
        keys = [alarm.key for alarm in report.alarms]
        alarms = f"{counted(len(keys), 'alarm')}: {', '.join(keys)}" if keys else ""
        status, saved, ink = report.status, report.verified_checkpoint, INK[report.level]
        _, worst = max(report.problems, key=lambda problem: problem[0], default=(OK, ""))
        step, left = status.step, status.seconds_left
        table.add_row(
            Text(_below(directory, path), overflow="ellipsis"),
            Text(report.headline, ink),
            "-" if step is None else f"{step:_}/{status.total_steps or 0:_}",
            human_time(left) if report.running and left else "-",
            human_time(saved.age_seconds) if saved else "never",
            Text(one_line(alarms or worst), ink, overflow="ellipsis"),
        )
    return Group(title, table if rows else Text("no run yet", "dim"))


def _below(directory: Path, path: Path) -> str:
    return path.resolve().name if path == directory else os.path.relpath(path, directory)
