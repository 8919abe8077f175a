"""The figures of a page, as plotly.js takes them, except for what depends on the reader's choices.

`report.js` puts the chosen clock's positions (of `place`) into every trace, and colours of the theme for `--NAME`.
Texts of the record are untrusted, and plotly.js knows some tags, so every text goes through `_text`.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdp_pretrain.record.files import stamp
from fsdp_pretrain.record.goodput import State
from fsdp_pretrain.record.lines import CLOCKS, Position
from fsdp_pretrain.record.step_columns import Column

from .curves import Curve
from .evaluations import ScorePoint
from .events import GROUPS, Event, Mark
from .gather import RunRecord
from .panels import Panel, Trace, lay_out
from .saves import read_saves

_BINS = 600
"""Intervals of the goodput panel."""
_UNITS: dict[str, dict[str, Any]] = {
    "": {"hoverformat": ".5~g", "exponentformat": "e"},
    "count": {"hoverformat": ",.5~r", "exponentformat": "B"},
    "s": {"tickformat": "~s", "hoverformat": ".3~s", "ticksuffix": "s"},
    "GiB": {"hoverformat": ".4~g", "ticksuffix": " GiB", "exponentformat": "none"},
    "share": {"tickformat": ".3~p", "hoverformat": ".3~p"},
}
"""Of a y axis."""
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SEVERITIES = (("--info", "circle"), ("--warn", "triangle-up"), ("--crit", "diamond"))
_SAVES = {
    "verified": ("verified", "--ok", "circle"),
    "written": ("written, not verified", "--info", "circle-open"),
    "deleted": ("deleted later, as configured", "--c6", "circle"),
    "left": ("left behind", "--c6", "x-thin-open"),
    "damaged": ("damaged", "--crit", "triangle-up"),
    "lost": ("lost", "--crit", "x-thin-open"),
    "failed": ("failed", "--crit", "triangle-down"),
}
_STATES: dict[str, tuple[str, tuple[State, ...]]] = {
    "kept": ("useful steps", (State.STEP_KEPT,)),
    "slow": ("slower than usual", (State.STEP_SLOW, State.WARMUP)),
    "data": ("waiting for data", (State.DATA_WAIT,)),
    "save": ("waiting for saves", (State.CKPT_BLOCK,)),
    "heldout": ("held-out loss", (State.HELDOUT,)),
    "skipped": ("skipped steps", (State.STEP_SKIPPED,)),
    "lost": ("lost steps", (State.LOST,)),
    "restart": ("ending and starting", (State.DETECT, State.TEARDOWN, State.LAUNCH, State.LOAD)),
    "queue": ("queue", (State.QUEUED,)),
    "paused": ("paused", (State.PAUSED,)),
    "unknown": ("unexplained", (State.IDLE_UNKNOWN,)),
}
"""Layers of the goodput panel from the bottom up, by colour."""
COLORS = {state: f"--s-{color}" for color, (_, states) in _STATES.items() for state in states}
"""Of every state of the account."""
_TEXT = "%{text}<extra></extra>"
_Trace = dict[str, Any]


@dataclass
class Figure:
    """One figure.

    Attributes:
        traces: of plotly.js. `place` is the index of its positions, of which `rows`, if given, are the trace's; `low`
            and `high` are the extremes around its values; `key`: it can be hidden; `hidden`: it is at first.
        axis: its y axis.
        fit: its y axis may be logarithmic, and show everything or all but the extremes.
        scores: it is of an evaluation.
    """

    title: str
    about: str = ""
    height: int = 200
    axis: dict[str, Any] = field(default_factory=dict)
    traces: list[_Trace] = field(default_factory=list)
    fit: bool = False
    scores: bool = False


class Drawing:
    """All figures of a page.

    Attributes:
        places: positions on every clock, [points] by clock, and the index of their run; those of kept lines first.
        events: the places of the events of each run.
        marks: traces that are in every panel: lines at events.
        constants: panels in which nothing changes, in words.
    """

    def __init__(self, records: list[RunRecord]) -> None:
        self.records, self.several = records, len(records) > 1
        self.places: list[dict[str, Any]] = []
        self.figures: list[Figure] = []
        self.marks: list[_Trace] = []
        self.events: list[int] = []
        self.constants: list[str] = []
        panels = lay_out(name for record in records for name in record.lines.kept.columns)
        columns = list(dict.fromkeys(trace.column for panel in panels for trace in panel.traces))
        curves = [record.curves(columns, len(records)) for record in records]
        for part in (0, 1):
            for number, pair in enumerate(curves):
                self._place(number, pair[part].clocks, whole=True)
        self._draw_events()
        for panel in panels:
            if panel.brief and (text := self._constant(panel)) is not None:
                self.constants += [text] if text else []
            else:
                self._draw_panel(panel, curves)
            if panel.name == "seconds":
                for number in range(len(records)):
                    self._draw_goodput(number)
        self._draw_saves()
        self._draw_scores()

    def _place(self, run: int, clocks: dict[str, Column], whole: bool = False) -> int:
        """Add positions of a run, of the `whole` run or only of some events; their index."""
        known = {clock: np.round(column, 3).tolist() for clock, column in clocks.items()}
        self.places.append({"run": run, "whole": whole, **known})
        return len(self.places) - 1

    def _locate(self, run: int, positions: list[Position]) -> int:
        return self._place(run, {clock: np.array([each[clock] for each in positions]) for clock in CLOCKS})

    def _color(self, run: int, trace: int = 0) -> str:
        return f"--c{(run if self.several else trace) % 8}"

    def _of(self, run: int) -> str:
        return f"{self.records[run].name}: " if self.several else ""

    # ------------------------------------------------------------------ curves

    def _draw_panel(self, panel: Panel, curves: list[tuple[Curve, Curve]]) -> None:
        axis = {"type": "log"} if panel.scale == "log" else {"rangemode": "tozero"}
        figure = Figure(panel.title, panel.about, axis=_UNITS[panel.unit] | axis, fit=True)
        for run, pair in enumerate(curves):
            for number, trace in enumerate(panel.traces):
                left_too = not (trace.dots or (panel.name == "seconds" and number))
                for part, curve in enumerate(pair[: 1 + left_too]):
                    if trace.column in curve.mean:
                        common = {
                            "key": f"{run} {number}",
                            "place": part * len(self.records) + run,
                            "hidden": self.several and number > 0 and not trace.dots,
                            "mode": "lines",
                            "hovertemplate": "%{y}",
                        }
                        color = self._color(run, number)
                        draw = self._left if part else self._curve
                        more = draw(panel, trace, run, color, curve)
                        figure.traces.append(common | more)
        if figure.traces:
            self.figures.append(figure)

    def _curve(self, panel: Panel, trace: Trace, run: int, color: str, kept: Curve) -> _Trace:
        """A column of a kept line."""
        name, column = trace.label, trace.column
        dash = "dash" if trace.dots else "solid"
        if self.several:
            name = f"{self.records[run].name} {name}" if len(panel.traces) > 1 else self.records[run].name
            dash = dash if trace.dots else _DASHES[panel.traces.index(trace) % len(_DASHES)]
        found: _Trace = {"name": _text(name), "y": _scaled(kept.mean[column], panel)}
        found["line"] = {"color": color, "width": 1.5, "dash": dash}
        if trace.dots:
            return found | {"mode": "lines+markers", "connectgaps": True, "marker": {"size": 4}}
        if column in kept.low:
            axis = _UNITS[panel.unit]
            low, high = (f"%{{customdata[{at}]:{axis['hoverformat']}}}{axis.get('ticksuffix', '')}" for at in (0, 1))
            found["hovertemplate"] = f"%{{y}} ({low} to {high})"
            found |= {"low": _scaled(kept.low[column], panel), "high": _scaled(kept.high[column], panel)}
        return found

    def _left(self, panel: Panel, trace: Trace, run: int, color: str, left: Curve) -> _Trace:
        """A column of what was left behind."""
        values, name = (
            left.high.get(trace.column, left.mean[trace.column]),
            f"{self._of(run)}{trace.label}, left behind",
        )
        line = {"color": color, "width": 1, "dash": "dash"}
        return {"name": _text(name), "y": _scaled(values, panel), "line": line, "opacity": 0.6}

    def _constant(self, panel: Panel) -> str | None:
        """A panel in which no value ever changes, in words; None if one does."""
        texts = []
        for record in self.records:
            for trace in panel.traces:
                lines = [line.columns.get(trace.column) for line in (record.lines.kept, record.lines.left)]
                values = np.unique(np.concatenate([np.zeros(0), *(line for line in lines if line is not None)]))
                values = values[np.isfinite(values)]
                if len(values) > 1:
                    return None
                texts += [f"{value:,.6g} {trace.label}" for value in values]
        return f"{panel.title.lower()} {', '.join(dict.fromkeys(texts))}" if texts else ""

    # ------------------------------------------------------------------ events and checkpoints

    def _draw_events(self) -> None:
        """The rows above the curves, and lines through all panels."""
        every = [event for record in self.records for event in record.events[0] if event.mark]
        rows = [group for group in GROUPS if any(event.group == group for event in every)]
        counts = ", ".join(f"{row} {sum(event.group == row for event in every):,}" for row in rows)
        axis = {"type": "category", "categoryarray": rows[::-1], "dtick": 1, "range": [-0.5, len(rows) - 0.5]}
        figure = Figure("Events", counts, len(rows) * 22 + 36, axis | {"showgrid": False, "ticklabelstandoff": 6})
        faint = min(0.8, max(0.3, 12 / (len(every) or 1)))  # where there are many lines
        for run, record in enumerate(self.records):
            events, end = record.events[0], record.lines.locate(None, record.account.end)
            place = self._locate(run, [*(each.at for each in events), *(each.until or end for each in events)])
            self.events.append(place)
            starts = [at for at, event in enumerate(events) if event.mark is Mark.STRIP and event.group == "starts"]
            self._mark(run, starts, {"color": "--faint", "width": 1})
            for severity, (color, symbol) in enumerate(_SEVERITIES):
                mine = [at for at, event in enumerate(events) if event.severity == severity and event.group in rows]
                strip = [at for at in mine if events[at].mark]
                spans = [at for at in strip if events[at].until or events[at].open]
                found = _segments(place, [(at, at + len(events)) for at in spans])
                found |= {"y": [group for at in spans for group in (events[at].group, events[at].group, None)]}
                figure.traces.append(
                    found | {"line": {"color": color, "width": 3}, "opacity": 0.45, "hoverinfo": "skip"}
                )
                points = {"place": place, "rows": strip, "y": [events[at].group for at in strip], "mode": "markers"}
                points |= {"marker": {"color": color, "symbol": symbol, "size": 10}, "cliponaxis": False}
                texts = [_told(f"{self._of(run)}{events[at].kind}", events[at].at, events[at].text) for at in strip]
                figure.traces.append(points | {"text": texts, "hovertemplate": _TEXT})
                lines = [at for at in mine if events[at].mark is Mark.LINE]
                self._mark(run, lines, {"color": color, "width": 1, "dash": "4px,3px"}, faint)
        if rows:
            self.figures.append(figure)

    def _mark(self, run: int, rows: list[int], line: dict[str, Any], opacity: float = 1.0) -> None:
        """Lines through all panels, at these events of a run."""
        events: list[Event] = [self.records[run].events[0][at] for at in rows]
        told = [f"{self._of(run)}{event.kind}, {_place(event.at)}: {event.text}" for event in events]
        found = _segments(self.events[run], [(at, at) for at in rows])
        found |= {"y": [0, 1, None] * len(rows), "yaxis": "y2", "line": line, "opacity": opacity}
        found |= {"told": [x for text in told for x in (text, text, "")], "hovertemplate": f"<b>{_TEXT}</b>"}
        self.marks.append(found | {"text": [x for event in events for x in (_text(event.kind),) * 3]})

    def _draw_saves(self) -> None:
        figure = Figure("Checkpoints", "seconds each took", 130, _UNITS["s"] | {"rangemode": "tozero"})
        for run, record in enumerate(self.records):
            saves = list(read_saves(record.run, record.entries, record.history.nodes, record.lines))
            for state, (label, color, symbol) in _SAVES.items():
                if mine := [save for save in saves if save.state == state]:
                    name, size = f"{self._of(run)}{label}", 4 if state == "deleted" else 9
                    found = {
                        "place": self._locate(run, [save.at for save in mine]),
                        "y": [save.seconds for save in mine],
                    }
                    found |= {"name": _text(f"{name} {len(mine)}"), "key": f"{run} {state}", "mode": "markers"}
                    found |= {"marker": {"color": color, "symbol": symbol, "size": size, "line": {"color": color}}}
                    texts = [_told(name, save.at, save.text) for save in mine]
                    figure.traces.append(found | {"text": texts, "hovertemplate": _TEXT})
        if figure.traces:
            self.figures.append(figure)

    # ------------------------------------------------------------------ goodput and evaluations

    def _draw_goodput(self, run: int) -> None:
        """The share of each state in the time from some kept step to a later one."""
        record = self.records[run]
        found, kept = record.account, record.lines.kept.columns
        title = f"Goodput of {record.name}" if self.several else "Goodput"
        figure = Figure(title, f"{found.goodput:.1%} in all", 140, _UNITS["share"] | {"range": [0, 1]})
        mine = np.flatnonzero(kept["written"] >= found.begin)
        if len(mine) > 1:
            rows = mine[np.unique(np.linspace(0, len(mine) - 1, _BINS + 1).astype(np.int64))]
            clocks = {clock: kept[clock][rows].copy() for clock in CLOCKS}
        else:
            clocks = {clock: np.full(2, math.nan) for clock in CLOCKS}
        edges = clocks["written"]
        edges[0], edges[-1] = found.begin, max(found.end, found.begin + 1.0, edges[-2])
        spent, place = record.timeline.between(edges), self._place(run, clocks, whole=True)
        total = np.maximum(sum(spent.values(), np.zeros(len(edges) - 1)), 1e-9)
        for color, (label, states) in _STATES.items():
            share = sum((spent[state] for state in states), np.zeros(len(edges) - 1)) / total
            if share.any():
                layer = {"name": label, "key": label, "place": place, "y": np.append(share, share[-1]), "mode": "lines"}
                layer |= {"line": {"width": 0, "shape": "hv", "color": f"--s-{color}"}, "fillcolor": f"--s-{color}"}
                figure.traces.append(layer | {"stackgroup": "states", "hovertemplate": "%{y}"})
        self.figures.append(figure)

    def _draw_scores(self) -> None:
        names = {name for record in self.records for name in record.evaluations.scores}
        for task, metric in sorted(names, key=lambda name: (name[0].endswith("_probe"), name)):
            about = [next(filter(None, (each.evaluations.better.get((task, metric)) for each in self.records)), "")]
            figure = Figure(f"{task} {metric}", height=160, axis=_UNITS[""], scores=True)
            for run, record in enumerate(self.records):
                scores = record.evaluations.scores.get((task, metric), [])
                kept = [score for score in scores if not score.left]
                figure.traces += [
                    self._scores(run, kept, False),
                    self._scores(run, [s for s in scores if s.left], True),
                ]
                if kept and not self.several:
                    about = [f"{kept[-1].value:.5g}", _interval(kept[-1]), *about]
            figure.about = ", ".join(filter(None, about))
            self.figures.append(figure)

    def _scores(self, run: int, scores: list[ScorePoint], left: bool) -> _Trace:
        """The scores of a metric, with whiskers."""
        color = self._color(run)
        up = [0.0 if score.high is None else score.high - score.value for score in scores]
        down = [0.0 if score.low is None else score.value - score.low for score in scores]
        bars = {"type": "data", "array": up, "arrayminus": down, "color": color, "thickness": 1, "width": 2}
        heads = [f"{self._of(run)}{score.value:.5g}" for score in scores]
        texts = [", ".join(filter(None, (_interval(score), "left behind" * left))) for score in scores]
        return {
            "place": self._locate(run, [score.at for score in scores]),
            "y": [score.value for score in scores],
            "mode": "markers" if left else "lines+markers",
            "line": {"color": color, "width": 1.3},
            "marker": {"color": color, "symbol": "circle-open" if left else "circle", "size": 6},
            "error_y": bars,
            "text": [_told(*each) for each in zip(heads, (score.at for score in scores), texts, strict=True)],
            "hovertemplate": _TEXT,
            "cliponaxis": False,
        }


def _interval(score: ScorePoint) -> str:
    interval = "" if score.low is None else f"95% {score.low:.4g} to {score.high:.4g}"
    return ", ".join(filter(None, (interval, f"{score.documents} documents" if score.documents else "")))


def _scaled(column: Column, panel: Panel) -> Column:
    column = column / 2**30 if panel.unit == "GiB" else column
    return np.where(column > 0, column, math.nan) if panel.scale == "log" else column


def _segments(place: int, pairs: Iterable[tuple[int, int]]) -> _Trace:
    """A trace of separate lines between pairs of rows."""
    return {"place": place, "rows": [row for pair in pairs for row in (*pair, None)], "mode": "lines"}


def _place(at: Position) -> str:
    step = f"step {at['step']:,.0f}, " if math.isfinite(at["step"]) else ""
    return step + (stamp(at["written"])[:19].replace("T", " ") if math.isfinite(at["written"]) else "")


def _told(head: str, at: Position, text: str) -> str:
    """A text to hover over."""
    return "<br>".join([f"<b>{_text(head)}</b> {_place(at)}", *map(_text, textwrap.wrap(text, 80))])


def _text(text: str) -> str:
    return html.escape(text, quote=False)
