"""Time accounting of a run: exactly one state at any instant, as a pure function of the record.

Goodput is the share of wall-clock time that contributes to the final weights: steps on the kept line. Steps that a
later start rolled back count as lost, including their data waits and saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, PlainSerializer

from fsdp_pretrain.units import counted, human_count, human_time

from .files import RunDir, stamp
from .start_history import Start, StartHistory, kept_steps, read_history
from .step_columns import StepColumns

Time = Annotated[float, PlainSerializer(stamp)]
"""Seconds since 1970, ISO 8601 in JSON."""


class State(StrEnum):
    """What a run is doing: the name in JSON."""

    STEPS = "steps"
    DATA = "data"
    SAVES = "saves"
    HELDOUT = "heldout"
    LOST = "lost"
    STARTING = "starting"
    STOPPING = "stopping"
    IDLE = "idle"


MEANING = {
    State.STEPS: "steps on the kept line",
    State.DATA: "waiting for data",
    State.SAVES: "waiting for saves",
    State.HELDOUT: "measuring the held-out loss",
    State.LOST: "steps that a resume or rollback discarded, whose update was skipped, or whose record is lost",
    State.STARTING: "from the launch to the first step",
    State.STOPPING: "from the last step until the end was recorded: the last save, or finding out what happened",
    State.IDLE: "between starts, waiting for the scheduler or a person; `control pause`",
}
_RECOVERY = (State.STARTING, State.STOPPING)


class Interruption(BaseModel):
    """An unplanned end of a start, or a rollback, until the first step after it."""

    time: Time  # time of the last progress before it
    segment: int  # this and the next: the segment that ended, and its last step
    step: int
    kind: str  # `failure` or `rollback`
    cause: str  # the recorded cause
    over: bool = False  # whether training continued
    recovery_seconds: float = 0.0  # time from the last progress until training continued, without the queue


class Energy(BaseModel):
    """The kWh of the steps whose energy is known (the share `steps`), per million of their tokens, and of kept ones."""

    kwh: float
    per_million: float
    per_million_kept: float
    steps: float

    def __str__(self) -> str:
        part = f" in {self.steps:.1%} of the steps" if self.steps < 1 else ""
        each = f"{self.per_million:.3g} per million tokens, {self.per_million_kept:.3g} per million kept"
        return f"{self.kwh:.4g} kWh used by the GPUs{part}: {each}"


class GoodputReport(BaseModel):
    """The time account of a run. None: unknown, or undefined without interruptions."""

    begin: Time
    end: Time
    wall_seconds: float
    states: dict[State, float]  # seconds in each state; they sum to the wall time
    goodput: float  # STEPS / wall
    tokens: int  # trained since the start or the fork and kept; the next: lost
    tokens_lost: int
    tokens_per_day: float
    mfu: float | None  # median MFU of the kept steps
    energy: Energy | None  # None if no device counts it
    incidents: list[Interruption]
    mtti_seconds: float | None  # mean time to interruption; the next: to recovery
    mttr_seconds: float | None
    block_seconds: float | None  # mean time that training waited for a save; the next: mean duration of one
    save_seconds: float | None
    interval_seconds: float | None  # recommended interval of saves: sqrt(2 MTTI block), at least one save long
    interval_steps: int | None


class _Ledger:
    """Divides the wall clock into consecutive states."""

    def __init__(self, begin: float) -> None:
        self.begin = self.at = begin
        self.states = dict.fromkeys(State, 0.0)
        self.incident: Interruption | None = None

    def until(self, time: float, state: State) -> None:
        self.add(max(0.0, time - self.at), state)

    def add(self, seconds: float, state: State) -> None:
        self.at += seconds
        self.states[state] += seconds
        if self.incident is not None and state in _RECOVERY:
            self.incident.recovery_seconds += seconds


def _divide(history: StartHistory) -> tuple[_Ledger, list[Interruption]]:
    """Divide the time of a run with at least one start among the states. Returns also the interruptions."""
    ledger = _Ledger(_launch(history, history.starts[0], -math.inf))
    incidents: list[Interruption] = []
    for before, start, after in zip([None, *history.starts], history.starts, [*history.starts[1:], None], strict=False):
        if before is not None:
            held = any(pause.end is None for pause in before.pauses)  # when it ended is not known, unless it is closed
            ledger.until(_launch(history, start, before.end), State.IDLE if before.closed or held else State.STOPPING)
        ledger.until(start.connected if start.ready is None else start.ready, State.STARTING)
        _train(ledger, start, kept_steps(history.nodes, start.segment, start.steps))
        rest = State.STARTING if start.ready is None else State.STOPPING
        for pause in start.pauses:
            ledger.until(pause.begin, rest)
            ledger.until(start.end if pause.end is None else pause.end, State.IDLE)
        incident = _judge(history, start, after)
        if incident is not None:
            incidents.append(incident)
            ledger.incident = incident
        if after is not None or start.closed or start.ready is None:  # else it may still be training
            ledger.until(start.end, rest)
    return ledger, incidents


def _launch(history: StartHistory, start: Start, after: float) -> float:
    """When a start was launched: by its launcher, the last one if others failed before; by the first restart since
    `after`; else the start of its process."""
    launches, restarts = (
        [time for time in times if after <= time <= start.connected] for times in (history.launches, history.restarts)
    )
    return launches[-1] if launches else restarts[0] if restarts else start.launched


def _train(ledger: _Ledger, start: Start, kept: NDArray[np.bool_]) -> None:
    """Add the time of a start's steps to the states."""
    steps = start.steps
    if not steps.count:
        return
    if ledger.incident is not None:
        ledger.incident.over, ledger.incident = True, None
    trained = kept & (steps["skipped"] == 0)
    for seconds, rows, state in (
        (steps.compute, trained, State.STEPS),
        (steps.compute, kept & ~trained, State.LOST),
        (steps["data"], kept, State.DATA),
        (steps["checkpoint"], kept, State.SAVES),
        (steps["heldout"], kept, State.HELDOUT),
        (steps["iteration"], ~kept, State.LOST),
        (steps.missing, np.ones_like(kept), State.LOST),
        (steps["paused"], np.ones_like(kept), State.IDLE),
    ):
        ledger.add(float(seconds[rows].sum()), state)


