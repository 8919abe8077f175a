"""The page of one run in the live view."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fsdp_pretrain.checkpoint.listing import Row
from fsdp_pretrain.run import journal, lineage
from fsdp_pretrain.run.files import age
from fsdp_pretrain.run.goodput import State
from fsdp_pretrain.run.journal import tone
from fsdp_pretrain.run.lines import Line
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import counted, human_bytes, human_count, human_time
from fsdp_pretrain.views.status import ALERT, OK, WARN

from .charts import Values, draw
from .following import SHOWN, RunView

LEVEL = {OK: "bold black on green", WARN: "bold black on yellow", ALERT: "bold white on red"}
INK = {OK: "green", WARN: "yellow", ALERT: "bold red"}
_SEVERITY = {Severity.INFO: "cyan", Severity.WARN: "yellow", Severity.CRIT: "bold red"}
_TONE = {"good": "green", "warning": "yellow", "bad": "bold red", "": "cyan"}
_CHECKPOINT = {
    "verified": ("✓", "verified", "green"), "committed": ("·", "written", "yellow"),
    "damaged": ("✗", "damaged", "bold red"),
}  # fmt: skip
_RECENT, _AXIS, _LINES, _ENTRIES = 200, 8, 24, 100
"""Steps in a mean, characters of an axis, lines of a small screen, and entries of the journal."""
_CURVES = (
    ("loss", "loss", "cyan"),
    ("grad_norm", "gradient norm", "magenta"),
    ("tokens_per_second", "tokens/s", "blue"),
)
_LOGARITHMIC = ("loss", "grad_norm")
_PARTS = {
    "forward_backward": "fwd+bwd", "optimizer": "optimizer", "data": "data", "checkpoint": "checkpoint",
    "heldout": "held-out", "other": "other",
}  # fmt: skip


def one_line(text: str) -> str:
    """The text without line breaks and control characters."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())


def short(value: float, digits: int = 4) -> str:
    """A number in about `digits` significant digits; `-` if it is not finite."""
    return f"{value:.{digits}g}" if math.isfinite(value) else "-"


