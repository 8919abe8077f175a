"""The checkpoints of a run: every save in its journal, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_pretrain.checkpoint.locations import stores
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.record import journal, lineage
from fsdp_pretrain.record.files import RunDir, seconds_of
from fsdp_pretrain.record.lineage import LineageNode

from .curves import Clocks, Lines


@dataclass(frozen=True)
class SavePoint:
    """One save.

    Attributes:
        state: verified, written (not verified), damaged, lost (it should be there and is not), deleted (by the
            retention policy), left (behind by a resume or rollback), or failed.
        seconds, bytes: how long it took, and its size; None if it failed.
        text: of its entry in the journal, or what is wrong with it.
    """

    at: Clocks
    state: str
    seconds: float | None
    bytes: int | None
    text: str


def read_saves(run: RunDir, entries: list[dict[str, Any]], nodes: list[LineageNode], lines: Lines) -> list[SavePoint]:
    """The saves of a run, oldest first."""
    try:
        there = {checkpoint.step: checkpoint for checkpoint in stores(run).scan()}
    except UserError:  # reported with the state of the run
        there = {}
    parts = lineage.line(nodes)
    forked = max((node.segment for node in nodes if node.kind == "fork"), default=0)
    newest = max(there, default=-1)
    found = []
    last = {entry["step"]: entry for entry in journal.of_kind(entries, "checkpoint")}
    for entry in entries:
        step, at = entry.get("step"), lines.locate(entry.get("step"), seconds_of(entry["time"]))
        if entry["kind"] == "checkpoint-failed" and step is not None:
            found.append(SavePoint(at, "failed", None, None, entry["text"]))
        if entry["kind"] != "checkpoint" or not journal.is_whole(entry) or step is None:
            continue
        checkpoint, text = there.get(step), entry["text"]
        segment = entry.get("segment") or 0
        on_line = not parts or lineage.holds(parts, segment, step)
        if segment < forked and not (on_line and checkpoint is not None):
            continue  # the parent has it
        if not on_line:
            state = "left"
        elif checkpoint is None or last[step] is not entry:
            state = "lost" if step > newest else "deleted"
        elif checkpoint.problem is not None:
            state, text = "damaged", checkpoint.problem
        else:
            state = "verified" if checkpoint.verified else "written"
        found.append(SavePoint(at, state, float(entry["seconds"]), int(entry["bytes"]), text))
    return found
