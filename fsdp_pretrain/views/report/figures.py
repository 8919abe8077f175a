"""The figures of a page, as plotly.js takes them, except for what depends on the reader's choices.

`report.js` puts the chosen clock's positions (of `place`) into every trace, and colours of the theme for `--NAME`.
Texts of the record are untrusted, and plotly.js knows some tags, so every text goes through `_text`.
"""

from __future__ import annotations

import html
import math
import textwrap
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fsdp_pretrain.run.files import stamp
from fsdp_pretrain.run.journal import GROUPS, Mark
from fsdp_pretrain.run.lines import CLOCKS, Position
from fsdp_pretrain.run.step_columns import Column
from fsdp_pretrain.views.gather import RunRecord

from .curves import Curve, reduce_all
from .evaluations import ScorePoint, read_scores
from .events import Event
from .panels import Panel, Trace, lay_out
from .summary import moving_mean, window

_UNITS: dict[str, dict[str, Any]] = {
    "": {"hoverformat": ".5~g", "exponentformat": "e"},
    "count": {"hoverformat": ",.5~r", "exponentformat": "B"},
    "s": {"tickformat": "~s", "hoverformat": ".3~s", "ticksuffix": "s"},
    "GiB": {"hoverformat": ".4~g", "ticksuffix": " GiB", "exponentformat": "none"},
    "share": {"tickformat": ".3~p", "hoverformat": ".3~p"},
}
"""Settings of a y axis, by the unit of its values."""
_SEVERITIES = (("--info", "circle"), ("--warn", "triangle-up"), ("--crit", "diamond"))
_TEXT = "%{text}<extra></extra>"
_Trace = dict[str, Any]


