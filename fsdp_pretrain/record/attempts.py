"""What the record says of every start: when it was launched, connected, ready, what each step took, how it ended.

Read from what the trainer, the launcher and the watchdog left behind, and from nothing else, so that the same record
always gives the same answer. `goodput` makes an account of it.
"""

from __future__ import annotations

import contextlib
import io
import math
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from . import environment, exit_intent, journal, lineage, state_files
from .environment import Environment
from .files import RunDir, replace_file, seconds_of
from .metrics import METRICS, records
from .status import Status
from .step_record import StepRecord

_CLEAN = (0, 75)
_DECLARING = frozenset(("hang", "rank-died"))
"""Alarms of these detectors say that a start is over."""
_SAVING = frozenset(("checkpoint", "checkpoint-failed"))
_READ, _TAIL, _WORTH_KEEPING = "steps.npz", 2048, 1000

Column = NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """Columns of a segment's metrics, one row per record, all float64.

    Attributes:
        step: number of the optimiser step.
        tokens: trained by it.
        iteration, data, checkpoint: seconds; see `StepRecord`.
        skipped: 1 where the update was skipped.
        batch, length: samples of the step and tokens of a sample.
        mfu: NaN where it is not known.
        written: when the record was written, seconds since 1970.
    """

    step: Column
    tokens: Column
    iteration: Column
    data: Column
    checkpoint: Column
    skipped: Column
    batch: Column
    length: Column
    mfu: Column
    written: Column

    def __len__(self) -> int:
        return len(self.step)

    @property
    def compute(self) -> Column:
        """Seconds of the step itself: without waiting for data and saves."""
        return self.iteration - self.data - self.checkpoint

    @property
    def missing(self) -> Column:
        """Seconds before each step that no record accounts for: lines that were lost, by the times of the others."""
        lost = np.diff(self.step, prepend=self.step[:1] - 1) > 1
        return np.where(lost, np.maximum(np.diff(self.written, prepend=self.written[:1]) - self.iteration, 0.0), 0.0)


@dataclass(frozen=True)
class Attempt:
    """A start of the main job. Times are seconds since 1970.

    Attributes:
        segment: its number.
        launched: when its process began.
        connected: when all ranks had met, and the segment was opened.
        ready: when the first step began; None if it did not come to that.
        steps: what it trained.
        saves: (time, seconds it took) of the checkpoints it completed.
        saving: when its last save after its last step had ended, well or not; None if there was none.
        declared: when its end was declared: by itself, the watchdog or the launcher; None if nobody did.
        end: the last that is known of it.
        closed: it, or the launcher, said that it has ended.
        clean: it stopped as it was asked to, or was complete.
        code: exit code it recorded.
        cause: why it ended, as recorded.
        host: of rank 0.
        world: number of ranks.
    """

    segment: int
    launched: float
    connected: float
    ready: float | None
    steps: Steps
    saves: list[tuple[float, float]]
    saving: float | None
    declared: float | None
    end: float
    closed: bool
    clean: bool
    code: int | None
    cause: str
    host: str
    world: int

    @property
    def progress(self) -> float:
        """When the last recorded step ended; the beginning of the wait for the first if there is none."""
        begun = self.connected if self.ready is None else self.ready
        return begun + float(self.steps.iteration.sum() + self.steps.missing.sum())


@dataclass(frozen=True)
class History:
    """All starts of a run, oldest first, and what happened between them.

    Attributes:
        attempts: those since the run, or the fork, began.
        nodes: the lineage.
        launches: times at which a launcher began, or began again.
        damaged_lines: of the journal and the metrics, that were passed over.
        damaged_files: what is wrong with small files, whose starts are left out.
    """

    attempts: list[Attempt]
    nodes: list[lineage.Node]
    launches: list[float]
    damaged_lines: int
    damaged_files: list[str]


