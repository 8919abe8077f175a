"""The parts of a run's page, as lines of styled text no wider than asked."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any

import numpy as np
from rich.text import Text

from fsdp_pretrain.record.console_line import tone
from fsdp_pretrain.record.files import age
from fsdp_pretrain.record.goodput import State
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_bytes, human_count, human_time
from fsdp_pretrain.watchdog.notify.alarms import Alarm
from fsdp_pretrain.watchdog.status import ALERT, OK, WARN

from .charts import FILLS, cells, curve, sparkline
from .following import RunView

LEVEL = {OK: "bold black on green", WARN: "bold black on yellow", ALERT: "bold white on red"}
INK = {OK: "green", WARN: "yellow", ALERT: "bold red"}
_SEVERITY = {Severity.INFO: "cyan", Severity.WARN: "yellow", Severity.CRIT: "bold red"}
_TONE = {"good": "green", "warning": "yellow", "bad": "bold red", "": "cyan"}
_LABEL, _AXIS, _RECENT = 11, 8, 200
_PARTS = (
    ("forward_backward", "fwd+bwd", "green"),
    ("optimizer", "optimizer", "blue"),
    ("data", "data", "yellow"),
    ("checkpoint", "checkpoint", "magenta"),
    ("heldout", "held-out", "cyan"),
    ("other", "other", "white"),
)
_LOGARITHMIC = ("loss", "grad_norm")
_TIME = (
    ("steps", (State.STEP_KEPT,), "green"),
    ("slow", (State.STEP_SLOW, State.STEP_SKIPPED, State.WARMUP), "yellow"),
    ("data", (State.DATA_WAIT,), "blue"),
    ("saves", (State.CKPT_BLOCK, State.HELDOUT), "magenta"),
    ("paused", (State.PAUSED,), "white"),
    ("start and recovery", (State.LAUNCH, State.LOAD, State.DETECT, State.TEARDOWN), "cyan"),
    ("lost, idle, queued", (State.LOST, State.IDLE_UNKNOWN, State.QUEUED), "red"),
)


def label(name: str, text: Text | str) -> Text:
    """A line with a name in front."""
    return Text.assemble((f"{name:{_LABEL}}", "bold"), text)


def one_line(text: str) -> str:
    """The text without line breaks and control characters."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())


def short(value: float, digits: int = 4) -> str:
    """A number in about `digits` significant digits; `-` if it is not finite."""
    return f"{value:.{digits}g}" if math.isfinite(value) else "-"


def title(view: RunView, width: int) -> Text:
    """Name, state, start and host; the time on the right."""
    status, level = view.status, ALERT if view.problem else view.report.level
    known = status.run != "?"
    words = "no answer" if view.problem else view.report.headline
    text = Text.assemble(
        (status.run if known else str(view.path), "bold"), " ", (f" {words.upper()} ", LEVEL[level]), " "
    )
    world = view.table.last.world if view.table.last is not None else None
    facts = [
        f"start {status.segment}" if status.segment is not None else "",
        f"{world} ranks" if world else "",
        f"on {status.host}" if status.host else "",
    ]
    text.append("  ".join(filter(None, facts)), "dim")
    clock = f"{datetime.now(UTC):%d %b %H:%M:%S} UTC"
    if text.cell_len + len(clock) + 1 < width:
        text.append(" " * (width - text.cell_len - len(clock)))
        text.append(clock, "dim")
    return text


def progress(view: RunView, width: int) -> Text:
    """A bar of the steps, and when the run will be complete."""
    status, report = view.status, view.report
    if not status.step:
        silent = report.heartbeat_age_seconds
        first = "the first step" + (f" of {status.total_steps:_}" if status.total_steps else "")
        if silent is None:
            return Text(f"no job has reported yet: waiting for {first}", "yellow")
        if not report.running:
            return Text(f"ended before {first}", INK[ALERT])
        return Text(f"waiting for {first}, started {human_time(age(status.started))} ago", "yellow")
    total = status.total_steps or status.step
    ended = f" of {total:_}  {status.step / total:.1%}"
    if report.running and (pace := mean_pace(view)) and status.step < total:
        left = (total - status.step) * pace
        done = datetime.fromtimestamp(time.time() + left, UTC)
        ended += f"  ETA {human_time(left)}" + (f" ({done:%a %d %b %H:%M})" if width >= 100 else "")
    words = f"  {status.step:_}{ended}"
    room = max(4, width - len(words))
    full = min(room, round(status.step / total * room))
    return Text.assemble(("█" * full, INK[report.level]), ("─" * (room - full), "dim"), words)


