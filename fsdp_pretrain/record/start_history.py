"""Every start of a run in its record: when it was launched, connected and ready, its steps, and how it ended.

Uses only files of the trainer, the launcher and the watchdog, so the same record always gives the same answer.
`goodput` turns it into an account.
"""

from __future__ import annotations

import contextlib
import io
import math
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdp_pretrain.errors import Exit, UserError

from . import environment, exit_intent, journal, lineage, status
from .environment import Environment
from .files import RunDir, replace_file, seconds_of
from .metrics import METRICS, records
from .step_record import ParameterGroup, StepRecord

_CLEAN = (0, 75)
_DECLARING = frozenset(("hang", "rank-died"))
"""Detectors whose alarms declare the end of a start."""
_SAVING = frozenset(("checkpoint", "checkpoint-failed"))
_HOLDING = ("pause", "resume")
"""What was done, in entries of kind `control`: the ranks were held, and released."""
_READ, _TAIL, _WORTH_KEEPING, _CHUNK = "steps.npz", 2048, 1000, 10_000

Column = NDArray[np.float64]


@dataclass(frozen=True)
class StepColumns:
    """Columns of a segment's metrics, one row per record, all float64, NaN where a record has no finite value; see
    `StepRecord`."""

    step: Column
    tokens: Column  # of the step
    iteration: Column  # seconds, as are the next three
    data: Column
    checkpoint: Column
    heldout: Column
    skipped: Column  # 1 where the update was skipped
    batch: Column
    length: Column  # tokens of a sample
    mfu: Column
    written: Column  # seconds since 1970
    consumed: Column  # samples trained after the step
    trained: Column  # tokens, likewise
    loss: Column  # mean, natural log
    grad_norm: Column  # before clipping
    clip: Column
    loss_scale: Column
    lr: Column
    embedding_shrink: Column
    forward_backward: Column  # seconds, as are the next three
    optimizer: Column
    other: Column
    paused: Column
    tokens_per_second: Column
    memory: Column  # bytes
    by_source: dict[str, Column]  # `loss/NAME`, `heldout/NAME`, `share/NAME`: mean losses and planned share of a source
    # and of groups of parameters: `gradient/NAME`, `update/NAME`, `second_moment/NAME`

    def __len__(self) -> int:
        return len(self.step)

    @property
    def compute(self) -> Column:
        """Seconds per step without waiting for data and saves, and without the held-out loss."""
        return self.iteration - self.data - self.checkpoint - self.heldout

    @property
    def missing(self) -> Column:
        """Seconds before each step whose records were lost, from the timestamps of the others."""
        lost = np.diff(self.step, prepend=self.step[:1] - 1) > 1
        known = self.iteration + self.paused
        return np.where(lost, np.maximum(np.diff(self.written, prepend=self.written[:1]) - known, 0.0), 0.0)

    @property
    def seconds(self) -> Column:
        """From the end of the step recorded before to the end of each: also without records, and paused."""
        return self.iteration + self.missing + self.paused


_FIXED = tuple(field.name for field in fields(StepColumns) if field.name != "by_source")


@dataclass(frozen=True)
class Start:
    """A start of the main job. Times are seconds since 1970."""

    segment: int
    launched: float  # when its process started
    connected: float  # when all ranks had connected and the segment was created
    ready: float | None  # when the first step started, if it did
    steps: StepColumns
    saves: list[tuple[float, float]]  # (time, seconds it took) of completed checkpoints
    saving: float | None  # when its last save after its last step ended, successful or not
    paused: float | None  # when a pause after its last step ended, or it was last seen in one
    declared: float | None  # when its end was declared: by itself, the watchdog or the launcher
    end: float  # its last sign of life
    closed: bool  # it, the watchdog or the launcher recorded its end
    clean: bool  # it stopped on request, or was complete
    code: int | None  # the exit code it recorded
    cause: str  # why it ended, as recorded
    host: str  # of rank 0
    world: int  # number of ranks

    @property
    def progress(self) -> float:
        """When the last recorded step ended; without steps, when it was ready or connected."""
        begun = self.connected if self.ready is None else self.ready
        return begun + float(self.steps.seconds.sum())


