"""The stream that trackers show: the kept line of a run's record as values.

Names are chosen so that their alphabetical order, in which trackers list them, is also that of interest: `loss/...`,
`optimizer/...`, `perplexity/...` of losses, `score/...` (evaluations), `speed/...`, `stderr/...` (of the scores),
`training/...`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_pretrain.run import journal, lineage
from fsdp_pretrain.run.files import RunDir, seconds_of
from fsdp_pretrain.run.metrics import METRICS, records
from fsdp_pretrain.run.step_record import StepRecord

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
"""Attributes of a `StepRecord`, by the name of their curve."""
_DETAILS = ("optimizer/group_", "speed/seconds/", "stderr/")
"""How the names of values begin that are shown only with `record.details`."""


@dataclass(frozen=True)
class PointValues:
    """Finite values by name at a step; `time` is seconds since 1970."""

    step: int
    time: float
    values: dict[str, float]


class RecordStream:
    """Reads the points of a run's kept line, from the beginning, with or without details."""

    def __init__(self, run: RunDir, *, details: bool) -> None:
        self._run, self._left_out = run, () if details else _DETAILS
        self._line = lineage.line(lineage.nodes(run))
        self._offsets: dict[Path, int] = {}
        self._entries: list[dict[str, Any]] = []

    def read(self) -> Iterator[PointValues]:
        """The points added since the last call: steps, then evaluations."""
        for point in self._read():
            shown = {name: value for name, value in point.values.items() if not name.startswith(self._left_out)}
            yield replace(point, values=shown)

    def _read(self) -> Iterator[PointValues]:
        for part in self._line:
            path = self._run.segment(part.segment) / METRICS
            for record, behind in records(path, self._offsets.get(path, 0)):
                self._offsets[path] = behind
                if part.after < record.step <= part.until:
                    yield step_values(record)
        path, before = self._run.journal, len(self._entries)
        for entry, behind in journal.entries(path, self._offsets.get(path, 0)):
            self._offsets[path] = behind
            self._entries.append(entry)
        new = {id(entry) for entry in self._entries[before:]}
        for entry in journal.of_kind(lineage.drop_abandoned(self._entries), "eval"):
            if id(entry) in new:
                yield _scores(entry)


def step_values(record: StepRecord) -> PointValues:
    """The values of a step."""
    values: dict[str, float | None] = {"loss/training": record.loss.mean}
    if len(record.sources) > 1:
        values |= {f"loss/training/{source}": loss.mean for source, loss in record.sources.items()}
    values |= {f"loss/heldout/{source}": loss.mean for source, loss in (record.heldout or {}).items()}
    values |= {name.replace("loss", "perplexity", 1): _perplexity(loss) for name, loss in values.items()}
    values |= {name: getattr(record, attribute) for name, attribute in _VALUES.items()}
    values |= {f"speed/seconds/{part}": seconds for part, seconds in record.seconds}
    for name, group in (record.groups or {}).items():
        values |= {f"optimizer/group_{statistic}/{name}": value for statistic, value in group}
    values |= {f"observed/{name}": value for name, value in record.observed.items()}
    return PointValues(record.step, seconds_of(record.time) or 0.0, _finite(values))


def _perplexity(loss: float | None) -> float | None:
    return math.exp(loss) if loss is not None and loss < 700 else None  # as a double, e^709 is the last


def _scores(entry: dict[str, Any]) -> PointValues:
    values = {}
    for task, metrics in entry["scores"].items():
        for metric, value in metrics.items():
            kind = "stderr" if metric.endswith("_stderr") else "score"
            values[f"{kind}/{metric.removesuffix('_stderr')}/{task}"] = value
    return PointValues(entry["step"], seconds_of(entry["time"]) or 0.0, _finite(values))


def _finite(values: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)}
