"""Time accounting of a run: exactly one state at any instant, as a pure function of the record.

Goodput is the share of wall-clock time that contributes to the final weights: steps on the kept line, at the best pace
that the run has shown. All other time has its own state. Steps that a later start rolled back are lost, including their
data waits and saves; that is known only later, so past accounts change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, PlainSerializer, computed_field

from fsdp_pretrain.config.resume_rules import load_recorded
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.units import human_count, human_time

from .files import RunDir, stamp
from .start_history import Column, Start, StartHistory, kept_steps, left_by, read_history

_WARMUP_STEPS = 20
"""Steps of a start whose excess over the reference counts as warmup, not slowness."""
_REFERENCE_STEPS = 512
Time = Annotated[float, PlainSerializer(stamp)]
"""Seconds since 1970, ISO 8601 in JSON."""


class State(StrEnum):
    """What a run is doing: the name in JSON, and its meaning."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> State:
        state = str.__new__(cls, name)
        state._value_, state.meaning = name, meaning
        return state

    QUEUED = "queued", "between starts, waiting for the scheduler or a person"
    LAUNCH = "launch", "from the launch until all ranks connected"
    LOAD = "load", "building, reading the checkpoint back, loading"
    WARMUP = "warmup", "extra time of the first steps of a start"
    STEP_KEPT = "step_kept", "steps on the kept line, at the reference pace"
    STEP_SLOW = "step_slow", "their time beyond that pace"
    STEP_SKIPPED = "step_skipped", "steps whose update was skipped"
    DATA_WAIT = "data_wait", "waiting for data"
    CKPT_BLOCK = "ckpt_block", "waiting for saves"
    HELDOUT = "heldout", "measuring the held-out loss"
    PAUSED = "paused", "held by a person, with `control pause`"
    LOST = "lost", "steps that a resume or rollback discarded"
    DETECT = "detect", "from the last progress until the end was detected"
    TEARDOWN = "teardown", "from there until all processes had ended"
    IDLE_UNKNOWN = "idle_unknown", "gaps without an explanation in the record"


_RECOVERY = (State.DETECT, State.TEARDOWN, State.IDLE_UNKNOWN, State.LAUNCH, State.LOAD, State.WARMUP)


class Interruption(BaseModel):
    """An unplanned end of a start, or a rollback, until the first step after it.

    Attributes:
        time: of its last progress.
        segment, step: the start that ended, and its last step.
        kind: `failure` or `rollback`.
        cause: as recorded.
        over: whether training continued.
        states: seconds by state until the next start completed a step, and LOST.
        lost_steps, lost_tokens: trained by it or earlier starts, and not kept.
    """

    time: Time
    segment: int
    step: int
    kind: str
    cause: str
    over: bool = False
    states: dict[State, float] = {}
    lost_steps: int = 0
    lost_tokens: int = 0

    def add(self, seconds: float, state: State) -> None:
        self.states[state] = self.states.get(state, 0.0) + seconds

    @computed_field  # type: ignore[prop-decorator]
    @property
    def recovery_seconds(self) -> float:
        """From the last progress until training continued, without the queue."""
        return sum(self.states.get(state, 0.0) for state in _RECOVERY)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def cost_seconds(self) -> float:
        """Recovery and lost time."""
        return self.recovery_seconds + self.states.get(State.LOST, 0.0)


class Saves(BaseModel):
    """Number of completed saves; mean time that training waited for one, and mean duration of one."""

    count: int
    block_seconds: float | None
    seconds: float | None


class UnprotectedTime(BaseModel):
    """Longest time without a new checkpoint; checkpoint age beyond the interval, integrated over time (seconds^2)."""

    longest_seconds: float
    over_interval: float | None


class Interval(BaseModel):
    """Interval between saves: as configured, at the typical pace; recommended: sqrt(2 MTTI block), at least a save."""

    configured_seconds: float | None
    seconds: float | None
    steps: int | None


class Damaged(BaseModel):
    """Skipped parts of the record: number of lines, and problems of files."""

    lines: int
    files: list[str]


