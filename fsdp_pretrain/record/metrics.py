"""One metrics record per optimiser step, and how the records of all starts make one curve."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .files import RunDir, read_lines


def mean_loss(record: dict[str, Any]) -> float:
    """Mean cross-entropy of a record, natural log per target token; NaN if it was not finite."""
    loss = record["loss"]
    return loss["sum"] / loss["count"] if loss["sum"] is not None and loss["count"] else math.nan


def json_number(value: float) -> float | None:
    """A float for the record; None where JSON has no number (NaN, infinity)."""
    return value if math.isfinite(value) else None


def find_step(run: RunDir, step: int) -> list[tuple[dict[str, Any], int | None]]:
    """Every record of a step, one per start that made it, oldest first.

    Returns:
        (record, number of the start that replaced it by going back to an earlier step; None for the one kept).
    """
    found: list[tuple[dict[str, Any], int | None]] = []
    for segment in run.segments:
        path = segment / "metrics.jsonl"
        first = next((record["step"] for record, _ in read_lines(path)), math.inf)
        if first <= step:
            found = [(record, int(segment.name) if by is None else by) for record, by in found]
        found += [
            (record, None)
            for record, _ in read_lines(path, holding=f'"step": {step}'.encode())
            if record["step"] == step
        ]
    return found


def read_metrics(run: RunDir) -> Iterator[dict[str, Any]]:
    """The kept line: records in step order, each step once, from the last start that made it.

    A start that resumes from step r replaces what earlier starts recorded after r.
    """
    paths = [path for segment in run.segments if (path := segment / "metrics.jsonl").exists()]
    starts = [next((record["step"] for record, _ in read_lines(path)), math.inf) for path in paths]
    for index, path in enumerate(paths):
        end = min(starts[index + 1 :], default=math.inf)
        for record, _ in read_lines(path):
            if record["step"] >= end:
                break
            yield record
