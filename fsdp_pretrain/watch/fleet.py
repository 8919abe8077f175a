"""All runs under a directory, worst first: a line each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.text import Text

from fsdp_pretrain.errors import UserError
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.status import Status
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.operator import alarms_file
from fsdp_pretrain.watchdog.status import ALERT, OK, WARN, inspect

from .following import Costly, open_alarms, size_of
from .sections import INK, LEVEL, one_line, short

_DEPTH = 4
"""Levels below the directory that are searched."""
_SEARCH_SECONDS = 30.0
KEYS = "q quit  ↑↓ select  Enter or 1-9 open a run"
_ORDER = ("running", "saving", "paused", "starting", "incomplete", "stopped", "unknown", "complete")


class FleetCheckpoint(BaseModel):
    """The newest verified checkpoint of a run."""

    step: int
    age_seconds: float


class FleetRow(BaseModel):
    """A run in the list, and what `--json` says of it. `level`: 0 ok, 1 warning, 2 alert, as of `status`."""

    path: str
    name: str
    state: str
    level: int
    running: bool = False
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    iteration_seconds: float | None = None
    eta_seconds: float | None = None
    checkpoint: FleetCheckpoint | None = None
    alarms: list[str] = []
    problem: str = ""  # the worst


def find_runs(directory: Path, depth: int = _DEPTH) -> Iterator[RunDir]:
    """The runs in a directory and below; inside a run is not searched, nor where a link leads."""
    if (directory / "segments").is_dir() or (directory / "status.json").is_file():
        yield RunDir(directory)
        return
    if depth == 0:
        return
    try:
        with os.scandir(directory) as entries:
            found = sorted(
                entry.path for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."
            )
    except OSError:
        return
    for path in found:
        yield from find_runs(Path(path), depth - 1)


class FleetFollower:
    """Follows all runs under a directory; writes nothing. A run in which nothing happened is not read again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._rows: dict[Path, Costly[FleetRow]] = {}
        self._runs = Costly(lambda: list(find_runs(directory)), least=_SEARCH_SECONDS)

    def poll(self) -> tuple[list[FleetRow], bool]:
        """A row for each run, worst first; and True: all was read."""
        runs = self._runs.get(None)
        rows = [self._row(run) for run in runs]
        return sort_rows(rows), True

    def _row(self, run: RunDir) -> FleetRow:
        status = state_files.view(run.status, Status)
        if run.path not in self._rows:
            self._rows[run.path] = Costly(lambda: describe(run), least=10.0)
        signs = (
            status and (status.state, status.pid, status.segment),
            size_of(run.journal),
            size_of(alarms_file(run)),
            run.path.is_dir(),
        )
        row = self._rows[run.path].get(signs)
        return row if status is None else row.model_copy(update=_progress(status, row.running))


def describe(run: RunDir) -> FleetRow:
    """The row of a run."""
    try:
        report = inspect(run, brief=True)
    except (UserError, OSError) as error:
        text = error.cause if isinstance(error, UserError) else str(error)
        return FleetRow(path=str(run.path), name=run.path.name, state="unreadable", level=ALERT, problem=text)
    newest = report.verified_checkpoint
    return FleetRow(
        path=str(run.path),
        name=report.status.run if report.status.run != "?" else run.path.name,
        state=report.headline,
        level=report.level,
        running=report.running,
        checkpoint=None if newest is None else FleetCheckpoint(step=newest.step, age_seconds=newest.age_seconds),
        alarms=[alarm.key for alarm in open_alarms(run)],
        problem=max(report.problems, key=lambda each: each[0])[1] if report.problems else "",
        **_progress(report.status, report.running),
    )


def _progress(status: Status, running: bool) -> dict[str, Any]:
    pace, step, total = status.iteration_seconds, status.step, status.total_steps
    return {
        "step": step,
        "total_steps": total,
        "loss": status.loss,
        "iteration_seconds": pace,
        "eta_seconds": (total - step) * pace if running and pace and step and total else None,
    }