def mean_pace(view: RunView) -> float:
    """Seconds a step, saves and held-out losses included, over the last steps; 0 if there are none."""
    seconds = view.table.recent(_RECENT)["iteration"]
    return float(seconds.mean()) if len(seconds) else 0.0


def numbers(view: RunView, width: int) -> Text:
    """The values of the last step; those that do not fit are left out."""
    last = view.table.last
    if last is None:
        return Text("")
    norm = "overflow" if last.overflow else short(last.grad_norm if last.grad_norm is not None else math.nan, 3)
    parts = [
        ("loss", f"{last.loss.mean:.4f}", "bold" if last.is_finite else "bold red"),
        ("gnorm", norm, "" if last.is_finite else "bold red"),
        ("lr", f"{last.lr:.2e}", ""),
        ("step", human_time(last.seconds.training), ""),
        ("tok/s", human_count(last.tokens_per_second), ""),
        *([("mfu", f"{last.mfu:.1%}", "")] if last.mfu is not None else []),
        ("tokens", human_count(last.tokens), ""),
        ("batch", f"{last.batch:_}", ""),
        *([("mem", human_bytes(last.memory_bytes), "")] if last.memory_bytes else []),
        *([("scale", f"{last.loss_scale:g}", "")] if last.loss_scale is not None else []),
    ]
    text = Text()
    for name, value, ink in parts:
        part = Text.assemble((f"{name} ", "dim"), (value, ink), "  ")
        if text.cell_len + part.cell_len > width + 2:
            break
        text.append_text(part)
    return text


def troubles(view: RunView, most: int) -> list[Text]:
    """What is wrong, except for alarms: at most `most` lines, worst first."""
    names = {WARN: "WARN ", ALERT: "ALERT"}
    found = ([(ALERT, view.problem)] if view.problem else []) + view.problems
    lines = [Text.assemble((names[level], LEVEL[level]), " ", (one_line(text), INK[level])) for level, text in found]
    if len(lines) > most:
        lines[most - 1].append(f"  (and {len(lines) - most} more: fsdp-pretrain status)", "dim")
    return lines[:most]


def chart(view: RunView, column: str, name: str, ink: str, size: tuple[int, int], shown: int | None) -> list[Text]:
    """A titled curve of the kept line, `size` being width and height with the title; `shown` steps of it, None: all."""
    width, height = size
    steps, values = view.table.kept("step", column)
    if shown is not None:
        steps, values = steps[-shown:], values[-shown:]
    if not len(steps):
        unread = view.table.unread
        return [Text(f"{name}: {'reading the record' if unread else 'no step yet'}", "dim"), *[Text()] * (height - 1)]
    span = (float(steps[0]), float(steps[-1]))
    drawn = curve(steps, values, width - _AXIS, height - 1, span, logarithmic=column in _LOGARITHMIC)
    missing = int((~np.isfinite(values)).sum())
    head = Text.assemble((name, f"bold {ink}"), f" {_tick(float(values[-1]), 4)}")
    if drawn is None:
        return [head.append("  no finite value", "bold red"), *[Text()] * (height - 1)]
    last = view.table.last
    if last is not None and column == "loss" and missing:
        head.append(f"  {missing:_} not finite", "bold red")
    if drawn.logarithmic:
        head.append("  log", "dim")
    rows = []
    for number, row in enumerate(drawn.rows):
        edge = drawn.high if number == 0 else drawn.low if number == len(drawn.rows) - 1 else None
        mark = f"{_tick(edge):>{_AXIS - 2}} ┤" if edge is not None else f"{'':{_AXIS - 2}} │"
        rows.append(Text.assemble((mark, "dim"), (row, ink)))
    return [head, *rows]


def _tick(value: float, digits: int = 3) -> str:
    return human_count(value) if abs(value) >= 1000 else short(value, digits)