class GoodputReport(BaseModel):
    """The account of a run. None: unknown, or undefined without incidents.

    Attributes:
        states: seconds.
        goodput: STEP_KEPT / wall.
        runtime_goodput: STEP_KEPT / (wall - QUEUED).
        ettr, ettr_queued: (STEP_KEPT + STEP_SLOW) / wall, without and with the queue.
        tokens, tokens_lost: trained since the start or the fork: kept, and lost.
        mfu, mfu_effective: median of the kept steps, and that times goodput.
        mtti_seconds, mttr_seconds: mean time to interruption, and to recovery.
    """

    begin: Time
    end: Time
    wall_seconds: float
    states: dict[State, float]
    goodput: float
    runtime_goodput: float
    ettr: float
    ettr_queued: float
    tokens: int
    tokens_lost: int
    tokens_per_day: float
    mfu: float | None
    mfu_effective: float | None
    incidents: list[Interruption]
    mtti_seconds: float | None
    mttr_seconds: float | None
    saves: Saves
    unprotected: UnprotectedTime
    interval: Interval
    damaged: Damaged


class _Ledger:
    """Divides the wall clock into consecutive states."""

    def __init__(self, begin: float) -> None:
        self.begin = self.at = begin
        self.states = dict.fromkeys(State, 0.0)
        self.incident: Interruption | None = None
        self.pieces: list[tuple[Column, dict[State, Column]]] = []  # when intervals end, and seconds of states in them

    def until(self, time: float, state: State) -> None:
        seconds = max(0.0, time - self.at)
        self.add(seconds, state)
        self.pieces.append((np.array([self.at]), {state: np.array([seconds])}))

    def add(self, seconds: float, state: State) -> None:
        self.at += seconds
        self.states[state] += seconds
        if self.incident is not None and state in (*_RECOVERY, State.QUEUED):
            self.incident.add(seconds, state)


def _divide(history: StartHistory) -> tuple[_Ledger, list[Interruption]]:
    """Divide the time of a run with at least one start among the states. Returns also its interruptions."""
    references = _references(history.attempts)
    ledger = _Ledger(_launch(history, history.attempts[0], -math.inf))
    incidents: list[Interruption] = []
    before: Start | None = None
    for attempt, after in zip(history.attempts, [*history.attempts[1:], None], strict=True):
        if before is not None:
            launch = _launch(history, attempt, before.end)
            ledger.until(launch, State.QUEUED if before.closed else State.IDLE_UNKNOWN)
        ledger.until(attempt.connected, State.LAUNCH)
        if attempt.ready is not None:
            ledger.until(attempt.ready, State.LOAD)
            _train(ledger, attempt, kept_steps(history, attempt), references[attempt.segment])
            if attempt.paused is not None:
                ledger.until(attempt.paused, State.PAUSED)
        incident = _judge(history, attempt, after)
        if incident is not None:
            incidents.append(incident)
            ledger.incident = incident
        if after is not None or attempt.closed or attempt.ready is None:  # else it may still be training
            _end(ledger, attempt)
        before = attempt
    return ledger, incidents


def _launch(history: StartHistory, attempt: Start, after: float) -> float:
    """When a start was launched: by its launcher, if that is in the journal, else the start of its process."""
    return next((time for time in history.launches if after <= time <= attempt.connected), attempt.launched)


def _train(ledger: _Ledger, attempt: Start, kept: NDArray[np.bool_], reference: Column) -> None:
    """Divide the steps of a start."""
    steps = attempt.steps
    if not len(steps):
        return
    trained, skipped = kept & (steps.skipped == 0), kept & (steps.skipped > 0)
    excess = np.maximum(steps.compute - reference, 0.0)
    early = np.arange(len(steps)) < _WARMUP_STEPS
    spent = {State.WARMUP: np.where(trained & early, excess, 0.0)}
    ledger.pieces.append((ledger.at + np.cumsum(steps.seconds), spent))
    ledger.add(float(spent[State.WARMUP].sum()), State.WARMUP)
    if ledger.incident is not None:
        ledger.incident.over, ledger.incident = True, None
    for column, rows, state in (
        (excess, trained & ~early, State.STEP_SLOW),
        (steps.compute - excess, trained, State.STEP_KEPT),
        (steps.compute, skipped, State.STEP_SKIPPED),
        (steps.data, kept, State.DATA_WAIT),
        (steps.checkpoint, kept, State.CKPT_BLOCK),
        (steps.heldout, kept, State.HELDOUT),
        (steps.iteration, ~kept, State.LOST),
        (steps.missing, np.ones_like(kept), State.IDLE_UNKNOWN),
        (steps.paused, np.ones_like(kept), State.PAUSED),
    ):
        spent[state] = np.where(rows, column, 0.0)
        ledger.add(float(spent[state].sum()), state)


