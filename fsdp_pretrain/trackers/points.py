"""The stream that trackers show: the kept line of a run's record as typed points, from any position on.

Names are chosen so that their alphabetical order, in which trackers list them, is that of interest: `loss`,
`optimizer/...`, `score/...` (evaluations), `speed/...`, `stderr/...` (of the scores), `training/...`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fsdp_pretrain.record import journal, lineage
from fsdp_pretrain.record.files import RunDir, seconds_of
from fsdp_pretrain.record.metrics import METRICS, records
from fsdp_pretrain.record.step_record import LossSum, StepRecord

_VALUES = {
    "optimizer/grad_norm": "grad_norm",
    "optimizer/lr": "lr",
    "optimizer/loss_scale": "loss_scale",
    "speed/tokens_per_second": "tokens_per_second",
    "speed/mfu": "mfu",
    "speed/memory_bytes": "memory_bytes",
    "training/batch": "batch",
    "training/consumed": "consumed",
    "training/tokens": "tokens",
}
"""Name -> attribute of a `StepRecord`."""
_ALL = {"subset": "training", "source": "(mixture)"}
"""Context of the training loss. Aim's page of a run sorts contexts by their text, its page of runs by a hash of them,
which is small for these words: the training loss is first on both."""
_INCIDENTS = frozenset(
    "alarm avoid-hosts checkpoint-failed checkpoint-fallback checkpoint-late checkpoint-missing checkpoint-rejected "
    "checkpoint-room data-read eval-failed eval-late eval-refused eval-verdict health health-again health-rollback "
    "health-skip on-commit-failed restart rollback".split()
)


@dataclass(frozen=True)
class Scalar:
    """A value of a curve, which is identified by name and context."""

    name: str
    value: float
    context: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Name and context as one path, for trackers without contexts."""
        return "/".join((self.name, *(value for value in self.context.values() if value != _ALL["source"])))


@dataclass(frozen=True)
class PointValues:
    """Values at a step, of training or of an evaluation; `time` is seconds since 1970."""

    step: int
    time: float
    scalars: list[Scalar]


@dataclass(frozen=True)
class StepText:
    """All entries of the journal at a step; `incidents` or, under `journal`, everything."""

    step: int
    time: float  # of the last one, seconds since 1970
    name: str
    lines: list[str]


Point: TypeAlias = PointValues | StepText


class RecordStream:
    """Reads the points of a run's kept line.

    Attributes:
        offsets: of the record's files (relative paths), up to which points were read.
    """

    def __init__(self, run: RunDir, offsets: Mapping[str, int]) -> None:
        self._run, self.offsets = run, dict(offsets)
        self._line = lineage.line(lineage.nodes(run))
        self._entries: list[tuple[dict[str, Any], int]] = []  # of the journal, each with the offset after it

    def read(self) -> Iterator[Point]:
        """What was added since the last call. `offsets` moves with every point that is taken."""
        for part in self._line:
            path = self._run.segment(part.segment) / METRICS
            name = self._name(path)
            for record, behind in records(path, self.offsets.get(name, 0)):
                self.offsets[name] = behind
                if part.after < record.step <= part.until:
                    yield _values(record)
        yield from self._read_journal()

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._run.path))

    def _read_journal(self) -> Iterator[Point]:
        path, name = self._run.journal, self._name(self._run.journal)
        before = self.offsets.get(name, 0)
        self._entries += journal.entries(path, self._entries[-1][1] if self._entries else 0)
        if not self._entries or self._entries[-1][1] <= before:
            return
        added = [entry for entry, behind in self._entries if behind > before]
        known = [entry for entry, _ in self._entries]
        yield from _texts(known, {id(entry) for entry in added})
        new = {id(entry) for entry in added}
        for entry in journal.of_kind(lineage.drop_abandoned(known), "eval"):
            if id(entry) in new:
                yield _scores(entry)
        self.offsets[name] = self._entries[-1][1]


def _values(record: StepRecord) -> PointValues:
    scalars = [*_losses({_ALL["source"]: record.loss}, _ALL["subset"])]
    if len(record.sources) > 1:
        scalars += _losses(record.sources, _ALL["subset"])
    scalars += _losses(record.heldout or {}, "heldout")
    values = {name: getattr(record, attribute) for name, attribute in _VALUES.items()}
    scalars += [Scalar(name, value) for name, value in values.items() if value is not None]
    scalars += _groups(record)
    scalars += [Scalar("speed/seconds", seconds, {"part": part}) for part, seconds in record.seconds]
    return PointValues(record.step, seconds_of(record.time) or 0.0, scalars)


def _losses(losses: Mapping[str, LossSum], subset: str) -> Iterator[Scalar]:
    for source, loss in losses.items():
        if math.isfinite(loss.mean):
            yield Scalar("loss", loss.mean, {"subset": subset, "source": source})


def _groups(record: StepRecord) -> Iterator[Scalar]:
    for name, group in (record.groups or {}).items():
        for statistic, value in group:
            if value is not None:
                yield Scalar(f"optimizer/group_{statistic}", value, {"group": name})
    if record.maxima is not None:
        for block, score in enumerate(record.maxima.attention_scores):
            if score is not None:
                yield Scalar("training/attention_score_max", score, {"block": str(block)})
        if record.maxima.logit is not None:
            yield Scalar("training/logit_max", record.maxima.logit)


def _scores(entry: dict[str, Any]) -> PointValues:
    scalars = [
        Scalar(_score(metric), value, {"task": task})
        for task, metrics in entry["scores"].items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    ]
    return PointValues(entry["step"], seconds_of(entry["time"]) or 0.0, scalars)


def _score(metric: str) -> str:
    spread = metric.endswith("_stderr")
    return f"stderr/{metric.removesuffix('_stderr')}" if spread else f"score/{metric}"


def _line(entry: dict[str, Any]) -> str:
    """What happened first: trackers show only the beginning of a line."""
    by = f" ({entry['by']})" if entry.get("by") else ""
    return f"{entry['kind']}: {entry['text']}{by}, {entry['time'][:19].replace('T', ' ')}"


def _texts(entries: list[dict[str, Any]], added: set[int]) -> Iterator[StepText]:
    """The texts that contain an added entry. An entry without a step is at the step of the one before it."""
    lines: dict[tuple[str, int], list[str]] = {}
    changed: dict[tuple[str, int], float] = {}
    step = 0
    for entry in entries:
        step = entry.get("step") or step
        for name in ("incidents", "journal") if entry["kind"] in _INCIDENTS else ("journal",):
            lines.setdefault((name, step), []).append(_line(entry))
            if id(entry) in added:
                changed[name, step] = seconds_of(entry["time"]) or 0.0
    for (name, at), time in changed.items():
        yield StepText(at, time, name, lines[name, at])