def axis(view: RunView, width: int, shown: int | None) -> Text:
    """The steps under the curves; a tick where a start began."""
    (steps,) = view.table.kept("step")
    steps = steps[-shown:] if shown is not None else steps
    if not len(steps):
        return Text()
    first, last = int(steps[0]), int(steps[-1])
    room = width - _AXIS
    line = ["─"] * room
    for start in view.table.starts():
        if first <= start <= last:
            line[min(room - 1, int((start - first) / max(1, last - first) * room))] = "┬"
    ends = (f"{first:_} ", f" {last:_}")
    drawn = "".join(line)[len(ends[0]) : room - len(ends[1])]
    return Text(f"{'steps':>{_AXIS - 2}} └{ends[0]}{drawn}{ends[1]}", "dim")


def bar(parts: Iterable[tuple[str, float, str]], width: int) -> Text:
    """A stacked bar and the shares of its parts, as far as they fit; parts are names, amounts and colours."""
    known = [each for each in parts if each[1] > 0]
    total = sum(amount for _, amount, _ in known)
    text = Text()
    if not known:
        return text
    fills = dict(zip([name for name, _, _ in known], FILLS, strict=False))
    room = max(8, min(width // 3, 48))
    for (name, _, ink), count in zip(known, cells([amount for _, amount, _ in known], room), strict=True):
        text.append(fills[name] * count, ink)
    for name, amount, ink in sorted(known, key=lambda each: -each[1]):
        part = Text.assemble(" ", (fills[name], ink), f"{name} ", (f"{amount / total:.1%}", "bold"))
        if text.cell_len + part.cell_len > width or amount < 0.0005 * total:
            break
        text.append_text(part)
    return text


def step_parts(view: RunView, width: int) -> Text:
    """Where the time of a step goes, over the last steps."""
    recent = view.table.recent(_RECENT)
    if not len(recent["step"]):
        return label("step", Text("-", "dim"))
    means = {name: max(0.0, float(recent[name].mean())) for name, _, _ in _PARTS}
    seconds = f"{human_time(float(recent['iteration'].mean()))} "
    shown = bar(((name, means[key], ink) for key, name, ink in _PARTS), width - _LABEL - len(seconds))
    return label("step", Text.assemble(seconds, shown))


def heldout(view: RunView, width: int) -> Text:
    """The held-out loss by source: last value, change, course."""
    found = view.table.heldout()
    if not found:
        return label("held-out", Text("not measured yet", "dim"))
    text = Text()
    room = max(6, min(24, (width - _LABEL) // max(1, len(found[-1].means)) - 30))
    for name, mean in found[-1].means.items():
        course = np.array([each.means.get(name, math.nan) for each in found])
        part = Text.assemble((f"{name} ", "dim"), (short(mean, 5), "bold"))
        if len(course) > 1 and math.isfinite(course[-2]):
            part.append(f" {mean - course[-2]:+.4f}", "dim")
        part.append(f" {sparkline(course, room)}", "cyan").append("  ")
        if text.cell_len + part.cell_len + 14 > width - _LABEL and text.cell_len:
            break
        text.append_text(part)
    return label("held-out", text.append(f"at step {found[-1].step:_}", "dim"))


def checkpoints(view: RunView, width: int, most: int) -> list[Text]:
    """The last checkpoints, newest first: one line, or one for each of `most`."""
    inks = {"verified": "green", "written": "yellow", "damaged": "bold red"}
    marks = {"verified": "✓", "written": "·", "damaged": "✗"}
    saving = Text("saving now  ", "yellow") if view.status.state == "saving" else Text()
    parts = []
    for found in reversed(view.checkpoints):
        part = Text.assemble(
            (marks[found.state], inks[found.state]), f" {found.step:_} ", (found.state, inks[found.state])
        )
        if math.isfinite(found.age_seconds):
            part.append(f" {human_time(found.age_seconds)} ago", "dim")
        parts.append(part.append(" pinned", "dim") if found.pinned else part)
    if not parts:
        return [label("saved", saving.append("no checkpoint yet", "dim"))]
    if most > 1:
        shown = [Text.assemble(saving, parts[0]), *parts[1:most]]
        return [label("saved" if number == 0 else "", part) for number, part in enumerate(shown)]
    line = Text.assemble(saving, parts[0])
    for part in parts[1:]:
        if line.cell_len + part.cell_len + 2 > width - _LABEL:
            break
        line.append("  ").append_text(part)
    return [label("saved", line)]


def evaluations(view: RunView, most: int) -> list[Text]:
    """The evaluations of the last steps, newest step first: of each task the first score, then the others."""
    lines: list[Text] = []
    for entry in sorted(view.evaluations, key=lambda entry: -int(entry["step"]))[:most]:
        tasks = {task: _scores(row) for task, row in entry["scores"].items() if isinstance(row, dict)}
        text = Text(f"{entry['step']:_}", "dim")
        for task, scores in tasks.items():
            for name, value in list(scores.items())[:1]:
                text.append(f"  {task} {name} ", "dim").append(value, "bold")
        for task, scores in tasks.items():
            for name, value in list(scores.items())[1:]:
                text.append(f"  {task} {name} ", "dim").append(value)
        lines.append(label("" if lines else "evaluated", text))
    return lines or [label("evaluated", Text("nothing yet", "dim"))]


def _scores(row: dict[str, Any]) -> dict[str, str]:
    """The scores of a task as text, with their standard errors."""
    found = {}
    for name, value in row.items():
        if "stderr" not in name and value is None:
            found[name] = "nan"
        elif "stderr" not in name and isinstance(value, int | float):
            error = row.get(f"{name} stderr", row.get(f"{name}_stderr"))
            found[name] = short(value) + (f"±{short(error, 2)}" if isinstance(error, int | float) else "")
    return found


def time_spent(view: RunView, width: int) -> Text:
    """Goodput, and where the other time went."""
    account = view.account
    if account is None:
        unread = f"reading the record, {human_bytes(view.table.unread)} left" if view.table.unread else "-"
        return label("goodput", Text(unread, "dim"))
    stops = len(account.incidents)
    head = f"{account.goodput:.1%} of {human_time(account.wall_seconds)}, {stops} interruption{'s' * (stops != 1)} "
    parts = ((name, sum(account.states[state] for state in states), ink) for name, states, ink in _TIME)
    return label("goodput", Text.assemble((head, "bold"), bar(parts, width - _LABEL - len(head))))


def alarms(found: list[Alarm], selected: int, width: int, most: int) -> list[Text]:
    """Open alarms, at most `most` lines; the selected one is marked, and has a second line if it needs it."""
    if not found:
        return [label("alarms", Text("none is open", "green"))]
    first = max(0, min(selected - most + 1, len(found) - most))
    lines: list[Text] = []
    for number, alarm in enumerate(found[first : first + most], first):
        known = alarm.state == "acknowledged"
        name = (f"{alarm.severity.name} {alarm.key}", "dim" if known else _SEVERITY[alarm.severity])
        mark = "▸ " if number == selected else "  "
        facts = f" ({human_time(age(alarm.opened))}{', acknowledged' if known else ''})"
        text = Text.assemble(mark, name, (facts, "dim"), f" {one_line(alarm.summary)}")
        line = label(f"alarms {len(found)}" if number == first else "", text)
        more = number == max(0, selected) and line.cell_len > width and len(found) < most
        lines += _broken(line, width) if more else [line]
    return lines


def _broken(line: Text, width: int) -> list[Text]:
    """A line as two, the second indented."""
    place = line.plain.rfind(" ", 0, width + 1)
    return [line[:place], Text(" " * (_LABEL + 4)).append_text(line[place + 1 :])]


def chronicle(entries: list[dict[str, Any]], most: int) -> list[Text]:
    """The last journal entries, oldest first."""
    lines = []
    for entry in entries[-most:] if most > 0 else []:
        day = "" if entry["time"][:10] == f"{datetime.now(UTC):%Y-%m-%d}" else f"{entry['time'][5:10]} "
        step = f" @{entry['step']:_}" if isinstance(entry.get("step"), int) else ""
        ink = _TONE[tone(entry["kind"], entry.get("code"))]
        text = one_line(str(entry["text"]))
        lines.append(
            Text.assemble((f"{day}{entry['time'][11:19]} ", "dim"), (entry["kind"], ink), (step, "dim"), f" {text}")
        )
    return lines


def beside(left: list[Text], right: list[Text], width: int, gap: int = 2) -> list[Text]:
    """Two blocks side by side, the left one `width` wide."""
    lines = []
    for one, other in zip_longest(left, right, fillvalue=Text()):
        line = one.copy()
        line.truncate(width, overflow="ellipsis", pad=True)
        lines.append(line.append(" " * gap).append_text(other))
    return lines
