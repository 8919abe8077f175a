"""The metrics files: one record per optimiser step, and how the records of all segments make one curve. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from . import lineage
from .files import RunDir, read_lines, tail_offset
from .step_record import StepRecord, parse

METRICS = "metrics.jsonl"


def records(
    path: Path,
    offset: int = 0,
    holding: bytes = b"",
    *,
    on_damaged: Callable[[bytes], object] = lambda line: None,
) -> Iterator[tuple[StepRecord, int]]:
    """The records of a metrics file with their offsets; damaged lines are passed over, see `read_lines`."""
    return read_lines(path, parse, offset, holding, on_damaged=on_damaged)


def last_records(segment: Path, reach: int = 1 << 18) -> list[StepRecord]:
    """The records within the last `reach` bytes of a segment's file, oldest first."""
    path = segment / METRICS
    return [record for record, _ in records(path, tail_offset(path, reach))]


def find_step(run: RunDir, step: int) -> list[tuple[StepRecord, int | None]]:
    """Every record of a step, one per segment that made it, oldest first.

    Returns:
        (record, number of the segment that left it by going back to an earlier step; None for the one kept).
    """
    known = lineage.nodes(run)
    lines = {node.segment: lineage.line(known, node.segment) for node in known}
    found: list[tuple[StepRecord, int | None]] = []
    for number in lines:
        for record, _ in records(run.segment(number) / METRICS, holding=f'"step": {step}'.encode()):
            if record.step == step:
                left = [later for later in lines if later > number and not lineage.holds(lines[later], number, step)]
                kept = lineage.holds(lines[max(lines)], number, step)
                found.append((record, None if kept or not left else left[0]))
    return found


def read_metrics(run: RunDir) -> Iterator[StepRecord]:
    """The kept line: records with strictly increasing steps, each from the segment that `lineage` names."""
    last = 0
    for part in lineage.line(lineage.nodes(run)):
        for record, _ in records(run.segment(part.segment) / METRICS):
            if record.step > part.until:
                break
            if record.step > max(part.after, last):
                last = record.step
                yield record


def last_record(run: RunDir, segment: int) -> StepRecord | None:
    """The last whole metrics record of a segment, read from the end of its file; None if it has none."""
    found = last_records(run.segment(segment), 65_536)
    return found[-1] if found else None


def left_behind(run: RunDir, step: int, tokens: int) -> tuple[int, int]:
    """(steps, tokens) that the newest line trained after a step, at which so many tokens had been trained."""
    head = max((node.segment for node in lineage.nodes(run)), default=None)
    record = None if head is None else last_record(run, head)
    if record is None or record.step <= step:
        return 0, 0
    return record.step - step, record.tokens - tokens


def tail(path: Path, step: int) -> list[StepRecord]:
    """Records of a segment's file from `step` on, read from its end, so that a long one costs nothing."""
    try:
        size = path.stat().st_size
    except OSError:
        return []
    reach = 1 << 20
    while True:
        offset = max(0, size - reach)
        found = [record for record, _ in records(path, offset)]
        if offset == 0 or (found and found[0].step <= step):
            return [record for record in found if record.step >= step]
        reach *= 4


def last_metrics(run: RunDir, step: int, count: int) -> list[StepRecord]:
    """The kept line's records of the `count` steps up to `step`, oldest first; fewer if there are not so many."""
    found: dict[int, StepRecord] = {}
    for part in reversed(lineage.line(lineage.nodes(run))):
        first = max(part.after, step - count) + 1
        for record in tail(run.segment(part.segment) / METRICS, first):
            if record.step <= min(part.until, step):
                found.setdefault(record.step, record)
        if first <= step - count + 1:
            break
    return [found[number] for number in sorted(found)]