def render(view: RunView, width: int, height: int) -> Group:
    """The page for a screen of `width` x `height` characters. Half of the lines beyond 24 go to the curve of the loss,
    half to checkpoints and evaluations."""
    half, spare = width // 2, max(0, height - _LINES)
    loss, *others = _CURVES
    small = [_chart(view, *curve, half - 2, 2) for curve in others]
    body: list[RenderableType] = [
        _chart(view, *loss, width, 3 + spare // 2),
        _grid([half, half], [small]),
        _facts(view, 1 + spare // 4),
    ]
    head = [_title(view), _progress(view), _numbers(view), *_troubles(view)]
    if view.report.fetched is not None:
        head.insert(1, _line((str(view.report.fetched), "cyan")))
    return Group(*head, *body, _alarms(view), _journal(view))


def _grid(widths: Iterable[int | None], rows: Iterable[Iterable[RenderableType]]) -> Table:
    """A table without lines; a width of None takes what is left."""
    table = Table.grid(expand=True, padding=(0, 1, 0, 0))
    for width in widths:
        table.add_column(width=width and width - 1, ratio=None if width else 1, overflow="ellipsis")
    for row in rows:
        table.add_row(*row)
    return table


def _line(*parts: str | Text | tuple[str, str]) -> Text:
    """Text on one line, cut at the edge of the screen."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _last(line: Line | None, name: str) -> float:
    """The last value of a column; NaN if there is none."""
    column = None if line is None else line.columns.get(name)
    return float(column[-1]) if column is not None and len(column) else math.nan


def _recent(view: RunView, name: str) -> Values:
    columns = {} if view.line is None else view.line.columns
    return np.nan_to_num(columns[name][-_RECENT:]) if name in columns else np.zeros(0)


# ---------------------------------------------------------------------- the head


def _title(view: RunView) -> Table:
    """Name, state, start and host; the time on the right."""
    status, level = view.status, ALERT if view.problem else view.report.level
    name = status.run if status.run != "?" else str(view.path)
    words = "no answer" if view.problem else view.report.headline
    facts = f" start {status.segment}  on {status.host}" if status.host else ""
    heading = _line((one_line(name), "bold"), " ", (f" {words.upper()} ", LEVEL[level]), (facts, "dim"))
    clock = _line((f"{datetime.now(UTC):%d %b %H:%M:%S} UTC", "dim"))
    return _grid([None, clock.cell_len + 1], [[heading, clock]])


def _progress(view: RunView) -> RenderableType:
    """A bar of the steps, and when the run will be complete."""
    status, report = view.status, view.report
    if not status.step:
        first = "the first step" + (f" of {status.total_steps:_}" if status.total_steps else "")
        begun = f"started {human_time(age(status.started))} ago" if status.started else "no job has reported yet"
        waiting = report.running or not status.started
        return _line((f"{begun}: waiting for {first}" if waiting else f"ended before {first}", "yellow"))
    total = status.total_steps or status.step
    words = f"{status.step:_} of {total:_}  {status.step / total:.1%}"
    if report.running and (left := status.seconds_left):
        words += f"  ETA {human_time(left)} ({datetime.fromtimestamp(time.time() + left, UTC):%a %d %b %H:%M})"
    bar = ProgressBar(total, status.step, complete_style=INK[report.level], finished_style=INK[report.level])
    return _grid([None, len(words) + 1], [[bar, Text(words, no_wrap=True)]])


def _numbers(view: RunView) -> Text:
    """The values of the last step that was read."""
    line = view.line
    shown = [
        ("loss", "loss", lambda value: f"{value:.4f}"),
        ("gnorm", "grad_norm", lambda value: short(value, 3)),
        ("lr", "lr", lambda value: f"{value:.2e}"),
        ("step", "iteration", human_time),
        ("tok/s", "tokens_per_second", human_count),
        ("mfu", "mfu", lambda value: f"{value:.1%}"),
        ("tokens", "trained", human_count),
        ("batch", "batch", lambda value: f"{value:_.0f}"),
        ("mem", "memory", human_bytes),
        ("scale", "loss_scale", short),
    ]
    text = _line()
    for name, column, show in shown:
        value = _last(line, column)
        if column == "iteration":
            value -= _last(line, "heldout")  # like tok/s
        if math.isfinite(value) and value:
            text.append(f"{name} ", "dim").append(f"{show(value)}  ")
        elif name in ("loss", "gnorm") and line is not None and len(line):
            text.append(f"{name} ", "dim").append("not finite  ", "bold red")
    return text


def _troubles(view: RunView) -> Iterator[Text]:
    """What is wrong, except for alarms, worst first."""
    keys = tuple(f"{alarm.key}: " for alarm in view.report.alarms)
    problems = sorted((problem for problem in view.report.problems if not problem[1].startswith(keys)), reverse=True)
    if view.problem:
        problems = [(ALERT, view.problem), *problems]
    for level, text in problems:
        name = "ALERT" if level == ALERT else "WARN "
        yield _line((name, LEVEL[level]), " ", (one_line(text), INK[level]))


# ---------------------------------------------------------------------- curves


def _chart(view: RunView, column: str, name: str, ink: str, width: int, rows: int) -> Group:
    """A titled curve of the kept line, `rows` lines high, with its steps below."""
    head, line = _line((name, f"bold {ink}")), view.line
    if line is None or not len(line):
        reason = "reading the record" if line is None else "no step yet"
        return Group(head.append(f": {reason}", "dim"))
    values, room = line.columns[column], max(1, width - _AXIS)
    head.append(f" {_tick(float(values[-1]), 4)}")
    drawn = draw(values, room, rows, logarithmic=column in _LOGARITHMIC)
    if drawn is None:
        return Group(head.append("  no finite value", "bold red"))
    if column == "loss" and (missing := int((~np.isfinite(values)).sum())):
        head.append(f"  {missing:_} not finite", "bold red")
    head.append("  log" if drawn.logarithmic else "", "dim")
    edges = {0: drawn.high, rows - 1: drawn.low}
    marks = [f"{_tick(edges[number]) if number in edges else '':>{_AXIS - 2}} │" for number in range(rows)]
    body = [_line((mark, "dim"), (row, ink)) for mark, row in zip(marks, drawn.rows, strict=True)]
    first, last = (f"{line.columns['step'][row]:_.0f}" for row in (0, -1))
    axis = ["─"] * room
    for start in line.breaks:
        axis[start * room // len(line)] = "┬"
    steps = "".join(axis)[len(first) + 1 : room - len(last) - 1]
    return Group(head, *body, _line((f"{'steps':>{_AXIS - 2}} {first} {steps} {last}", "dim")))


def _tick(value: float, digits: int = 3) -> str:
    return human_count(value) if abs(value) >= 1000 else short(value, digits)


# ---------------------------------------------------------------------- facts


def _facts(view: RunView, most: int) -> Table:
    """Parts of a step, held-out losses, the newest `most` checkpoints and evaluations, goodput."""
    rows = [("step", _step_parts(view)), ("held-out", _heldout(view.line))]
    saved = [_checkpoint(row) for row in view.checkpoints[:most]] or [_line(("no checkpoint yet", "dim"))]
    if view.status.state == "saving":
        saved.insert(0, _line(("saving now", "yellow")))
    entries = [] if view.record is None else lineage.drop_abandoned(view.record.entries)
    newest = sorted(journal.of_kind(entries, "eval"), key=lambda entry: -int(entry["step"]))[: min(most, SHOWN)]
    evaluated = [_evaluation(entry) for entry in newest] or [_line(("nothing yet", "dim"))]
    for name, lines in (("saved", saved), ("evaluated", evaluated)):
        rows += [(name if number == 0 else "", text) for number, text in enumerate(lines)]
    return _grid([11, None], [[Text(name, "bold"), text] for name, text in [*rows, ("goodput", _time_spent(view))]])


def _shares(amounts: dict[str, float]) -> Text:
    """Parts of a whole, the largest first."""
    total = sum(amounts.values())
    text = _line()
    for name, amount in sorted(amounts.items(), key=lambda part: -part[1]):
        if amount >= 0.0005 * total > 0:
            text.append(f"  {name} ", "dim").append(f"{amount / total:.1%}")
    return text


def _step_parts(view: RunView) -> Text:
    """Shares of the parts of a step in its time, over the last steps."""
    seconds = _recent(view, "iteration")
    if not len(seconds):
        return _line(("-", "dim"))
    means = {name: max(0.0, float(_recent(view, column).mean())) for column, name in _PARTS.items()}
    return _line(
        (human_time(float(seconds.mean())), "bold"), (f" mean of the last {len(seconds)} steps", "dim"), _shares(means)
    )


def _heldout(line: Line | None) -> Text:
    """The held-out loss by source: last value, change."""
    text, step = _line(), math.nan
    for name, column in {} if line is None else line.columns.items():
        measured = np.flatnonzero(np.isfinite(column) & name.startswith("heldout/"))
        if line is None or not len(measured):
            continue
        values, step = column[measured], float(line.columns["step"][measured[-1]])
        text.append(f"{one_line(name.partition('/')[2])} ", "dim").append(short(float(values[-1]), 5), "bold")
        if len(values) > 1:
            text.append(f" {values[-1] - values[-2]:+.4f}", "dim")
        text.append("  ")
    return text.append(f"at step {step:_.0f}", "dim") if text else _line(("not measured yet", "dim"))


def _checkpoint(row: Row) -> Text:
    mark, word, ink = _CHECKPOINT[row.state]
    ago = f" {human_time(age(row.committed))} ago" if row.committed and not row.problem else ""
    return _line((mark, ink), f" {row.step:_} ", (word, ink), (ago, "dim"))


def _evaluation(entry: dict[str, Any]) -> Text:
    """The scores of a step, with their standard errors."""
    text = _line((f"{entry['step']:_}", "dim"))
    for task, row in entry["scores"].items():
        told = f"{one_line(task)} "  # once
        for name, value in row.items() if isinstance(row, dict) else ():
            if "stderr" not in name and (value is None or isinstance(value, int | float)):
                error = row.get(f"{name}_stderr")
                spread = f"±{short(error, 2)}" if isinstance(error, int | float) else ""
                text.append(f"  {told}{one_line(name)} ", "dim")
                told = ""
                text.append("nan" if value is None else short(value) + spread, "bold")
    return text


def _time_spent(view: RunView) -> Text:
    """Goodput, and where the time went."""
    account = None if view.record is None else view.record.account
    if account is None:
        return _line(("-", "dim"))
    stops = len(account.incidents)
    head = f"{account.goodput:.1%} of {human_time(account.wall_seconds)}, {counted(stops, 'interruption')}"
    return _line((head, "bold"), _shares({str(state): account.states[state] for state in State}))


# ---------------------------------------------------------------------- alarms and the journal


def _alarms(view: RunView) -> Table:
    """Open alarms: unacknowledged first, then by severity, then the newest first."""
    rows: list[list[RenderableType]] = []
    newest = sorted(view.report.alarms, key=lambda alarm: alarm.opened, reverse=True)
    for alarm in sorted(newest, key=lambda alarm: (alarm.state != "open", -alarm.severity)):
        acknowledged = alarm.state == "acknowledged"
        name = Text(f"{alarm.severity.name} {alarm.key}", "dim" if acknowledged else _SEVERITY[alarm.severity])
        facts = Text(f" ({human_time(age(alarm.opened))}{', acknowledged' if acknowledged else ''}) ", "dim")
        head = Text("" if rows else f"alarms {len(newest)}", "bold")
        rows.append([head, name + facts + one_line(alarm.summary)])
    return _grid([11, None], rows or [[Text("alarms", "bold"), Text("none is open", "green")]])


def _journal(view: RunView) -> Group:
    """The last journal entries, the newest first."""
    today, lines = f"{datetime.now(UTC):%Y-%m-%d}", []
    entries = [] if view.record is None else view.record.entries[-_ENTRIES:]
    for entry in reversed(entries):
        when = entry["time"][11:19] if entry["time"][:10] == today else entry["time"][5:19].replace("T", " ")
        step = f" @{entry['step']:_}" if isinstance(entry.get("step"), int) else ""
        kind = (entry["kind"], _TONE[tone(entry["kind"], entry.get("code"))])
        lines.append(_line((f"{when} ", "dim"), kind, (step, "dim"), f" {one_line(str(entry['text']))}"))
    return Group(*lines)
