"""The checkpoints of a run: every save in its journal, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdp_pretrain.checkpoint.locations import stores
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.record import journal, lineage
from fsdp_pretrain.record.files import RunDir, seconds_of
from fsdp_pretrain.record.lineage import LineageNode
from fsdp_pretrain.record.lines import Lines, Position


@dataclass(frozen=True)
class SavePoint:
    """One save.

    Attributes:
        state: verified, written (not verified), damaged, lost (it should be there and is not), deleted (by the
            retention policy), left (behind by a resume or rollback), or failed.
        seconds: how long it took; 0 if it failed.
        text: of its entry in the journal, or what is wrong with it.
    """

    at: Position
    state: str
    seconds: float
    text: str


def read_saves(
    run: RunDir, entries: list[dict[str, Any]], nodes: list[LineageNode], lines: Lines
) -> Iterator[SavePoint]:
    """The saves of a run, oldest first."""
    try:
        there = {checkpoint.step: checkpoint for checkpoint in stores(run).scan()}
    except UserError:  # reported with the state of the run
        there = {}
    parts = lineage.line(nodes)
    forked = max((node.segment for node in nodes if node.kind == "fork"), default=0)
    last = {entry["step"]: entry for entry in journal.of_kind(entries, "checkpoint")}
    for entry in entries:
        step, at = entry.get("step"), lines.locate(entry.get("step"), seconds_of(entry["time"]))
        if entry["kind"] == "checkpoint-failed" and step is not None:
            yield SavePoint(at, "failed", 0.0, entry["text"])
        if entry["kind"] != "checkpoint" or not journal.is_whole(entry) or step is None:
            continue
        checkpoint, text, segment = there.get(step), entry["text"], entry.get("segment") or 0
        on_line = not parts or lineage.holds(parts, segment, step)
        if segment < forked and not (on_line and checkpoint is not None):
            continue  # the parent has it
        if not on_line:
            state = "left"
        elif checkpoint is None or last[step] is not entry:
            state = "lost" if step > max(there, default=-1) else "deleted"
        elif checkpoint.problem is not None:
            state, text = "damaged", checkpoint.problem
        else:
            state = "verified" if checkpoint.verified else "written"
        yield SavePoint(at, state, float(entry["seconds"]), text)
