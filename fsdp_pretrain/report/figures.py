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
_LAYERS = {
    "steps": "--s-steps", "data": "--s-data", "saves": "--s-saves", "held-out loss": "--s-heldout",
    "paused": "--s-paused", "lost, stopped and started": "--s-lost",
}  # fmt: skip
"""Layers of the goodput panel from the bottom up, with their colours."""
_TEXT = "%{text}<extra></extra>"
_Trace = dict[str, Any]


@dataclass
class Figure:
    """One figure.

    Attributes:
        traces: of plotly.js. `place` is the index of its positions, of which `rows`, if given, are the trace's; `low`
            and `high` are the extremes around its values.
        axis: its y axis.
        unified: the values of all its lines at the cursor are shown, and the events are marked in it.
        scores: it is of an evaluation.
    """

    title: str
    about: str = ""
    height: int = 220
    axis: dict[str, Any] = field(default_factory=dict)
    traces: list[_Trace] = field(default_factory=list)
    unified: bool = False
    scores: bool = False


class Drawing:
    """All figures of a page.

    Attributes:
        places: positions on every clock, [points] by clock, and the index of their run; those of kept lines first.
        events: the places of the events of each run.
        marks: traces that are in every panel: lines at events.
    """

    def __init__(self, records: list[RunRecord]) -> None:
        self.records, self.several = records, len(records) > 1
        self.places: list[dict[str, Any]] = []
        self.figures: list[Figure] = []
        self.marks: list[_Trace] = []
        self.events: list[int] = []
        panels = lay_out(name for record in records for name in record.lines.kept.columns)
        columns = list(dict.fromkeys(trace.column for panel in panels for trace in panel.traces))
        curves = [record.curves(columns, len(records)) for record in records]
        for part in (0, 1):
            for number, pair in enumerate(curves):
                self._place(number, pair[part].clocks, whole=True)
        self._draw_events()
        for panel in panels:
            if not panel.brief or self._changes(panel):
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
        figure = Figure(panel.title, panel.about, axis=_UNITS[panel.unit] | axis, unified=True)
        for run, (kept, left) in enumerate(curves):
            for number, trace in enumerate(panel.traces):
                hidden = self.several and number > 0 and not trace.dots
                common = {"legendgroup": f"{run} {number}", "visible": "legendonly" if hidden else True}
                common |= {"mode": "lines", "hovertemplate": "%{y}"}
                if trace.column in kept.mean:
                    drawn = self._curve(panel, trace, run, self._color(run, number), kept)
                    figure.traces.append(common | {"place": run, "showlegend": True} | drawn)
                if trace.column in left.mean and not trace.dots and (panel.name != "seconds" or not number):
                    drawn = self._left(panel, trace, run, self._color(run, number), left)
                    figure.traces.append(common | {"place": len(self.records) + run} | drawn)
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

    def _changes(self, panel: Panel) -> bool:
        """Whether a value of a panel ever changes."""
        for record in self.records:
            for trace in panel.traces:
                values = record.lines.kept.columns.get(trace.column, np.zeros(0))
                if len(np.unique(values[np.isfinite(values)])) > 1:
                    return True
        return False

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
                    found |= {"name": _text(f"{name} {len(mine)}"), "showlegend": True, "mode": "markers"}
                    found |= {"marker": {"color": color, "symbol": symbol, "size": size, "line": {"color": color}}}
                    texts = [_told(name, save.at, save.text) for save in mine]
                    figure.traces.append(found | {"text": texts, "hovertemplate": _TEXT})
        if figure.traces:
            self.figures.append(figure)

    # ------------------------------------------------------------------ goodput and evaluations

    def _draw_goodput(self, run: int) -> None:
        """The share of what the run did in the time from some kept step to a later one."""
        record = self.records[run]
        kept = record.lines.kept.columns
        title = f"Goodput of {record.name}" if self.several else "Goodput"
        figure = Figure(title, f"{record.account.goodput:.1%} in all", 140, _UNITS["share"] | {"range": [0, 1]})
        figure.unified = True
        last = len(kept["step"]) - 1
        if last < 1:
            return
        rows = np.unique(np.linspace(0, last, _BINS + 1).astype(np.int64))
        place = self._place(run, {clock: kept[clock][rows] for clock in CLOCKS}, whole=True)
        waits = {"data": "data", "saves": "checkpoint", "held-out loss": "heldout", "paused": "paused"}
        spent = {name: np.add.reduceat(kept[column][1:], rows[:-1]) for name, column in waits.items()}
        busy = np.add.reduceat(kept["iteration"][1:], rows[:-1])
        spent["steps"] = busy - spent["data"] - spent["saves"] - spent["held-out loss"]
        passed = np.maximum(np.diff(kept["written"][rows]), busy + spent["paused"])
        spent["lost, stopped and started"] = passed - busy - spent["paused"]
        for name, color in _LAYERS.items():
            share = spent[name] / np.maximum(passed, 1e-9)
            if share.any():
                layer = {"name": name, "place": place, "y": np.append(share, share[-1]), "mode": "lines"}
                layer |= {"line": {"width": 0, "shape": "hv", "color": color}, "fillcolor": color}
                figure.traces.append(layer | {"stackgroup": "s", "hovertemplate": "%{y}", "showlegend": True})
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
