"""One metrics record per optimiser step, and how the records of all segments make one curve."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from . import lineage
from .files import RunDir, read_lines


def mean_loss(record: dict[str, Any]) -> float:
    """Mean cross-entropy of a record, natural log per target token; NaN if it was not finite."""
    loss = record["loss"]
    return loss["sum"] / loss["count"] if loss["sum"] is not None and loss["count"] else math.nan


def json_number(value: float) -> float | None:
    """A float for the record; None where JSON has no number (NaN, infinity)."""
    return value if math.isfinite(value) else None


def find_step(run: RunDir, step: int) -> list[tuple[dict[str, Any], int | None]]:
    """Every record of a step, one per segment that made it, oldest first.

    Returns:
        (record, number of the segment that left it by going back to an earlier step; None for the one kept).
    """
    known = lineage.nodes(run)
    lines = {node.segment: lineage.line(known, node.segment) for node in known}
    found: list[tuple[dict[str, Any], int | None]] = []
    for number in lines:
        path = run.segment(number) / "metrics.jsonl"
        for record, _ in read_lines(path, holding=f'"step": {step}'.encode()):
            if record["step"] == step:
                left = [later for later in lines if later > number and not lineage.holds(lines[later], number, step)]
                kept = lineage.holds(lines[max(lines)], number, step)
                found.append((record, None if kept or not left else left[0]))
    return found


def read_metrics(run: RunDir) -> Iterator[dict[str, Any]]:
    """The kept line: records with strictly increasing steps, each from the segment that `lineage` names."""
    last = 0
    for part in lineage.line(lineage.nodes(run)):
        for record, _ in read_lines(run.segment(part.segment) / "metrics.jsonl"):
            if record["step"] > part.until:
                break
            if record["step"] > max(part.after, last):
                last = record["step"]
                yield record


def last_record(run: RunDir, segment: int) -> dict[str, Any] | None:
    """The last whole metrics record of a segment, read from the end of its file; None if it has none."""
    path = run.segment(segment) / "metrics.jsonl"
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 65_536))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return None
    for line in reversed(lines):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(record, dict):
            return record
    return None


def left_behind(run: RunDir, step: int, tokens: int) -> tuple[int, int]:
    """(steps, tokens) that the newest line trained after a step, at which so many tokens had been trained."""
    head = max((node.segment for node in lineage.nodes(run)), default=None)
    record = None if head is None else last_record(run, head)
    if record is None or record["step"] <= step:
        return 0, 0
    return record["step"] - step, record["tokens"] - tokens