def _judge(history: StartHistory, attempt: Start, after: Start | None) -> Interruption | None:
    """The incident that ended a start, if any. A start without steps belongs to the preceding incident."""
    until = math.inf if after is None else after.segment
    rollbacks = [n for n in history.nodes if n.kind == "rollback" and attempt.segment < n.segment < until]
    unplanned = not attempt.clean and (after is not None or attempt.closed)
    if not len(attempt.steps) or not (rollbacks or unplanned):
        return None
    cause = "no reason was given" if attempt.clean else attempt.cause
    kind, cause = ("rollback", rollbacks[-1].reason or cause) if rollbacks else ("failure", cause)
    step = int(attempt.steps.step[-1])
    return Interruption(time=attempt.progress, segment=attempt.segment, step=step, kind=kind, cause=cause)


def _end(ledger: _Ledger, attempt: Start) -> None:
    """Divide the time from a start's last step to its end."""
    if attempt.ready is None:
        ledger.until(attempt.end, State.LOAD)
    if attempt.saving is not None:
        ledger.until(attempt.saving, State.CKPT_BLOCK)
    if not attempt.clean:
        ledger.until(attempt.declared or attempt.end, State.DETECT)
    ledger.until(attempt.end, State.TEARDOWN)


def _charge(history: StartHistory, incidents: list[Interruption]) -> None:
    """Add lost steps to the incident before the start that rolled them back."""
    for attempt in history.attempts:
        lost, culprit = ~kept_steps(history, attempt), left_by(history, attempt)
        for number in np.unique(culprit[lost]):
            blamed = [incident for incident in incidents if incident.segment < number]
            if blamed:
                mask = lost & (culprit == number)
                blamed[-1].add(float(attempt.steps.iteration[mask].sum()), State.LOST)
                blamed[-1].lost_steps += int(mask.sum())
                blamed[-1].lost_tokens += int(attempt.steps.tokens[mask].sum())


def _references(attempts: list[Start]) -> dict[int, Column]:
    """Reference seconds per step: the lowest median over blocks of 512 steps of the same batch, length and world."""
    keys = [np.stack([a.steps.batch, a.steps.length, np.full(len(a.steps), float(a.world))], axis=1) for a in attempts]
    if not keys or not sum(len(key) for key in keys):
        return {attempt.segment: np.zeros(0) for attempt in attempts}
    every, phase = np.unique(np.concatenate(keys), axis=0, return_inverse=True)
    phase = phase.reshape(-1)
    compute = np.concatenate([a.steps.compute for a in attempts])
    usual = np.concatenate([(np.arange(len(a.steps)) >= _WARMUP_STEPS) & (a.steps.skipped == 0) for a in attempts])
    reference = np.zeros(len(phase))
    for number in range(len(every)):
        mine = phase == number
        values = compute[mine & usual] if (mine & usual).any() else compute[mine]
        whole = len(values) // _REFERENCE_STEPS * _REFERENCE_STEPS
        blocks = values[:whole].reshape(-1, _REFERENCE_STEPS) if whole else values.reshape(1, -1)
        reference[mine] = np.median(blocks, axis=1).min()
    places = np.cumsum([0, *(len(key) for key in keys)])
    return {a.segment: reference[start:stop] for a, (start, stop) in zip(attempts, pairwise(places), strict=True)}


@dataclass(frozen=True)
class Timeline:
    """Time in each state since the begin of the account, as a function of time: linear between knots, which are sorted.

    Attributes:
        time: float64 [knots], seconds since 1970.
        spent: float64 [knots] by state, seconds.
    """

    time: Column
    spent: dict[State, Column]

    def between(self, edges: Column) -> dict[State, Column]:
        """Seconds in each state between consecutive times: float64 [edges - 1]."""
        return {state: np.diff(np.interp(edges, self.time, spent)) for state, spent in self.spent.items()}


