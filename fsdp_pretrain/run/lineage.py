"""Which segment continues which: the kept line of a run, and abandoned branches.

Every segment that trains, rolls back or forks has a `lineage.json`, written once before its first record, with the
segment and step it continues from. The newest one is the head; the kept line is the chain from it back to the root. A
segment without the file (the start failed before it had a state) is on no line and has no records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fsdp_pretrain.units import SampleRange

from . import state_files
from .files import RunDir, now
from .state_files import DamagedFileError, StateFile

LINEAGE = "lineage.json"
ABANDONING = ("rollback", "fresh")
"""Kinds of segments that deliberately abandon the training after the step they start from."""
Count = Annotated[int, Field(ge=0)]


class BranchRequest(StateFile):
    """The arguments of a rollback."""

    step: int  # step of the checkpoint to go back to
    changes: list[str]  # `section.key=value`
    skip_steps: Annotated[tuple[int, int], Field(strict=False)] | None = None  # first and last, as recorded
    skip_samples: SampleRange | None = None  # instead of steps


class BranchReport(StateFile):
    """What a rollback or fork changes; its JSON output."""

    step: int
    segment: int | None
    consumed: int
    cursor: int
    skip: str | None
    changes: list[str]
    abandoned: list[str] = Field(default_factory=list)  # checkpoints moved aside
    config: str = ""  # the configuration to start a fork with
    rates: list[float] = Field(default_factory=list)  # of a fork that anneals: at its beginning, half-way, at its end
    linked: bool = False  # the fork's checkpoint shares its bytes with the parent's
    done: Literal["now", "already", "dry run"] = "now"


class LineageNode(StateFile):
    """Where a segment starts."""

    segment: Count = 0  # 0: a decided rollback, whose number is not known yet
    parent: Count | None  # the segment it continues; None for a root
    step: Count  # the last step it inherits from its parent
    kind: Literal["start", "fresh", "rollback", "fork"]  # `fresh`: a start at step 0 by --allow-fresh
    consumed: Count | None = None  # samples trained at that step
    cursor: Count | None = None  # samples read at that step
    reason: str = ""  # this and the next two: of a rollback
    request: BranchRequest | None = None
    report: BranchReport | None = None


@dataclass(frozen=True)
class LineagePart:
    """A part of a line: its steps in (`after`, `until`] are from `segment`; `until` is infinite for the head."""

    segment: int
    after: int
    until: float


def record(segment: Path, *, parent: int | None, step: int, kind: str, **facts: Any) -> None:
    """Write a segment's place in the lineage, which makes it the head. Raises OSError."""
    place = {"segment": int(segment.name), "parent": parent, "step": step, "kind": kind}
    state_files.write(segment / LINEAGE, {**place, "time": now(), **facts})


def nodes(run: RunDir) -> list[LineageNode]:
    """All segments in the lineage, oldest first. Raises DamagedFileError."""
    return [node for path in run.segments if (node := _read(path)) is not None]


def _read(segment: Path) -> LineageNode | None:
    path, number = segment / LINEAGE, int(segment.name)
    harm: dict[str, str] = {
        "effect": "which steps belong to the run is not known, so nothing continues from them",
        "remedy": f"restore {path} from a backup. Without one, write its contents again: "
        '{"parent": SEGMENT, "step": STEP, "kind": "start"}, with the segment and the step that this start continued '
        f"from, or null and 0; `fsdp-pretrain journal {path.parent.parent.parent} --kind resume` has the step, and "
        "manifest.json of that checkpoint the segment",
    }
    node = state_files.read(path, LineageNode, **harm)
    if node is None:
        return None
    if node.segment not in (0, number):
        raise DamagedFileError(f"{path} belongs to segment {node.segment}", **harm)
    if node.parent is not None and node.parent >= number:
        raise DamagedFileError(f"{path} is damaged: it continues segment {node.parent}", **harm)
    return node.model_copy(update={"segment": number})


def line(known: Iterable[LineageNode], head: int | None = None) -> list[LineagePart]:
    """The parts of the line that ends in segment `head`, oldest first; None: the newest segment, so the kept line."""
    table = {node.segment: node for node in known}
    number = max(table, default=None) if head is None else head
    parts: list[LineagePart] = []
    until = math.inf
    while number is not None and number in table:
        node = table[number]
        if node.step < until:
            parts.append(LineagePart(number, node.step, until))
        until = min(until, node.step)
        number = node.parent if node.parent is not None and node.parent < number else None
    return parts[::-1]


def holds(parts: Iterable[LineagePart], segment: int, step: int) -> bool:
    """Whether a step of a segment is on a line."""
    return any(part.segment == segment and part.after < step <= part.until for part in parts)


def abandoned_by(known: Iterable[LineageNode], segment: int, step: int) -> LineageNode | None:
    """The last node of a kind in `ABANDONING`, if it abandoned `step` of `segment`; else None."""
    table = {node.segment: node for node in known}
    last = max((node.segment for node in table.values() if node.kind in ABANDONING), default=-1)
    if last < segment or holds(line(table.values(), last), segment, step):
        return None
    return table[last]


def drop_abandoned(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Journal entries without those of steps that a later rollback, fork or fresh start abandoned."""
    kept: list[dict[str, Any]] = []
    for entry in entries:
        if entry.get("kind") in ("rollback", "fork", "fresh") and entry.get("step") is not None:
            kept = [old for old in kept if (old.get("step") or 0) <= entry["step"]]
        kept.append(entry)
    return kept


# ------------------------------------------------------------------------ a rollback in progress


class DecidedRollback(StateFile):
    """`RUN/rollback.json`: everything needed to carry out a rollback; see `lineage.rollback.finish`."""

    id: str
    time: str = ""
    segment: Count  # the segment to create
    lineage: LineageNode  # its place in the lineage
    aside: list[str]  # paths to move to `abandoned/` beside them, relative to the run
    overrides: str  # contents of `overrides.toml`
    config: str  # contents of `config.toml`
    lost: dict[str, int]  # abandoned steps and tokens
    by: str
    text: str  # text of the journal entry
    status: dict[str, Any]  # entries of `status.json`


def decided_rollback(run: RunDir) -> DecidedRollback | None:
    """The rollback in progress, if any. Raises DamagedFileError."""
    return state_files.read(
        run.rollback,
        DecidedRollback,
        effect="a rollback was requested and is not finished; the run cannot continue before it is",
        remedy=f"move the file away and repeat `fsdp-pretrain rollback {run.path} --to STEP ...`: the file "
        "should still show the request, and repeating what was already done is harmless",
    )
