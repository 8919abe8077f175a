"""Every recorded start of a run: when it was launched, connected and ready, its steps, and how it ended.

It is read only from files of the trainer, the launcher and the watchdog, so the same record always gives the same
history. `goodput` turns it into a time account.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdp_pretrain.errors import Exit

from . import environment, exit_intent, journal, lineage, status
from .environment import Environment
from .files import RunDir, seconds_of
from .metrics import METRICS
from .step_columns import StepColumns, read_steps

_CLEAN = (Exit.COMPLETE, Exit.RESUME)
_DECLARING = frozenset(("hang", "rank-died"))
"""Detectors whose alarms declare the end of a start."""


class Pause(NamedTuple):
    """A pause by `control pause`."""

    begin: float  # this and the next: seconds since 1970
    end: float | None  # None: the start ended in it, or is still paused


@dataclass(frozen=True)
class Start:
    """A start of the main job. Times are seconds since 1970."""

    segment: int
    launched: float  # when its process started
    connected: float  # when all ranks had connected and the segment was created
    ready: float | None  # when the first step started, if it did
    steps: StepColumns
    saves: list[float]  # seconds that completed checkpoints took
    pauses: list[Pause]  # those after its last recorded step; of the others, steps have the time
    end: float  # its last sign of life
    closed: bool  # it, the watchdog or the launcher recorded its end
    clean: bool  # it stopped on request, or completed the run
    code: int | None  # the exit code it recorded
    cause: str  # why it ended, as recorded

    @property
    def progress(self) -> float:
        """When the last recorded step ended; without steps, when it was ready or connected."""
        begun = self.connected if self.ready is None else self.ready
        return begun + float(self.steps.seconds.sum())


@dataclass(frozen=True)
class StartHistory:
    """All starts of a run, oldest first, and what happened between them."""

    starts: list[Start]  # since the beginning of the run, or of the fork
    nodes: list[lineage.LineageNode]
    launches: list[float]  # when a launcher started the job
    restarts: list[float]  # when it started the ranks again


def read_history(run: RunDir, shown: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> StartHistory:
    """Read the starts of a run from its record; `shown` may wrap metrics lines in a progress bar.

    Starts whose environment is damaged are left out; `fsdp-pretrain status` reports them.
    """
    nodes = lineage.nodes(run)
    first = max((node.segment for node in nodes if node.kind == "fork"), default=0)  # earlier segments are the parent's
    entries, newest = journal.read(run), status.read(run)
    known = {number: environment.view(run, number) for path in run.segments if (number := int(path.name)) >= first}
    begun = {number: start for number, start in known.items() if seconds_of(start.time) is not None}
    heartbeats = {state.segment: seconds_of(state.heartbeat) for state in (newest, newest.of_run)}
    connected = [seconds_of(start.time) or 0.0 for start in begun.values()]
    starts = list[Start]()
    for number, until in zip(begun, [*connected[1:], math.inf], strict=False):
        steps = read_steps(run.segment(number) / METRICS, shown)
        starts.append(_start(run, number, begun[number], entries, steps, heartbeats.get(number), until))
    forked = (at for at, entry in enumerate(entries) if entry["kind"] == "fork" and entry.get("segment") == first)
    own = entries[next(forked, 0) :]  # the entries before are the parent's
    launches, restarts = (
        sorted(seconds_of(entry["time"]) or 0.0 for entry in own if entry["kind"] == kind)
        for kind in ("launch", "restart")
    )
    return StartHistory(_until_complete(starts, nodes), nodes, launches, restarts)


def _until_complete(starts: list[Start], nodes: list[lineage.LineageNode]) -> list[Start]:
    """Drop starts after the run was complete that trained nothing: the account ends with the run."""
    left = max((node.segment for node in nodes if node.kind in lineage.ABANDONING), default=0)
    trained = max((start.segment for start in starts if start.steps.count), default=0)
    for number, start in enumerate(starts):
        if start.segment >= max(left, trained) and start.clean and start.code == Exit.COMPLETE:
            return starts[: number + 1]
    return starts


def _start(
    run: RunDir,
    number: int,
    begun: Environment,
    entries: list[dict[str, Any]],
    steps: StepColumns,
    heartbeat: float | None,
    until: float,
) -> Start:
    """Build one start from the journal and its own files; `until` is when the next one connected."""
    connected = seconds_of(begun.time) or 0.0
    around = [(seconds_of(e["time"]) or 0.0, e) for e in entries if e.get("segment") in (number, None)]
    mine = [(time, entry) for time, entry in around if entry.get("segment") == number]
    ready = next((time for time, entry in mine if entry["kind"] == "ready"), None)
    if ready is None and steps.count:  # the journal entry was lost
        ready = float(steps["written"][0] - steps.seconds[0])
    stop = next((entry for _, entry in reversed(mine) if entry["kind"] == "stop"), None)
    intent = exit_intent.read(run.segment(number))
    code = intent.code if intent is not None else (stop or {}).get("code")
    progress = (ready or connected) + float(steps.seconds.sum())
    declared, declaring = next(((t, e) for t, e in around if _declares(e) and progress <= t <= until), (None, None))
    signs = [progress, *(time for time, _ in mine), heartbeat, declared, seconds_of(intent and intent.time)]
    end = min(max(sign for sign in signs if sign is not None), max(until, progress))
    cause = (intent and intent.reason) or (stop or {}).get("text") or str((declaring or {}).get("text", ""))
    return Start(
        segment=number,
        launched=seconds_of(begun.launched) or connected,
        connected=connected,
        ready=ready,
        steps=steps,
        pauses=_last_pauses(mine, steps),
        saves=[e["seconds"] for _, e in mine if e["kind"] == "checkpoint" and journal.is_whole(e)],
        end=end,
        closed=intent is not None or declared is not None,
        clean=stop is not None and "step" in stop and code in _CLEAN,
        code=code,
        cause=cause or "ended without reporting a reason",
    )


def _last_pauses(mine: list[tuple[float, dict[str, Any]]], steps: StepColumns) -> list[Pause]:
    pauses, last = list[Pause](), steps["step"][-1] if steps.count else -1
    for time, entry in mine:
        if entry.get("did") == "pause" and entry.get("step", -1) >= last:
            pauses.append(Pause(time, None))
        elif entry.get("did") == "resume" and pauses and pauses[-1].end is None:
            pauses[-1] = Pause(pauses[-1].begin, time)
    return pauses


def _declares(entry: dict[str, Any]) -> bool:
    if entry["kind"] == "alarm":
        return str(entry.get("key", "")).partition("/")[0] in _DECLARING and entry.get("state") == "open"
    return entry["kind"] in ("stop", "restart")


def kept_steps(nodes: list[lineage.LineageNode], segment: int, steps: StepColumns) -> NDArray[np.bool_]:
    """Which steps of a segment are on the kept line."""
    kept = np.zeros(steps.count, dtype=np.bool_)
    for part in lineage.line(nodes):
        if part.segment == segment:
            kept |= (steps["step"] > part.after) & (steps["step"] <= part.until)
    return kept
