"""Which segment continues which: the kept line of a run, and the branches that were left.

Every segment that trains, rolls back or forks has a `lineage.json`, written once, before its first record: the segment
and step it goes on from. The newest one is the head; the kept line is the chain from it to the beginning. A segment
without the file (a start that failed before it had a state) is on no line and has no records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import RunDir, now, read_json, replace_file

LINEAGE = "lineage.json"
LEAVING = ("rollback", "fresh")
"""Kinds of segments by which a person, or an automatic rollback, leaves what was trained after the step they begin at.
"""


@dataclass(frozen=True)
class Node:
    """Where a segment begins.

    Attributes:
        segment: its number.
        parent: the segment it goes on from; None for a beginning.
        step: the last step it takes over from its parent; its own begin after that.
        kind: `start`, `fresh` (a start at step 0 by --allow-fresh), `rollback` or `fork`.
        facts: further entries of the file.
    """

    segment: int
    parent: int | None
    step: int
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Steps after `after` up to and including `until` (infinity for the head) are from `segment`."""

    segment: int
    after: int
    until: float


def record(segment: Path, *, parent: int | None, step: int, kind: str, **facts: Any) -> None:
    """Write a segment's place in the lineage: from now on it is the head. Raises OSError."""
    content = {"parent": parent, "step": step, "kind": kind, "time": now(), **facts}
    replace_file(segment / LINEAGE, json.dumps(content, indent=1) + "\n")


def nodes(run: RunDir) -> list[Node]:
    """Every segment that has a place in the lineage, oldest first."""
    found = []
    for path in run.segments:
        content = read_json(path / LINEAGE)
        if content is not None:
            facts = {key: value for key, value in content.items() if key not in ("parent", "step", "kind")}
            found.append(Node(int(path.name), content["parent"], content["step"], content["kind"], facts))
    return found


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
        if entry.get("kind") in ("rollback", "fork", "fresh"):
            kept = [old for old in kept if old.get("step", 0) <= entry["step"]]
        kept.append(entry)
    return kept