@dataclass
class Figure:
    """One figure.

    Attributes:
        traces: traces of plotly.js. `place` is the index of a trace's positions in `Drawing.places`, `rows` selects
            some of them; `low` and `high` are the extremes around its values.
        axis: settings of its y axis.
        unified: whether it shows the values of all its lines at the cursor, and marks the events.
        scores: whether it shows an evaluation.
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
        places: positions on every clock, [points] by clock; first those of the kept line and of the steps left behind.
        marks: traces that are in every panel: lines at events.
        events: index of the positions of the events in `places`.
    """

    def __init__(self, record: RunRecord, events: list[Event]) -> None:
        kept_line = record.lines.kept
        smooth = moving_mean(kept_line.columns.get("loss", np.empty(0)), length := window(len(kept_line)))
        lines = replace(record.lines, kept=replace(kept_line, columns={**kept_line.columns, "loss_mean": smooth}))
        self._columns = lines.kept.columns
        self.places: list[dict[str, Any]] = []
        self.figures: list[Figure] = []
        self.marks: list[_Trace] = []
        panels = lay_out(self._columns, averaged=length)
        columns = list(dict.fromkeys(trace.column for panel in panels for trace in panel.traces))
        kept, left = reduce_all(lines, columns)
        for curve in (kept, left):
            self._place(curve.clocks, whole=True)
        self.events = self._locate([event.at for event in events])
        self._draw_events(events)
        for panel in panels:
            if not panel.brief or self._changes(panel):
                self._draw_panel(panel, kept, left)
        self._draw_scores(read_scores(record.entries, record.lines))

    def _place(self, clocks: dict[str, Column], whole: bool = False) -> int:
        """Add positions, of the `whole` run or only of some events. Returns their index."""
        self.places.append(
            {"whole": whole, **{clock: np.round(column, 3).tolist() for clock, column in clocks.items()}}
        )
        return len(self.places) - 1

    def _locate(self, positions: list[Position]) -> int:
        return self._place({clock: np.array([position[clock] for position in positions]) for clock in CLOCKS})

    # ------------------------------------------------------------------ curves

    def _draw_panel(self, panel: Panel, kept: Curve, left: Curve) -> None:
        axis = {"type": "log"} if panel.scale == "log" else {"rangemode": "tozero"}
        about = ", ".join(filter(None, [panel.about, "log scale" if panel.scale == "log" else ""]))
        figure = Figure(panel.title, about, panel.height, _UNITS[panel.unit] | axis, unified=True)
        for number, trace in enumerate(panel.traces):
            shared = sum(each.faint for each in panel.traces[:number])  # a faint one has the colour of the next
            color = f"--c{(number - shared) % 8}"
            common = {"legendgroup": trace.column, "mode": "lines", "hovertemplate": "%{y}"}
            if trace.column in kept.mean:
                drawn = self._curve(panel, trace, color, kept)
                figure.traces.append(common | {"place": 0, "showlegend": True} | drawn)
            if trace.column in left.mean and not trace.dots and (panel.name != "seconds" or not number):
                values = left.high.get(trace.column, left.mean[trace.column])
                line = {"color": color, "width": 1, "dash": "dash"}
                drawn = {"name": _text(f"{trace.label}, left behind"), "y": _scaled(values, panel), "line": line}
                figure.traces.append(common | {"place": 1, "opacity": 0.6} | drawn)
        if figure.traces:
            self.figures.append(figure)

    def _curve(self, panel: Panel, trace: Trace, color: str, kept: Curve) -> _Trace:
        """The trace of a column of the kept line."""
        column, dash = trace.column, "dash" if trace.dots else "solid"
        drawn: _Trace = {"name": _text(trace.label), "y": _scaled(kept.mean[column], panel)}
        drawn["line"] = {"color": color, "width": 1 if trace.faint else 1.5, "dash": dash}
        if trace.faint:
            drawn["opacity"] = 0.4
        if trace.dots:
            return drawn | {"mode": "lines+markers", "connectgaps": True, "marker": {"size": 4}}
        if column in kept.low:
            axis = _UNITS[panel.unit]
            low, high = (f"%{{customdata[{at}]:{axis['hoverformat']}}}{axis.get('ticksuffix', '')}" for at in (0, 1))
            drawn["hovertemplate"] = f"%{{y}} ({low} to {high})"
            drawn |= {"low": _scaled(kept.low[column], panel), "high": _scaled(kept.high[column], panel)}
        return drawn

    def _changes(self, panel: Panel) -> bool:
        """Whether a value of a panel ever changes."""
        columns = [self._columns[trace.column] for trace in panel.traces if trace.column in self._columns]
        return any(len(np.unique(values[np.isfinite(values)])) > 1 for values in columns)

    # ------------------------------------------------------------------ events

    def _draw_events(self, events: list[Event]) -> None:
        """The rows above the curves, and lines through all panels."""
        marked = [event for event in events if event.mark]
        rows = [group for group in GROUPS if any(event.group == group for event in marked)]
        counts = ", ".join(f"{row} {sum(event.group == row for event in marked):,}" for row in rows)
        axis = {"type": "category", "categoryarray": rows[::-1], "dtick": 1, "range": [-0.5, len(rows) - 0.5]}
        figure = Figure("Events", counts, len(rows) * 22 + 36, axis | {"showgrid": False, "ticklabelstandoff": 6})
        faint = min(0.8, max(0.3, 12 / (len(marked) or 1)))  # fainter the more lines there are
        starts = [at for at, event in enumerate(events) if event.mark is Mark.STRIP and event.group == "starts"]
        self._mark(events, starts, {"color": "--faint", "width": 1})
        for severity, (color, symbol) in enumerate(_SEVERITIES):
            mine = [at for at, event in enumerate(events) if event.severity == severity and event.group in rows]
            strip = [at for at in mine if events[at].mark]
            points = {"place": self.events, "rows": strip, "y": [events[at].group for at in strip], "mode": "markers"}
            points |= {"marker": {"color": color, "symbol": symbol, "size": 10}, "cliponaxis": False}
            texts = [_hover_text(events[at].kind, events[at].at, events[at].text) for at in strip]
            figure.traces.append(points | {"text": texts, "hovertemplate": _TEXT})
            lines = [at for at in mine if events[at].mark is Mark.LINE]
            self._mark(events, lines, {"color": color, "width": 1, "dash": "4px,3px"}, faint)
        if rows:
            self.figures.append(figure)

    def _mark(self, every: list[Event], rows: list[int], line: dict[str, Any], opacity: float = 1.0) -> None:
        """Lines through all panels, at these events."""
        events = [every[at] for at in rows]
        texts = [f"{event.kind}, {_place(event.at)}: {event.text}" for event in events]
        marks: _Trace = {"place": self.events, "rows": [x for at in rows for x in (at, at, None)], "mode": "lines"}
        marks |= {"y": [0, 1, None] * len(rows), "yaxis": "y2", "line": line, "opacity": opacity}
        marks |= {"told": [x for text in texts for x in (text, text, "")], "hovertemplate": f"<b>{_TEXT}</b>"}
        self.marks.append(marks | {"text": [x for event in events for x in (_text(event.kind),) * 3]})

    # ------------------------------------------------------------------ evaluations

    def _draw_scores(self, by_metric: dict[tuple[str, str], list[ScorePoint]]) -> None:
        for task, metric in sorted(by_metric, key=lambda name: (name[0].endswith("_probe"), name)):
            scores = by_metric[task, metric]
            kept, left = [score for score in scores if not score.left], [score for score in scores if score.left]
            about = ", ".join(filter(None, (f"{kept[-1].value:.5g}", _interval(kept[-1])))) if kept else ""
            figure = Figure(f"{task} {metric}", about, 160, _UNITS[""], scores=True)
            figure.traces += [self._scores(kept, False), self._scores(left, True)]
            self.figures.append(figure)

    def _scores(self, scores: list[ScorePoint], left: bool) -> _Trace:
        """The trace of the scores of a metric, with whiskers."""
        below, above = ([abs(score.interval[side] - score.value) for score in scores] for side in (0, 1))
        bars = {
            "type": "data",
            "symmetric": False,
            "array": above,
            "arrayminus": below,
            "color": "--c0",
            "thickness": 1,
            "width": 2,
        }
        texts = [", ".join(filter(None, (_interval(score), "left behind" if left else ""))) for score in scores]
        hover_texts = [
            _hover_text(f"{score.value:.5g}", score.at, text) for score, text in zip(scores, texts, strict=True)
        ]
        return {
            "place": self._locate([score.at for score in scores]),
            "y": [score.value for score in scores],
            "mode": "markers" if left else "lines+markers",
            "line": {"color": "--c0", "width": 1.3},
            "marker": {"color": "--c0", "symbol": "circle-open" if left else "circle", "size": 6},
            "error_y": bars,
            "text": hover_texts,
            "hovertemplate": _TEXT,
            "cliponaxis": False,
        }


def _interval(score: ScorePoint) -> str:
    low, high = score.interval
    return "" if score.error is None else f"95% within {low:.4g} to {high:.4g}"


def _scaled(column: Column, panel: Panel) -> Column:
    column = column / 2**30 if panel.unit == "GiB" else column
    return np.where(column > 0, column, math.nan) if panel.scale == "log" else column


def _place(at: Position) -> str:
    step = f"step {at['step']:,.0f}, " if math.isfinite(at["step"]) else ""
    return step + (stamp(at["written"])[:19].replace("T", " ") if math.isfinite(at["written"]) else "")


def _hover_text(head: str, at: Position, text: str) -> str:
    """The text that is shown when the cursor is over a point."""
    return "<br>".join([f"<b>{_text(head)}</b> {_place(at)}", *map(_text, textwrap.wrap(text, 80))])


def _text(text: str) -> str:
    return html.escape(text, quote=False)
