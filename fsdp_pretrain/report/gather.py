"""Reads everything that a page shows of one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.record import journal
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.goodput import GoodputReport, Timeline, account
from fsdp_pretrain.record.metrics import METRICS
from fsdp_pretrain.record.start_history import Column, Start, StartHistory, StepColumns, read_history, read_steps
from fsdp_pretrain.watchdog.status import StatusReport, inspect

from .curves import CLOCKS, Curve, Line, Lines, pack, read_lines, reduce
from .evaluations import Evaluations, read_evaluations
from .events import Event, Mark, read_events
from .saves import SavePoint, read_saves
from .summary import Summary, summarize

_BANDS = 600
"""Intervals of the goodput panel."""
_CURVE_BYTES = 3_900_000
"""Of all curves of a page, in base64."""
_LEFT = 0.25
"""Largest share of a run's points that is spent on what was left behind."""


@dataclass(frozen=True)
class Band:
    """Time in each state between consecutive edges: edges float64 [n + 1] by clock, seconds float32 [n] by state."""

    edges: dict[str, Column]
    seconds: dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class RunPage:
    """What a page shows of a run.

    Attributes:
        begin: when it was launched, or of a fork its parent; seconds since 1970.
        kept, left: its curves; those of `left` were left behind.
        bands: the account of its time, over its steps and over wall time.
        left_out: events left out because there are too many.
    """

    name: str
    path: str
    begin: float
    summary: Summary
    kept: Curve
    left: list[Curve]
    events: list[Event]
    left_out: int
    saves: list[SavePoint]
    evaluations: Evaluations
    account: dict[str, Any]
    bands: list[Band]


@dataclass(frozen=True)
class RunRecord:
    """The record of a run, read once."""

    run: RunDir
    history: StartHistory
    lines: Lines
    account: GoodputReport
    timeline: Timeline
    entries: list[dict[str, Any]]
    status: StatusReport


def read(run: RunDir, shown: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> RunRecord:
    """Read the record of a run; `shown` may wrap metrics lines in a progress bar.

    Raises:
        ConfigError: it was never started.
        UserError: the lineage is damaged.
    """
    history = read_history(run, shown)
    found = account(run, history)
    if found is None:
        raise ConfigError(
            f"there is nothing to show: {run.path} was never started",
            effect="no page was written",
            remedy=f"start its training, or see why that failed: fsdp-pretrain journal {run.path}",
        )
    segments = {start.segment: _timed(start) for start in history.attempts}
    for path in run.segments:  # of the parent of a fork, and starts whose environment is damaged
        if int(path.name) not in segments and (path / METRICS).exists():
            segments[int(path.name)] = read_steps(path / METRICS, shown)[0]
    lines = read_lines(history.nodes, {number: steps for number, steps in segments.items() if len(steps)})
    return RunRecord(run, history, lines, *found, _entries(run), inspect(run, brief=True))


def _entries(run: RunDir) -> list[dict[str, Any]]:
    """The journal. That of a fork begins with a copy of the parent's, of which what came later is left out."""
    entries = journal.read(run)
    forks = [place for place, entry in enumerate(entries) if entry["kind"] == "fork"]
    place = forks[-1] if forks else 0
    until = entries[place].get("step") if forks else None
    return [e for number, e in enumerate(entries) if number >= place or (e.get("step") or 0) <= (until or 0)]


def _timed(start: Start) -> StepColumns:
    """The steps of a start, with the times when they ended: their records are written up to two steps later."""
    steps, begun = start.steps, start.connected if start.ready is None else start.ready
    return dataclasses.replace(steps, written=begun + np.cumsum(steps.seconds))


def gather(record: RunRecord, columns: list[str], runs: int) -> RunPage:
    """What a page of `runs` runs shows of one, with these columns of its steps."""
    run, lines, nodes, entries = record.run, record.lines, record.history.nodes, record.entries
    trained = {start.segment for start in record.history.attempts if len(start.steps)}
    events, left_out = read_events(entries, nodes, lines, record.account.incidents)
    marks = [event.at.step for event in events if event.mark >= Mark.STRIP and event.group != "progress"]
    used = [name for name in columns if name in lines.kept.columns] or columns
    points = int(_CURVE_BYTES / runs / (4 / 3) / (8 * len(CLOCKS) + 3 * 4 * len(used)))
    lanes = pack(lines.left)
    rest = min(int(points * _LEFT), sum(map(len, lanes)))
    left = [reduce(lane, used, max(2, rest * len(lane) // sum(map(len, lanes))), marks) for lane in lanes]
    return RunPage(
        name=record.status.status.run if record.status.status.run != "?" else run.path.resolve().name,
        path=str(run.path),
        begin=min([record.account.begin, *lines.kept.columns["written"][:1].tolist()]),
        summary=summarize(run, record.status, lines.kept, record.account, entries, trained),
        kept=reduce(lines.kept, used, points - rest, marks),
        left=left,
        events=events,
        left_out=left_out,
        saves=read_saves(run, entries, nodes, lines),
        evaluations=read_evaluations(run, entries, lines),
        account=_totals(record.account),
        bands=_bands(record.account, record.timeline, lines.kept),
    )


def _totals(found: GoodputReport) -> dict[str, Any]:
    states = [{"name": str(s), "meaning": s.meaning, "seconds": t} for s, t in found.states.items()]
    return {**found.model_dump(include={"wall_seconds", "goodput", "runtime_goodput", "ettr", "tokens", "tokens_lost"}),
            "states": states, "incidents": len(found.incidents)}  # fmt: skip


def _bands(found: GoodputReport, timeline: Timeline, kept: Line) -> list[Band]:
    """The account over wall time, and over the steps of the kept line: what it took to get from one to the next."""
    edges = np.linspace(found.begin, max(found.end, found.begin + 1.0), _BANDS + 1)
    bands = [Band({"written": edges}, _seconds(timeline, edges))]
    mine = np.flatnonzero(kept.columns["written"] >= found.begin)
    if len(mine) > 1:
        rows = mine[np.unique(np.linspace(0, len(mine) - 1, _BANDS + 1).astype(np.int64))]
        edges = kept.columns["written"][rows].copy()
        edges[0], edges[-1] = found.begin, max(found.end, edges[-1])
        clocks = {name: kept.columns[name][rows] for name in CLOCKS}
        bands.append(Band(clocks, _seconds(timeline, edges)))
    return bands


def _seconds(timeline: Timeline, edges: Column) -> dict[str, NDArray[np.float32]]:
    between = timeline.between(edges)
    return {str(state): spent.astype(np.float32) for state, spent in between.items() if spent.any()}