def _judge(history: StartHistory, start: Start, after: Start | None) -> Interruption | None:
    """The incident that ended a start, if any. A start without steps belongs to the preceding incident."""
    trained = (each.segment for each in history.starts if each.segment > start.segment and each.steps.count)
    until = next(trained, math.inf)
    rollbacks = [n for n in history.nodes if n.kind == "rollback" and start.segment < n.segment < until]
    unplanned = not start.clean and (after is not None or start.closed)
    if not start.steps.count or not (rollbacks or unplanned):
        return None
    kind, cause = ("rollback", rollbacks[-1].reason or "no reason was given") if rollbacks else ("failure", start.cause)
    step = int(start.steps["step"][-1])
    return Interruption(time=start.progress, segment=start.segment, step=step, kind=kind, cause=cause)


def goodput(run: RunDir, shown: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> GoodputReport | None:
    """The time account of a run; None if it was never started. `shown` may wrap the lines in a progress bar."""
    return account(read_history(run, shown))


def account(history: StartHistory) -> GoodputReport | None:
    """The time account of a run from its history; None if it was never started."""
    if not history.starts:
        return None
    ledger, incidents = _divide(history)
    states, wall = ledger.states, ledger.at - ledger.begin
    available = wall - states[State.IDLE]
    kept = [(start.steps, kept_steps(history.nodes, start.segment, start.steps)) for start in history.starts]
    tokens = int(sum(steps["tokens"][mask].sum() for steps, mask in kept))
    mfus = np.concatenate([steps["mfu"][mask] for steps, mask in kept])
    iterations = np.concatenate([start.steps["iteration"] for start in history.starts])
    ended = [incident.recovery_seconds for incident in incidents if incident.over]
    waits = [float(wait) for start in history.starts for wait in start.steps["checkpoint"] if wait > 0]
    mtti, block = available / len(incidents) if incidents else None, _mean(waits)
    save, interval = _mean([seconds for start in history.starts for seconds in start.saves]), None
    if mtti is not None and block is not None:
        interval = max(math.sqrt(2 * mtti * block), save or 0.0)
    return GoodputReport(
        begin=ledger.begin,
        end=ledger.at,
        wall_seconds=wall,
        states=states,
        goodput=_ratio(states[State.STEPS], wall),
        tokens=tokens,
        tokens_lost=int(sum(steps["tokens"][~mask].sum() for steps, mask in kept)),
        tokens_per_day=_ratio(tokens * 86_400.0, wall),
        mfu=float(np.nanmedian(mfus)) if np.isfinite(mfus).any() else None,
        energy=_energy(kept),
        incidents=incidents,
        mtti_seconds=mtti,
        mttr_seconds=_mean(ended),
        block_seconds=block,
        save_seconds=save,
        interval_seconds=interval,
        interval_steps=None if interval is None else max(1, round(interval / float(np.median(iterations)))),
    )


def _energy(kept: list[tuple[StepColumns, NDArray[np.bool_]]]) -> Energy | None:
    joules, tokens = (np.concatenate([steps[name] for steps, _ in kept]) for name in ("energy", "tokens"))
    known, line = np.isfinite(joules), np.concatenate([mask for _, mask in kept])
    if not known.any():
        return None
    kwh = float(joules[known].sum()) / 3.6e6
    each, each_kept = (_ratio(kwh, float(tokens[rows].sum()) / 1e6) for rows in (known, known & line))
    return Energy(kwh=kwh, per_million=each, per_million_kept=each_kept, steps=float(known.mean()))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def headline(report: GoodputReport) -> str:
    """The account in one line, after the word goodput."""
    interrupted = len(report.incidents)
    return (
        f"{report.goodput:.1%} of {human_time(report.wall_seconds)}, "
        f"{human_count(report.tokens_per_day)} tokens a day, {counted(interrupted, 'interruption')}"
    )


def render(report: GoodputReport) -> str:
    """The account as text for people."""
    return "\n".join(_lines(report))


def _lines(report: GoodputReport) -> Iterator[str]:
    wall = report.wall_seconds
    yield f"{stamp(report.begin)[:19]} to {stamp(report.end)[:19]} UTC: {human_time(wall)}"
    for state, seconds in report.states.items():
        yield f"  {state:9} {human_time(seconds):>8} {seconds / max(wall, 1e-9):>7.2%}  {MEANING[state]}"
    mfu = "" if report.mfu is None else f"; MFU {report.mfu:.1%}"
    yield f"goodput {report.goodput:.2%}{mfu}"
    kept, lost, day = (human_count(count) for count in (report.tokens, report.tokens_lost, report.tokens_per_day))
    yield f"{kept} tokens kept, {lost} lost; {day} tokens a day"
    if report.energy is not None:
        yield str(report.energy)
    for incident in report.incidents:
        over = f"{human_time(incident.recovery_seconds)} to resume" if incident.over else "training has not resumed"
        yield f"  {stamp(incident.time)[:19]} {incident.kind} after step {incident.step:_}: {incident.cause}; {over}"
    if report.mtti_seconds is not None:
        repair = "" if report.mttr_seconds is None else f", resumed after {human_time(report.mttr_seconds)} (MTTR)"
        yield f"interrupted every {human_time(report.mtti_seconds)} (MTTI){repair}"
    if report.save_seconds is not None and report.block_seconds is not None:
        save, block = human_time(report.save_seconds), human_time(report.block_seconds)
        yield f"a save takes {save}; training waits {block} for it"
    if report.interval_seconds is not None:
        interval = human_time(report.interval_seconds)
        yield f"recommended interval, sqrt(2 MTTI block): {interval}, {report.interval_steps:_} steps"