def sort_rows(rows: Iterable[FleetRow]) -> list[FleetRow]:
    """Worst first; of the same level, those that train before those that are complete."""

    def badness(row: FleetRow) -> tuple[int, int, str]:
        return -row.level, _ORDER.index(row.state) if row.state in _ORDER else 0, row.path

    return sorted(rows, key=badness)


_WIDE, _FIXED = 120, 66
"""From this width on, what is wrong is on the same line; width of a line without the name."""
_COLUMNS: tuple[tuple[str, int, Callable[[FleetRow], str]], ...] = (
    ("step", 17, lambda row: "-" if row.step is None else f"{row.step:_}/{row.total_steps or 0:_}"),
    ("loss", 7, lambda row: "-" if row.loss is None else short(row.loss)),
    ("pace", 7, lambda row: human_time(row.iteration_seconds) if row.iteration_seconds else "-"),
    ("ETA", 7, lambda row: "-" if row.eta_seconds is None else human_time(row.eta_seconds)),
    ("saved", 7, lambda row: human_time(row.checkpoint.age_seconds) if row.checkpoint else "never"),
)
"""Heading, width, contents."""


def render(
    directory: Path,
    rows: list[FleetRow],
    width: int,
    height: int | None,
    selected: int | None = None,
    footer: str = KEYS,
) -> list[Text]:
    """The list in `height` lines; None: as many as it needs."""
    count = {level: sum(row.level == level for row in rows) for level in (ALERT, WARN, OK)}
    title = Text.assemble(
        (_shortened(str(directory), width - 48), "bold"), f"  {len(rows)} run{'s' * (len(rows) != 1)}"
    )
    for level, name in ((ALERT, "alert"), (WARN, "warning"), (OK, "ok")):
        if count[level]:
            title.append("  ").append(f" {count[level]} {name} ", LEVEL[level])
    paths, beside = [_below(directory, row) for row in rows], width >= _WIDE
    names = min(max(map(len, paths), default=4), width - _FIXED - (width // 3 if beside else 0))
    lines = [title, _line("   ", "run".ljust(names), "state", [head.rjust(size) for head, size, _ in _COLUMNS], "bold")]
    places = []
    for number, (row, path) in enumerate(zip(rows, paths, strict=True)):
        values = [show(row).rjust(size) for _, size, show in _COLUMNS]
        mark = f"{number + 1:>2}" if number < 9 else "  "
        line = _line(
            f"{mark} ", _shortened(path, names).ljust(names), row.state, values, "reverse" if number == selected else ""
        )
        line.stylize(INK[row.level], 4 + names, 4 + names + 11)
        wrong = f"{len(row.alarms)} alarm{'s' * (len(row.alarms) != 1)}: {', '.join(row.alarms)}" if row.alarms else ""
        text = Text(f"  {wrong or one_line(row.problem)}", INK[row.level])
        places.append(len(lines))
        lines += (
            [line.append_text(text)]
            if beside
            else [line, Text("  ").append_text(text)]
            if text.cell_len > 2
            else [line]
        )
    if not rows:
        lines.append(Text("no run yet", "dim"))
    if height is not None:
        first = max(0, places[selected or 0] - (height - 4)) if places else 0
        lines = [*lines[:2], *lines[2 + first :]][: height - 1]
        lines += [*[Text()] * (height - 1 - len(lines)), Text(footer.ljust(width), "reverse")]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines


def _line(mark: str, name: str, state: str, values: Iterable[str], style: str) -> Text:
    return Text.assemble((mark, "dim"), (f"{name} {state:11} {' '.join(values)}", style))


def _shortened(path: str, width: int) -> str:
    return path if len(path) <= width else f"…{path[len(path) - width + 1 :]}"


def _below(directory: Path, row: FleetRow) -> str:
    path = os.path.relpath(row.path, directory)
    return row.name if path == "." else path