@dataclass(frozen=True)
class StartHistory:
    """All starts of a run, oldest first, and what happened between them."""

    attempts: list[Start]  # since the start of the run, or of the fork
    nodes: list[lineage.LineageNode]
    launches: list[float]  # when a launcher started or restarted the job
    damaged_lines: int  # of the journal and the metrics; they are skipped
    damaged_files: list[str]  # problems of state files, whose starts are left out


@dataclass(frozen=True)
class _Start:
    """A segment, and when its ranks connected (seconds since 1970)."""

    number: int
    path: Path
    begun: Environment
    connected: float


def read_steps(path: Path, shown: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> tuple[StepColumns, int]:
    """The columns of a metrics file, and the number of damaged lines, which are skipped.

    They are cached beside the file, so the next call reads only new lines. `shown` may wrap the lines in a progress
    bar.
    """
    known, offset, before = _read_before(path)
    parts, rows, damaged, among, read = [known], list[_Row](), list[bytes](), 0, 0
    for record, behind in shown(records(path, offset, on_damaged=damaged.append)):
        rows.append(_row(record))
        offset, among, read = behind, len(damaged), read + 1
        if len(rows) >= _CHUNK:
            parts.append(_table(rows))
            rows = []
    table = _concatenate([*parts, _table(rows)])
    if read >= _WORTH_KEEPING:
        _keep(path, table, offset, before + among)
    fixed = {name: table[name] for name in _FIXED}
    return StepColumns(**fixed, by_source={k: v for k, v in table.items() if k not in fixed}), before + len(damaged)


def unread_bytes(run: RunDir) -> int:
    """Bytes of metrics that `read_steps` has not read yet."""
    files = [path / METRICS for path in run.segments if (path / METRICS).exists()]
    return sum(path.stat().st_size - _read_before(path).offset for path in files)


class _Cache(NamedTuple):
    """The result of reading a metrics file up to a byte offset."""

    table: dict[str, Column]  # by name
    offset: int
    damaged: int


class _Row(NamedTuple):
    """The values of a record: of the columns in `_FIXED`, and by source."""

    values: tuple[float, ...]
    by_source: dict[str, float]


def _read_before(path: Path) -> _Cache:
    """The cache of a metrics file; empty if there is none or it belongs to another file."""
    with contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile):
        with np.load(path.with_name(_READ), allow_pickle=False) as kept:
            table = dict(zip(kept["names"].tolist(), np.ascontiguousarray(kept["table"].T), strict=True))
            found, tail = _Cache(table, int(kept["offset"]), int(kept["damaged"])), kept["tail"].tobytes()
        if set(_FIXED) <= table.keys() and _tail(path, found.offset) == tail:
            return found
    return _Cache(_table([]), 0, 0)


