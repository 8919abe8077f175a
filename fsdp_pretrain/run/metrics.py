"""The metrics files: one record per optimiser step; records of all segments combine into one curve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import lineage
from .files import RunDir, read_lines, tail_offset
from .step_record import StepRecord, parse

METRICS = "metrics.jsonl"


class RecordedStep(NamedTuple):
    """A record, and the later segment that abandoned it (None: it is on the kept line)."""

    record: StepRecord
    left_by: int | None


class LostSteps(NamedTuple):
    """The amount of training after a step."""

    steps: int
    tokens: int


def records(path: Path, offset: int = 0, holding: bytes = b"") -> Iterator[tuple[StepRecord, int]]:
    """The records of a metrics file with their offsets; see `files.read_lines`."""
    return read_lines(path, parse, offset, holding)


def last_records(segment: Path, reach: int = 1 << 18) -> list[StepRecord]:
    """The records within the last `reach` bytes of a segment's file, oldest first."""
    path = segment / METRICS
    return [record for record, _ in records(path, tail_offset(path, reach))]


def find_step(run: RunDir, step: int) -> list[RecordedStep]:
    """Every record of a step, one per segment that trained it, oldest first."""
    known = lineage.nodes(run)
    lines = {node.segment: lineage.line(known, node.segment) for node in known}
    recorded = []
    for number in lines:
        for record, _ in records(run.segment(number) / METRICS, holding=f'"step": {step}'.encode()):
            if record.step == step:
                left = [later for later in lines if later > number and not lineage.holds(lines[later], number, step)]
                kept = lineage.holds(lines[max(lines)], number, step)
                recorded.append(RecordedStep(record, None if kept or not left else left[0]))
    return recorded


def read_metrics(run: RunDir) -> Iterator[StepRecord]:
    """Records of the kept line, with strictly increasing steps."""
    last = 0
    for part in lineage.line(lineage.nodes(run)):
        for record, _ in records(run.segment(part.segment) / METRICS):
            if record.step > part.until:
                break
            if record.step > max(part.after, last):
                last = record.step
                yield record


def left_behind(run: RunDir, step: int, tokens: int) -> LostSteps:
    """The training of the newest segment, or if it has none, of the line it continues, after a step; `tokens` is the
    token count at that step."""
    head = max(lineage.nodes(run), key=lambda node: node.segment, default=None)
    newest = [] if head is None else last_records(run.segment(head.segment), 1 << 16)
    if head is not None and not newest:
        newest = last_metrics(run, head.step, 1)
    if not newest or newest[-1].step <= step:
        return LostSteps(0, 0)
    return LostSteps(newest[-1].step - step, newest[-1].tokens - tokens)


def tail(segment: Path, step: int) -> list[StepRecord]:
    """Records of a segment from `step` on; long files are read from the end."""
    reach = 1 << 20
    while True:
        last = last_records(segment, reach)
        if tail_offset(segment / METRICS, reach) == 0 or (last and last[0].step <= step):
            return [record for record in last if record.step >= step]
        reach *= 4


def last_metrics(run: RunDir, step: int, count: int, head: int | None = None) -> list[StepRecord]:
    """Records of the `count` steps up to `step`, oldest first; fewer if there are fewer.

    The records are from the line that ends in segment `head`; None: the kept line.
    """
    by_step: dict[int, StepRecord] = {}
    for part in reversed(lineage.line(lineage.nodes(run), head)):
        first = max(part.after, step - count) + 1
        for record in tail(run.segment(part.segment), first):
            if record.step <= min(part.until, step):
                by_step.setdefault(record.step, record)
        if first <= step - count + 1:
            break
    return [by_step[number] for number in sorted(by_step)]
