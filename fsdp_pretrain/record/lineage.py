"""Which segment continues which: the kept line of a run, and the branches that were left.

Every segment that trains, rolls back or forks has a `lineage.json`, written once, before its first record: the segment
and step it goes on from. The newest one is the head; the kept line is the chain from it to the beginning. A segment
without the file (a start that failed before it had a state) is on no line and has no records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from . import state_files
from .files import RunDir, now
from .state_files import DamagedFileError, StateFile

LINEAGE = "lineage.json"
LEAVING = ("rollback", "fresh")
"""Kinds of segments by which a person, or an automatic rollback, leaves what was trained after the step they begin at.
"""
Count = Annotated[int, Field(ge=0)]


class Node(StateFile):
    """Where a segment begins.

    Attributes:
        segment: its number; 0 in a file of release 0.1, which did not say.
        parent: the segment it goes on from; None for a beginning.
        step: the last step it takes over from its parent; its own begin after that.
        kind: what it was opened by; `fresh` is a start at step 0 by --allow-fresh.
        consumed, cursor: samples trained and read at that step; None where a file of release 0.1 does not say.
        reason, request, report: of a rollback: why, what was asked for, and what changed.
    """

    segment: Count = 0
    parent: Count | None
    step: Count
    kind: Literal["start", "fresh", "rollback", "fork"]
    consumed: Count | None = None
    cursor: Count | None = None
    reason: str = ""
    request: dict[str, Any] | None = None
    report: dict[str, Any] | None = None


@dataclass(frozen=True)
class Part:
    """Steps after `after` up to and including `until` (infinity for the head) are from `segment`."""

    segment: int
    after: int
    until: float


def record(segment: Path, *, parent: int | None, step: int, kind: str, **facts: Any) -> None:
    """Write a segment's place in the lineage: from now on it is the head. Raises OSError."""
    place = {"segment": int(segment.name), "parent": parent, "step": step, "kind": kind}
    state_files.write(segment / LINEAGE, {**place, "time": now(), **facts})


def nodes(run: RunDir) -> list[Node]:
    """Every segment that has a place in the lineage, oldest first.

    Raises:
        DamagedFileError: a file of the lineage is damaged; which steps are kept is not known.
    """
    return [node for path in run.segments if (node := _read(path)) is not None]


def _read(segment: Path) -> Node | None:
    path, number = segment / LINEAGE, int(segment.name)
    harm: dict[str, str] = {
        "effect": "which steps belong to the run is not known, so nothing goes on from them",
        "remedy": f"restore {path} from a backup. Without one write what it said: "
        '{"parent": SEGMENT, "step": STEP, "kind": "start"}, with the segment and the step that this start went on '
        f"from, or null and 0; `fsdp-pretrain journal {path.parent.parent.parent} --kind resume` has the step, and "
        "manifest.json of that checkpoint the segment",
    }
    node = state_files.read(path, Node, **harm)
    if node is None:
        return None
    if node.segment not in (0, number):
        raise DamagedFileError(f"{path} is that of segment {node.segment}", **harm)
    if node.parent is not None and node.parent >= number:
        raise DamagedFileError(f"{path} is damaged: it goes on from segment {node.parent}", **harm)
    return node.model_copy(update={"segment": number})


def line(known: Iterable[Node], head: int | None = None) -> list[Part]:
    """The parts of the line that ends in a segment, oldest first.

    Args:
        known: from `nodes`.
        head: its last segment; None is the newest, which gives the kept line.
    """
    table = {node.segment: node for node in known}
    number = max(table, default=None) if head is None else head
    parts: list[Part] = []
    until = math.inf
    while number is not None and number in table:
        node = table[number]
        if node.step < until:
            parts.append(Part(number, node.step, until))
        until = min(until, node.step)
        number = node.parent if node.parent is not None and node.parent < number else None
    return parts[::-1]


def holds(parts: Iterable[Part], segment: int, step: int) -> bool:
    """Whether a step of a segment is on a line."""
    return any(part.segment == segment and part.after < step <= part.until for part in parts)


def left_on_purpose(known: Iterable[Node], segment: int, step: int) -> Node | None:
    """The last node of a kind in `LEAVING` after `segment`, if it left what that segment had trained up to `step`."""
    table = {node.segment: node for node in known}
    last = max((node.segment for node in table.values() if node.kind in LEAVING), default=-1)
    if last < segment or holds(line(table.values(), last), segment, step):
        return None
    return table[last]


def drop_abandoned(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Journal entries about steps without those that a later rollback, fork or new beginning left behind."""
    kept: list[dict[str, Any]] = []
    for entry in entries:
        if entry.get("kind") in ("rollback", "fork", "fresh") and entry.get("step") is not None:
            kept = [old for old in kept if (old.get("step") or 0) <= entry["step"]]
        kept.append(entry)
    return kept


# ------------------------------------------------------------------------ a rollback that is decided


class DecidedRollback(StateFile):
    """`RUN/rollback.json`: everything that carrying a rollback out needs; see `rollback.finish`.

    Attributes:
        id: tells it from others.
        segment: to be opened.
        lineage: where that begins.
        aside: what is to be moved to `abandoned/`, paths relative to the checkpoints.
        overrides, config: contents of these files.
        lost: steps and tokens that are left behind.
        by, text: who asked for it, and what is told.
        status: entries of `status.json`.
    """

    id: str
    segment: Count
    lineage: Node
    aside: list[str]
    overrides: str
    config: str
    lost: dict[str, int]
    by: str
    text: str
    status: dict[str, Any]


def decided_rollback(run: RunDir) -> DecidedRollback | None:
    """The rollback that is decided and not carried out. Raises DamagedFileError."""
    return state_files.read(
        run.rollback,
        DecidedRollback,
        effect="a rollback was decided and would not be done; nothing goes on until it is",
        remedy=f"move the file away and repeat `fsdp-pretrain rollback {run.path} --to STEP ...`: what was asked for "
        "can mostly still be read in it, and what was done of it already does no harm",
    )