def _tail(path: Path, offset: int) -> bytes:
    """The bytes before an offset, to recognize a file: its lines never change."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, offset - _TAIL))
            return file.read(min(offset, _TAIL))
    except OSError:
        return b""


def _keep(path: Path, table: dict[str, Column], offset: int, damaged: int) -> None:
    content, tail = io.BytesIO(), np.frombuffer(_tail(path, offset), dtype=np.uint8)
    names, columns = np.array(list(table)), np.stack(list(table.values()), axis=1)
    np.savez(content, names=names, table=columns, offset=offset, tail=tail, damaged=damaged)
    with contextlib.suppress(OSError):  # reading must also work on a full or read-only disk
        replace_file(path.with_name(_READ), content.getvalue())


def _table(rows: list[_Row]) -> dict[str, Column]:
    columns = np.array([row.values for row in rows], dtype=np.float64).reshape(-1, len(_FIXED)).T
    table = dict(zip(_FIXED, columns, strict=True))
    for name in dict.fromkeys(name for row in rows for name in row.by_source):
        table[name] = np.array([row.by_source.get(name, math.nan) for row in rows], dtype=np.float64)
    return table


def _concatenate(tables: list[dict[str, Column]]) -> dict[str, Column]:
    """One table of several; NaN where one lacks a column."""
    names = dict.fromkeys(name for table in tables for name in table)
    missing = [np.full(len(table["step"]), math.nan) for table in tables]
    return {
        name: np.concatenate([table.get(name, empty) for table, empty in zip(tables, missing, strict=True)])
        for name in names
    }


def _row(record: StepRecord) -> _Row:
    seconds, ramps = record.seconds, record.ramps
    return _Row(
        (
            record.step,
            record.trained,
            seconds.iteration,
            seconds.data,
            seconds.checkpoint,
            seconds.heldout,
            record.skipped,
            record.batch,
            record.sequence_length,
            _known(record.mfu),
            seconds_of(record.time) or math.nan,
            record.consumed,
            record.tokens,
            record.loss.mean,
            _known(record.grad_norm),
            record.clip,
            _known(record.loss_scale),
            record.lr,
            _known(ramps.embedding_shrink),
            seconds.forward_backward,
            seconds.optimizer,
            seconds.other,
            seconds.paused,
            record.tokens_per_second,
            record.memory_bytes,
        ),
        {
            **{f"loss/{name}": loss.mean for name, loss in record.sources.items()},
            **{f"heldout/{name}": loss.mean for name, loss in (record.heldout or {}).items()},
            **{f"share/{name}": share for name, share in ramps.shares.items()},
            **_of_groups(record.groups or {}),
        },
    )


def _of_groups(groups: dict[str, ParameterGroup]) -> dict[str, float]:
    found = {}
    for name, group in groups.items():
        found[f"gradient/{name}"] = _known(group.grad_norm)
        found[f"update/{name}"] = _known(group.update_ratio)
        found[f"second_moment/{name}"] = _known(group.second_moment_max)
    return found


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def step_values(record: StepRecord) -> tuple[float, ...]:
    """The values of a record in the order of `StepColumns`, without those by source."""
    return _row(record).values


def read_history(
    run: RunDir,
    shown: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    columns: Callable[..., tuple[StepColumns, int]] = read_steps,
) -> StartHistory:
    """Read the starts of a run from its record; `shown` may wrap metrics lines in a progress bar. `columns` replaces
    `read_steps` in a program that has read the metrics already."""
    nodes = lineage.nodes(run)
    first = max((node.segment for node in nodes if node.kind == "fork"), default=0)  # before it: the parent's
    damaged, wrong = list[bytes](), list[str]()
    entries = [entry for entry, _ in journal.entries(run.journal, on_damaged=damaged.append)]
    starts = list[_Start]()
    for path in run.segments:
        try:
            begun = environment.read(run, int(path.name))
        except UserError as error:
            wrong.append(error.cause)
            continue
        connected = seconds_of(begun.time) if begun is not None else None
        if begun is not None and connected is not None and int(path.name) >= first:
            starts.append(_Start(int(path.name), path, begun, connected))
    newest = status.read(run)
    heartbeats = {known.segment: known.heartbeat for known in (newest, newest.of_run)}
    attempts, lines = list[Start](), len(damaged)
    for start, until in zip(starts, [*(later.connected for later in starts[1:]), math.inf], strict=False):
        steps, skipped = columns(start.path / METRICS, shown)
        lines += skipped
        heartbeat = seconds_of(heartbeats.get(start.number))
        attempts.append(_attempt(start, entries, steps, heartbeat, until))
    launches = [seconds_of(entry["time"]) or 0.0 for entry in entries if entry["kind"] in ("launch", "restart")]
    return StartHistory(_until_complete(attempts, nodes), nodes, sorted(launches), lines, wrong)


def _until_complete(attempts: list[Start], nodes: list[lineage.LineageNode]) -> list[Start]:
    """Without starts of a complete run that trained nothing: its time has ended."""
    left = max((node.segment for node in nodes if node.kind in lineage.LEAVING), default=0)
    trained = max((start.segment for start in attempts if len(start.steps)), default=0)
    for number, start in enumerate(attempts):
        if start.segment >= max(left, trained) and start.clean and start.code == Exit.COMPLETE:
            return attempts[: number + 1]
    return attempts


def _attempt(
    start: _Start, entries: list[dict[str, Any]], steps: StepColumns, heartbeat: float | None, until: float
) -> Start:
    """One start, from the journal and its own files; `until` is when the next one connected."""
    connected = start.connected
    around = [(seconds_of(e["time"]) or 0.0, e) for e in entries if e.get("segment") in (start.number, None)]
    mine = [(time, entry) for time, entry in around if entry.get("segment") == start.number]
    ready = next((time for time, entry in mine if entry["kind"] == "ready"), None)
    if ready is None and len(steps):  # the entry was lost
        ready = float(steps.written[0] - steps.seconds[0])
    stop = next((entry for _, entry in reversed(mine) if entry["kind"] == "stop"), None)
    intent = exit_intent.read(start.path)
    code = intent.code if intent is not None else (stop or {}).get("code")
    progress = (ready or connected) + float(steps.seconds.sum())
    end = next(((t, entry) for t, entry in around if _declares(entry) and progress <= t <= until), None)
    declared = end[0] if end is not None else None
    signs = [progress, *(time for time, _ in mine), heartbeat, declared, seconds_of(intent and intent.time)]
    after = [time for time, entry in mine if entry["kind"] in _SAVING and time > progress]
    held = [(time, entry["did"]) for time, entry in mine if entry.get("did") in _HOLDING and time > progress]
    final = min(max(sign for sign in signs if sign is not None), max(until, progress))
    cause = (intent and intent.reason) or (stop or {}).get("text") or (str(end[1]["text"]) if end is not None else "")
    return Start(
        segment=start.number,
        launched=seconds_of(start.begun.launched) or connected,
        connected=connected,
        ready=ready,
        steps=steps,
        saves=[(t, e["seconds"]) for t, e in mine if e["kind"] == "checkpoint" and journal.is_whole(e)],
        saving=after[-1] if after and stop is not None else None,
        paused=(held[-1][0] if held[-1][1] == "resume" else final) if held else None,
        declared=declared,
        end=final,
        closed=intent is not None or declared is not None,
        clean=stop is not None and "step" in stop and code in _CLEAN,
        code=code,
        cause=cause or "ended without reporting a reason",
        host=start.begun.host,
        world=start.begun.world.size if start.begun.world is not None else 1,
    )


def _declares(entry: dict[str, Any]) -> bool:
    if entry["kind"] == "alarm":
        return str(entry.get("key", "")).partition("/")[0] in _DECLARING and entry.get("state") == "open"
    return entry["kind"] in ("stop", "restart")


def kept_steps(history: StartHistory, attempt: Start) -> NDArray[np.bool_]:
    """Which steps of a start are on the kept line."""
    parts = [part for part in lineage.line(history.nodes) if part.segment == attempt.segment]
    kept = np.zeros(len(attempt.steps), dtype=np.bool_)
    for part in parts:
        kept |= (attempt.steps.step > part.after) & (attempt.steps.step <= part.until)
    return kept


def left_by(history: StartHistory, attempt: Start) -> NDArray[np.int64]:
    """For each step of a start, the first later segment that abandoned it; 0 where none did."""
    found = np.zeros(len(attempt.steps), dtype=np.int64)
    for node in sorted(history.nodes, key=lambda node: node.segment):
        if node.segment <= attempt.segment:
            continue
        part = next((p for p in lineage.line(history.nodes, node.segment) if p.segment == attempt.segment), None)
        gone = attempt.steps.step > (part.until if part is not None else -math.inf)
        found[gone & (found == 0)] = node.segment
    return found
