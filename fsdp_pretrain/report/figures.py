"""The figures of a page, as plotly.js takes them, except for what depends on the reader's choices.

`report.js` puts the chosen clock's positions (of `place`) into every trace, and colours of the theme for `--NAME`.
Texts of the record are untrusted, and plotly.js knows some tags, so every text goes through `_text`.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdp_pretrain.record.files import stamp
from fsdp_pretrain.record.goodput import State
from fsdp_pretrain.record.start_history import Column

from .curves import CLOCKS, Curve, Position
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
    "verified": ("verified", "--ok", "circle"), "written": ("written, not verified", "--info", "circle-open"),
    "deleted": ("deleted later, as configured", "--c6", "circle"), "left": ("left behind", "--c6", "x-thin-open"),
    "damaged": ("damaged", "--crit", "triangle-up"), "lost": ("lost", "--crit", "x-thin-open"),
    "failed": ("failed", "--crit", "triangle-down"),
}  # fmt: skip
STATES = {
    State.STEP_KEPT: ("useful steps", "kept"), State.STEP_SLOW: ("slower than usual", "slow"),
    State.WARMUP: ("slower than usual", "slow"), State.DATA_WAIT: ("waiting for data", "data"),
    State.CKPT_BLOCK: ("waiting for saves", "save"), State.HELDOUT: ("held-out loss", "heldout"),
    State.STEP_SKIPPED: ("skipped steps", "skipped"), State.LOST: ("lost steps", "lost"),
    State.DETECT: ("ending and starting", "restart"), State.TEARDOWN: ("ending and starting", "restart"),
    State.LAUNCH: ("ending and starting", "restart"), State.LOAD: ("ending and starting", "restart"),
    State.QUEUED: ("queue", "queue"), State.PAUSED: ("paused", "paused"),
    State.IDLE_UNKNOWN: ("unexplained", "unknown"),
}  # fmt: skip
"""Label and colour of every state of the account, from the bottom of its panel up."""


@dataclass
class Figure:
    """One figure.

    Attributes:
        host: panels or evaluations: where on the page.
        traces: of plotly.js. `place` is the index of its positions, of which `rows`, if given, are the trace's;
            `low` and `high` are the extremes around its values.
        axis: its y axis.
        fit: its y axis may be logarithmic, and show everything or all but the extremes.
    """

    name: str
    title: str
    about: str = ""
    traces: list[dict[str, Any]] = field(default_factory=list)
    axis: dict[str, Any] = field(default_factory=dict)
    height: int = 200
    host: str = "panels"
    fit: bool = False


class Drawing:
    """All figures of a page.

    Attributes:
        places: positions on every clock, [points] by clock, and the index of their run.
        events: the places of the events of each run.
        marks: traces that are in every panel: lines at events.
        constants: panels in which nothing changes, in words.
    """

    def __init__(self, records: list[RunRecord]) -> None:
        self.records, self.several = records, len(records) > 1
        self.places: list[dict[str, Any]] = []
        self.figures: list[Figure] = []
        self.marks: list[dict[str, Any]] = []
        self.events: list[int] = []
        self.constants: list[str] = []
        panels = lay_out(name for record in records for name in record.lines.kept.columns)
        columns = list(dict.fromkeys(trace.column for panel in panels for trace in panel.traces))
        curves = [record.curves(columns, len(records)) for record in records]
        self.kept = [[self.place(number, curve.clocks, curve=True) for curve in each] for number, each in enumerate(curves)]
        self._events()
        for panel in panels:
            if panel.brief and (text := self._constant(panel)) is not None:
                self.constants += [text] if text else []
            else:
                self._panel(panel, curves)
            if panel.name == "seconds":
                for number in range(len(records)):
                    self._goodput(number)
        self._saves()
        self._scores()

    def place(self, run: int, clocks: dict[str, Column], curve: bool = False) -> int:
        """Add positions of a run; their index."""
        known = {clock: np.round(column, 3).tolist() for clock, column in clocks.items()}
        self.places.append({"run": run, "curve": curve, **known})
        return len(self.places) - 1

    def _at(self, run: int, positions: list[Position]) -> int:
        return self.place(run, {clock: np.array([each[clock] for each in positions]) for clock in CLOCKS})

    def _color(self, run: int, trace: int = 0) -> str:
        return f"--c{(run if self.several else trace) % 8}"

    def _of(self, run: int) -> str:
        return f"{self.records[run].name}: " if self.several else ""

    # ------------------------------------------------------------------ curves

    def _panel(self, panel: Panel, curves: list[list[Curve]]) -> None:
        figure = Figure(panel.name, panel.title, panel.about, axis=dict(_UNITS[panel.unit]), fit=True)
        figure.axis |= {"type": "log"} if panel.scale == "log" else {"rangemode": "tozero"}
        for run, (kept, *left) in enumerate(curves):
            for number, trace in enumerate(panel.traces):
                if trace.column in kept.mean:
                    figure.traces.append(self._curve(panel, trace, number, run, kept, self.kept[run][0]))
                if not (trace.dots or (panel.name == "seconds" and number)):
                    for curve, place in zip(left, self.kept[run][1:], strict=True):
                        if trace.column in curve.mean:
                            figure.traces.append(self._left(panel, trace, number, run, curve, place))
        if figure.traces:
            self.figures.append(figure)

    def _curve(self, panel: Panel, trace: Trace, number: int, run: int, kept: Curve, place: int) -> dict[str, Any]:
        label = f"{self.records[run].name} {trace.label * (len(panel.traces) > 1)}" if self.several else trace.label
        dash = "dash" if trace.dots else _DASHES[number % 6] if self.several else "solid"
        unit, form = panel.unit.replace("share", "").replace("count", ""), _UNITS[panel.unit]["hoverformat"]
        found = {
            "name": _text(label.strip()), "key": f"{run} {number}", "place": place, "y": _scaled(kept.mean[trace.column], panel),
            "mode": "lines", "line": {"color": self._color(run, number), "width": 1.5, "dash": dash}, "hovertemplate": "%{y}",
        }  # fmt: skip
        if self.several and number and not trace.dots:
            found["hidden"] = True
        if trace.dots:
            return found | {"mode": "lines+markers", "connectgaps": True, "marker": {"size": 4}}
        if trace.column in kept.low:
            found |= {name: _scaled(getattr(kept, name)[trace.column], panel) for name in ("low", "high")}
            low, high = (f"%{{customdata[{at}]:{form}}}{unit}" for at in (0, 1))
            found["hovertemplate"] += f" ({low} to {high})"
        return found

    def _left(self, panel: Panel, trace: Trace, number: int, run: int, curve: Curve, place: int) -> dict[str, Any]:
        return {
            "name": _text(f"{self._of(run)}{trace.label}, left behind"), "key": f"{run} {number}", "left": True, "place": place, "y": _scaled(curve.high.get(trace.column, curve.mean[trace.column]), panel), "mode": "lines",
            "opacity": 0.6, "line": {"color": self._color(run, number), "width": 1, "dash": "dash"}, "hovertemplate": "%{y}",
        }  # fmt: skip

    def _constant(self, panel: Panel) -> str | None:
        """A panel in which no value ever changes, in words; None if one does."""
        texts = []
        for record in self.records:
            for trace in panel.traces:
                lines = [line.columns.get(trace.column) for line in (record.lines.kept, *record.lines.left)]
                values = np.unique(np.concatenate([np.zeros(0), *(line for line in lines if line is not None)]))
                values = values[np.isfinite(values)]
                if len(values) > 1:
                    return None
                texts += [f"{value:,.6g} {trace.label}" for value in values]
        return f"{panel.title.lower()} {', '.join(dict.fromkeys(texts))}" if texts else ""

    # ------------------------------------------------------------------ events and checkpoints

    def _events(self) -> None:
        """The rows above the curves, and lines through all panels."""
        every = [event for record in self.records for event in record.events[0] if event.mark]
        rows = [group for group in GROUPS if any(event.group == group for event in every)]
        counts = ", ".join(f"{row} {sum(event.group == row for event in every):,}" for row in rows)
        figure = Figure("events", "Events", counts, height=len(rows) * 22 + 36)
        figure.axis = {"type": "category", "categoryarray": rows[::-1], "dtick": 1, "showgrid": False, "ticklabelstandoff": 6, "range": [-0.5, len(rows) - 0.5]}
        for run, record in enumerate(self.records):
            events = record.events[0]
            end = record.lines.locate(None, record.account.end)
            self.events.append(place := self._at(run, [*(each.at for each in events), *(each.until or end for each in events)]))
            starts = [at for at, event in enumerate(events) if event.mark is Mark.STRIP and event.group == "starts"]
            self._mark(run, place, starts, {"color": "--faint", "width": 1})
            for severity, (color, symbol) in enumerate(_SEVERITIES):
                mine = [at for at, event in enumerate(events) if event.severity == severity]
                strip = [at for at in mine if events[at].mark and events[at].group in rows]
                spans = [at for at in strip if events[at].until or events[at].open]
                if spans:
                    figure.traces.append(_segments(place, [(at, at + len(events)) for at in spans]) | {
                        "y": [label for at in spans for label in (events[at].group, events[at].group, None)],
                        "line": {"color": color, "width": 3}, "opacity": 0.45, "hoverinfo": "skip"})  # fmt: skip
                if strip:
                    figure.traces.append({
                        "place": place, "rows": strip, "y": [events[at].group for at in strip], "mode": "markers",
                        "marker": {"color": color, "symbol": symbol, "size": 10}, "hovertemplate": "%{text}<extra></extra>",
                        "text": [self._describe(run, events[at]) for at in strip], "cliponaxis": False})  # fmt: skip
                lines = [at for at in mine if events[at].mark is Mark.LINE]
                self._mark(run, place, lines, {"color": color, "width": 1, "dash": "4px,3px"})
        if rows:
            self.figures.append(figure)

    def _mark(self, run: int, place: int, rows: list[int], line: dict[str, Any]) -> None:
        """Lines through all panels, at rows of the events of a run."""
        if rows:
            events = [self.records[run].events[0][at] for at in rows]
            texts = [f"{self._of(run)}{event.kind}, {_place(event.at)}: {event.text}" for event in events]
            kinds = [_text(event.kind) for event in events]
            self.marks.append(_segments(place, [(at, at) for at in rows]) | {
                "y": [y for _ in rows for y in (0, 1, None)], "yaxis": "y2", "line": line, "name": "event",
                "told": [x for text in texts for x in (text, text, "")], "text": [x for kind in kinds for x in (kind, kind, "")],
                "hovertemplate": "<b>%{text}</b><extra></extra>"})  # fmt: skip

    def _describe(self, run: int, event: Event) -> str:
        return _told(f"{self._of(run)}{event.kind}", event.at, event.text)

    def _saves(self) -> None:
        figure = Figure("saves", "Checkpoints", "seconds each took", height=130, axis=_UNITS["s"] | {"rangemode": "tozero"})
        for run, record in enumerate(self.records):
            saves = list(read_saves(record.run, record.entries, record.history.nodes, record.lines))
            for state, (label, color, symbol) in _SAVES.items():
                mine = [save for save in saves if save.state == state]
                if not mine:
                    continue
                figure.traces.append({
                    "place": self._at(run, [save.at for save in mine]), "y": [save.seconds for save in mine],
                    "name": _text(f"{self._of(run)}{label} {len(mine)}"), "key": f"{run} {state}", "mode": "markers", "hovertemplate": "%{text}<extra></extra>",
                    "marker": {"color": color, "symbol": symbol, "size": 4 if state == "deleted" else 9, "line": {"color": color}},
                    "text": [_told(f"{self._of(run)}{label}", save.at, save.text) for save in mine]})  # fmt: skip
        if figure.traces:
            self.figures.append(figure)

    # ------------------------------------------------------------------ goodput and evaluations

    def _goodput(self, run: int) -> None:
        """The share of each state, over wall time, and over steps: of the time from one to the next."""
        record = self.records[run]
        found, kept = record.account, record.lines.kept.columns
        axis = _UNITS["share"] | {"range": [0, 1]}
        figure = Figure("goodput", f"Goodput{' of ' * self.several}{self._of(run)[:-2]}", f"{found.goodput:.1%} in all", [], axis, 140)
        edges = np.linspace(found.begin, max(found.end, found.begin + 1.0), _BINS + 1)
        figure.traces += self._states(run, {"written": edges}, edges, "time")
        mine = np.flatnonzero(kept["written"] >= found.begin)
        if len(mine) > 1:
            rows = mine[np.unique(np.linspace(0, len(mine) - 1, _BINS + 1).astype(np.int64))]
            edges = kept["written"][rows].copy()
            edges[0], edges[-1] = found.begin, max(found.end, edges[-1])
            figure.traces += self._states(run, {clock: kept[clock][rows] for clock in CLOCKS}, edges, "progress")
        self.figures.append(figure)

    def _states(self, run: int, clocks: dict[str, Column], edges: Column, over: str) -> Iterator[dict[str, Any]]:
        """Stacked traces, one per label of `STATES`; `over`: for clocks of time, or of progress."""
        spent = self.records[run].timeline.between(edges)
        total, place = sum(spent.values()), self.place(run, clocks)
        for label, color in dict.fromkeys(STATES.values()):
            seconds = sum(spent[state] for state in spent if STATES[state][0] == label)
            if np.any(seconds):
                share = np.divide(seconds, total, out=np.zeros_like(edges[1:]), where=np.asarray(total) > 0)
                yield {
                    "name": label, "key": label, "place": place, "y": np.append(share, share[-1]), "stackgroup": over, "over": over,
                    "mode": "lines", "line": {"width": 0, "shape": "hv", "color": f"--s-{color}"}, "hovertemplate": "%{y}",
                    "fillcolor": f"--s-{color}",
                }  # fmt: skip

    def _scores(self) -> None:
        names = {name for record in self.records for name in record.evaluations.scores}
        for task, metric in sorted(names, key=lambda name: (name[0].endswith("_probe"), name)):
            figure = Figure(f"{task} {metric}", f"{task} {metric}", height=160, host="evaluations", axis=dict(_UNITS[""]))
            for run, record in enumerate(self.records):
                scores = record.evaluations.scores.get((task, metric), [])
                for left in (False, True):
                    mine = [score for score in scores if score.left is left]
                    if not mine:
                        continue
                    low, high = ([score.value if x is None else x for score in mine for x in [getattr(score, at)]] for at in ("low", "high"))
                    bars = {"array": [h - s.value for h, s in zip(high, mine, strict=True)],
                            "arrayminus": [s.value - l for l, s in zip(low, mine, strict=True)]}  # fmt: skip
                    texts = [_told(f"{self._of(run)}{s.value:.5g}", s.at, _interval(s) + ", left behind" * left) for s in mine]
                    figure.traces.append({
                        "place": self._at(run, [score.at for score in mine]), "y": [score.value for score in mine],
                        "mode": "markers" if left else "lines+markers", "line": {"color": self._color(run), "width": 1.3},
                        "marker": {"color": self._color(run), "symbol": "circle-open" if left else "circle", "size": 6},
                        "error_y": bars | {"type": "data", "symmetric": False, "color": self._color(run), "thickness": 1, "width": 2},
                        "text": texts, "hovertemplate": "%{text}<extra></extra>", "cliponaxis": False})  # fmt: skip
                    if not (left or figure.about or self.several):
                        figure.about = f"{mine[-1].value:.5g} {_interval(mine[-1])}"
                better = record.evaluations.better.get((task, metric))
                if better and better not in figure.about:
                    figure.about = ", ".join(filter(None, (figure.about.strip(), better)))
            self.figures.append(figure)


def _interval(score: Any) -> str:
    interval = f"95% {score.low:.4g} to {score.high:.4g}" if score.low is not None else ""
    return ", ".join(filter(None, (interval, f"{score.documents} documents" if score.documents else "")))


def _scaled(column: Column, panel: Panel) -> Column:
    column = column / 2**30 if panel.unit == "GiB" else column
    return np.where(column > 0, column, math.nan) if panel.scale == "log" else column


def _segments(place: int, pairs: Iterable[tuple[int, int]]) -> dict[str, Any]:
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