def read_steps(path: Path, shown: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> tuple[Steps, int]:
    """The columns of a metrics file, and how many lines were passed over as damaged.

    What was read is kept beside the file, so that the next call reads only what was added.

    Args:
        path: the file.
        shown: may wrap the lines in a progress bar.
    """
    table, offset, before = _read_before(path)
    rows, damaged, among = list[tuple[float, ...]](), list[bytes](), 0
    for record, behind in shown(records(path, offset, on_damaged=damaged.append)):
        rows.append(_row(record))
        offset, among = behind, len(damaged)
    if rows:
        table = np.concatenate([table, np.array(rows, dtype=np.float64)])
    if len(rows) >= _WORTH_KEEPING:
        _keep(path, table, offset, before + among)
    return Steps(*table.T), before + len(damaged)


def unread_bytes(run: RunDir) -> int:
    """Bytes of metrics that `read_steps` has not seen yet."""
    return sum(
        (path / METRICS).stat().st_size - _read_before(path / METRICS)[1]
        for path in run.segments
        if (path / METRICS).exists()
    )


def _read_before(path: Path) -> tuple[Column, int, int]:
    """(rows, offset behind them, damaged lines up to there) of an earlier reading of a metrics file; nothing if the
    file is another now."""
    nothing = np.zeros((0, len(fields(Steps)))), 0, 0
    try:
        with np.load(path.with_name(_READ), allow_pickle=False) as kept:
            table, offset, tail = kept["table"], int(kept["offset"]), kept["tail"].tobytes()
            damaged = int(kept["damaged"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return nothing
    if table.shape[1:] != (len(fields(Steps)),) or _tail(path, offset) != tail:
        return nothing
    return table, offset, damaged


def _tail(path: Path, offset: int) -> bytes:
    """The bytes before an offset, by which a file is known again: its lines are never changed."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, offset - _TAIL))
            return file.read(min(offset, _TAIL))
    except OSError:
        return b""


def _keep(path: Path, table: Column, offset: int, damaged: int) -> None:
    content, tail = io.BytesIO(), np.frombuffer(_tail(path, offset), dtype=np.uint8)
    np.savez(content, table=table, offset=offset, tail=tail, damaged=damaged)
    with contextlib.suppress(OSError):  # looking must work on a full or read-only disk too
        replace_file(path.with_name(_READ), content.getvalue())


def _row(record: StepRecord) -> tuple[float, ...]:
    return (
        record.step,
        record.batch * record.sequence_length,
        record.seconds.iteration,
        record.seconds.data,
        record.seconds.checkpoint,
        record.skipped,
        record.batch,
        record.sequence_length,
        math.nan if record.mfu is None else record.mfu,
        seconds_of(record.time) or math.nan,
    )


def read_history(run: RunDir, shown: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> History:
    """Everything the record of a run says of its starts.

    Args:
        run: the run directory.
        shown: may wrap the lines of a metrics file in a progress bar.
    """
    nodes = lineage.nodes(run)
    first = max((node.segment for node in nodes if node.kind == "fork"), default=0)  # what was before is the parent's
    damaged, wrong = list[bytes](), list[str]()
    entries = [entry for entry, _ in journal.entries(run.journal, on_damaged=damaged.append)]
    status = state_files.view(run.status, Status) or Status()
    starts: list[tuple[int, Path, Environment]] = []
    for path in run.segments:
        try:
            begun = environment.read(run, int(path.name))
        except UserError as error:
            wrong.append(error.cause)
            continue
        if int(path.name) >= first and begun is not None and seconds_of(begun.time) is not None:
            starts.append((int(path.name), path, begun))
    connected = [seconds_of(begun.time) for _, _, begun in starts]
    attempts, lines = list[Attempt](), len(damaged)
    for at, (number, path, begun) in enumerate(starts):
        until = connected[at + 1] if at + 1 < len(starts) else None
        mine = [entry for entry in entries if entry.get("segment") == number]
        around = [entry for entry in entries if entry.get("segment") in (number, None)]
        steps, passed_over = read_steps(path / METRICS, shown)
        lines += passed_over
        heartbeat = seconds_of(status.heartbeat) if status.segment == number else None
        attempts.append(_attempt(number, path, begun, mine, around, steps, heartbeat, until or math.inf))
    told = [seconds_of(entry["time"]) for entry in entries if entry["kind"] in ("launch", "restart")]
    return History(attempts, nodes, sorted(time for time in told if time is not None), lines, wrong)


def _attempt(
    number: int,
    path: Path,
    begun: Environment,
    mine: list[dict[str, Any]],
    around: list[dict[str, Any]],
    steps: Steps,
    heartbeat: float | None,
    until: float,
) -> Attempt:
    """One start, from the journal entries of its segment (`mine`) and also those of no segment (`around`)."""
    connected = seconds_of(begun.time) or 0.0
    times = [(seconds_of(entry["time"]) or 0.0, entry) for entry in mine]
    ready = next((time for time, entry in times if entry["kind"] == "ready"), None)
    if ready is None and len(steps):  # the entry was lost
        ready = float(steps.written[0] - steps.iteration[0])
    stop = next((entry for _, entry in reversed(times) if entry["kind"] == "stop"), None)
    intent = exit_intent.read(path)
    code = intent.code if intent is not None else (stop or {}).get("code")
    progress = (ready or connected) + float(steps.iteration.sum() + steps.missing.sum())
    ends = [(seconds_of(e["time"]) or 0.0, e) for e in around if _declares(e)]
    declared = next((time for time, _ in ends if progress <= time <= until), None)
    signs = [progress, *(time for time, _ in times), heartbeat, declared, seconds_of(intent and intent.time)]
    saves = [(seconds_of(entry["time"]) or 0.0, entry["seconds"]) for entry in journal.of_kind(mine, "checkpoint")]
    after = [time for time, entry in times if entry["kind"] in _SAVING and time > progress]
    cause = (intent and intent.reason) or (stop or {}).get("text") or _said(ends, declared)
    return Attempt(
        segment=number,
        launched=seconds_of(begun.launched) or connected,
        connected=connected,
        ready=ready,
        steps=steps,
        saves=saves,
        saving=after[-1] if after and stop is not None else None,
        declared=declared,
        end=min(max(sign for sign in signs if sign is not None), max(until, progress)),
        closed=intent is not None or declared is not None,
        clean=stop is not None and "step" in stop and code in _CLEAN,
        code=code,
        cause=cause or "ended without a word",
        host=begun.host,
        world=begun.world.size if begun.world is not None else 1,
    )


def _declares(entry: dict[str, Any]) -> bool:
    if entry["kind"] == "alarm":
        return str(entry.get("key", "")).partition("/")[0] in _DECLARING and entry.get("state") == "open"
    return entry["kind"] in ("stop", "restart")


def _said(ends: list[tuple[float, dict[str, Any]]], declared: float | None) -> str:
    return next((str(entry["text"]) for time, entry in ends if time == declared), "")


def kept_steps(history: History, attempt: Attempt) -> NDArray[np.bool_]:
    """Which steps of a start are on the kept line."""
    parts = [part for part in lineage.line(history.nodes) if part.segment == attempt.segment]
    kept = np.zeros(len(attempt.steps), dtype=np.bool_)
    for part in parts:
        kept |= (attempt.steps.step > part.after) & (attempt.steps.step <= part.until)
    return kept


def left_by(history: History, attempt: Attempt) -> NDArray[np.int64]:
    """For each step of a start, the segment that first went back behind it; 0 where none did."""
    found = np.zeros(len(attempt.steps), dtype=np.int64)
    for node in sorted(history.nodes, key=lambda node: node.segment):
        if node.segment <= attempt.segment:
            continue
        part = next((p for p in lineage.line(history.nodes, node.segment) if p.segment == attempt.segment), None)
        gone = attempt.steps.step > (part.until if part is not None else -math.inf)
        found[gone & (found == 0)] = node.segment
    return found