def _timeline(ledger: _Ledger) -> Timeline:
    time = np.concatenate([[ledger.begin], *(ends for ends, _ in ledger.pieces)])
    spent = {}
    for state in State:
        parts = [states.get(state, np.zeros(len(ends))) for ends, states in ledger.pieces]
        spent[state] = np.cumsum(np.concatenate([[0.0], *parts]))
    return Timeline(time, spent)


def goodput(run: RunDir, shown: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> GoodputReport | None:
    """The account of a run; None if it was never started. `shown` may wrap the lines in a progress bar."""
    found = account(run, read_history(run, shown))
    return None if found is None else found[0]


def account(run: RunDir, history: StartHistory) -> tuple[GoodputReport, Timeline] | None:
    """The account of a run whose starts were read, and its states over time; None if it was never started."""
    if not history.attempts:
        return None
    ledger, incidents = _divide(history)
    _charge(history, incidents)
    states = ledger.states
    wall = ledger.at - ledger.begin
    available = wall - states[State.QUEUED]
    kept = [(attempt.steps, kept_steps(history, attempt)) for attempt in history.attempts]
    tokens = int(sum(steps.tokens[mask].sum() for steps, mask in kept))
    mfus = np.concatenate([steps.mfu[mask] for steps, mask in kept])
    mfu = float(np.nanmedian(mfus)) if np.isfinite(mfus).any() else None
    productive, share = states[State.STEP_KEPT] + states[State.STEP_SLOW], _ratio(states[State.STEP_KEPT], wall)
    ended = [incident.recovery_seconds for incident in incidents if incident.over]
    mtti = available / len(incidents) if incidents else None
    iterations = np.concatenate([attempt.steps.iteration for attempt in history.attempts])
    typical = float(np.median(iterations)) if len(iterations) else None
    saves, configured = _saves(history), _configured_interval(run, history, typical)
    report = GoodputReport(
        begin=ledger.begin,
        end=ledger.at,
        wall_seconds=wall,
        states=states,
        goodput=share,
        runtime_goodput=_ratio(states[State.STEP_KEPT], available),
        ettr=_ratio(productive, available),
        ettr_queued=_ratio(productive, wall),
        tokens=tokens,
        tokens_lost=int(sum(steps.tokens[~mask].sum() for steps, mask in kept)),
        tokens_per_day=_ratio(tokens * 86_400.0, wall),
        mfu=mfu,
        mfu_effective=None if mfu is None else mfu * share,
        incidents=incidents,
        mtti_seconds=mtti,
        mttr_seconds=sum(ended) / len(ended) if ended else None,
        saves=saves,
        unprotected=_unprotected(history, configured),
        interval=_interval(configured, mtti, saves, typical),
        damaged=Damaged(lines=history.damaged_lines, files=history.damaged_files),
    )
    return report, _timeline(ledger)


def _saves(history: StartHistory) -> Saves:
    blocks = np.concatenate([a.steps.checkpoint[a.steps.checkpoint > 0] for a in history.attempts])
    took = [seconds for attempt in history.attempts for _, seconds in attempt.saves]
    return Saves(
        count=len(took),
        block_seconds=float(blocks.mean()) if len(blocks) else None,
        seconds=sum(took) / len(took) if took else None,
    )


def _unprotected(history: StartHistory, configured: float | None) -> UnprotectedTime:
    stretches: list[float] = []
    for attempt in history.attempts:
        if attempt.ready is not None:
            end = attempt.progress
            times = [attempt.ready, *(time for time, _ in attempt.saves if attempt.ready < time < end), end]
            stretches += [stop - start for start, stop in pairwise(times)]
    beyond = None if configured is None else sum(max(0.0, s - configured) ** 2 / 2 for s in stretches)
    return UnprotectedTime(longest_seconds=max(stretches, default=0.0), over_interval=beyond)


def _interval(configured: float | None, mtti: float | None, saves: Saves, typical: float | None) -> Interval:
    if mtti is None or saves.block_seconds is None or typical is None:
        return Interval(configured_seconds=configured, seconds=None, steps=None)
    best = max(math.sqrt(2 * mtti * saves.block_seconds), saves.seconds or 0.0)
    return Interval(configured_seconds=configured, seconds=best, steps=max(1, round(best / typical)))


def _configured_interval(run: RunDir, history: StartHistory, typical: float | None) -> float | None:
    """The configured interval between saves in seconds, at the typical pace."""
    batches = [attempt.steps.batch[-1] for attempt in history.attempts if len(attempt.steps)]
    consumed = [attempt.steps.consumed[-1] for attempt in history.attempts if len(attempt.steps)]
    try:
        config, _ = load_recorded(run.config)
    except UserError:
        return None
    if typical is None or not batches:
        return None
    every, schedule = config.save_every(int(consumed[-1])), config.schedule
    samples = schedule.samples(every) if every.unit == "step" else schedule.lengths.interval(every)
    return samples / float(batches[-1]) * typical


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def headline(found: GoodputReport) -> str:
    """The account in one line."""
    interrupted = len(found.incidents)
    return (
        f"goodput {found.goodput:.1%} of {human_time(found.wall_seconds)}, "
        f"{human_count(found.tokens_per_day)} tokens a day, {interrupted} interruption{'s' * (interrupted != 1)}"
    )


def render(found: GoodputReport) -> str:
    """The account as text for people."""
    wall = found.wall_seconds
    lines = [f"{stamp(found.begin)[:19]} to {stamp(found.end)[:19]} UTC: {human_time(wall)}"]
    for state, seconds in found.states.items():
        lines.append(f"  {state:13} {human_time(seconds):>8} {seconds / max(wall, 1e-9):>7.2%}  {state.meaning}")
    lines.append(
        f"goodput {found.goodput:.2%}; {found.runtime_goodput:.2%} without the queue; "
        f"ETTR {found.ettr:.2%} ({found.ettr_queued:.2%} with the queue)"
    )
    mfu = "" if found.mfu is None else f"; MFU {found.mfu:.1%}, effective {found.mfu_effective:.1%}"
    lines.append(
        f"{human_count(found.tokens)} tokens kept, {human_count(found.tokens_lost)} lost; "
        f"{human_count(found.tokens_per_day)} tokens a day{mfu}"
    )
    for incident in found.incidents:
        over = f"{human_time(incident.recovery_seconds)} to resume" if incident.over else "training has not resumed"
        lines.append(
            f"  {stamp(incident.time)[:19]} {incident.kind} after step {incident.step:_}: {incident.cause}; "
            f"{over}, {incident.lost_steps:_} steps lost, cost {human_time(incident.cost_seconds)}"
        )
    if found.mtti_seconds is not None:
        repair = "" if found.mttr_seconds is None else f", resumed after {human_time(found.mttr_seconds)} (MTTR)"
        lines.append(f"interrupted every {human_time(found.mtti_seconds)} (MTTI){repair}")
    lines += _render_saves(found)
    if found.damaged.lines:
        lines.append(f"damaged lines of the journal and the metrics, passed over: {found.damaged.lines:_}")
    return "\n".join([*lines, *(f"left out: {text}" for text in found.damaged.files)])


def _render_saves(found: GoodputReport) -> Iterator[str]:
    saves, interval, unprotected = found.saves, found.interval, found.unprotected
    if saves.seconds is not None:
        block = (
            f", training waits {human_time(saves.block_seconds)} for each" if saves.block_seconds is not None else ""
        )
        yield f"{saves.count:_} saves of {human_time(saves.seconds)}{block}"
    if interval.configured_seconds is not None and (over := unprotected.over_interval) is not None:
        unit, size = ("h", 3600) if over >= 3600**2 else ("min", 60) if over >= 60**2 else ("s", 1)
        yield (
            f"saves are due every {human_time(interval.configured_seconds)}; the longest stretch without one was "
            f"{human_time(unprotected.longest_seconds)} "
            f"(unprotected integral {human_count(over / size**2)} {unit} x {unit})"
        )
    if interval.seconds is not None:
        yield f"recommended interval, sqrt(2 MTTI block): {human_time(interval.seconds)}, {interval.steps:_} steps"
