"""Finds out whether a run has lost its newest checkpoint, by comparing the record with the directory.

Checkpoints that were deleted, or are on a missing mount, leave no trace in the directory, but the record lists them.
Without this check, a run that lost its checkpoints would look like one that was never started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_pretrain.run import journal, lineage, status
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.run_id import SeenRun

from .store import Store, directory_name


@dataclass(frozen=True)
class MissingCheckpoint:
    """A checkpoint of the kept line that was committed but does not exist, nor does a later one."""

    step: int
    newest: int | None  # step of the newest existing checkpoint, whole or damaged; None: there is none
    seen: bool = False  # whether an earlier start under the same launcher saw a newer checkpoint than that

    @property
    def text(self) -> str:
        left = "there is none" if self.newest is None else f"the newest there is of step {self.newest}"
        return f"the record says that a checkpoint of step {self.step} was saved, and {left}"


def missing(run: RunDir, seen: SeenRun | None = None) -> MissingCheckpoint | None:
    """The newest recorded checkpoint of the kept line, if neither it nor a later one exists; else None.

    A damaged checkpoint counts as existing, and so does one in `abandoned/` if other checkpoints are left.

    Args:
        seen: what earlier starts under the same launcher saw of the run.

    Raises:
        StorageError: a directory cannot be read.
    """
    steps, newest_seen = recorded(run), -1
    if seen is not None and seen.checkpoint is not None:
        left = lineage.abandoned_by(lineage.nodes(run), seen.segment, seen.checkpoint)
        if left is None:
            newest_seen = seen.checkpoint
            steps.add(newest_seen)
    if not steps:
        return None
    expected, store = max(steps), Store(run.checkpoints)
    existing = store.scan()  # after the record was read: a live run deletes only after a later save
    if any(item.step == expected or (item.step > expected and item.problem is None) for item in existing):
        return None
    aside = f"abandoned/{directory_name(expected)}-*"
    if existing and any(store.directory.glob(aside)):
        return None
    newest = max((item.step for item in existing), default=None)
    return MissingCheckpoint(expected, newest, newest_seen > (-1 if newest is None else newest))


def recorded(run: RunDir) -> set[int]:
    """Steps of the kept line with a checkpoint in the record, including those deleted by retention."""
    nodes = lineage.nodes(run)
    parts, head = lineage.line(nodes), max((node.segment for node in nodes), default=0)
    steps = {part.after for part in parts if part.after}  # a start continued from there
    entries = journal.read(run)
    for entry in journal.of_kind(entries, "checkpoint"):
        if not parts or lineage.holds(parts, entry.get("segment") or 0, entry["step"]):
            steps.add(entry["step"])
    last = status.read(run)
    if last.checkpoint is not None and last.checkpoint.step is not None and (last.segment or 0) >= head:
        steps.add(last.checkpoint.step)
    if not any(node.kind == "fresh" for node in nodes) and journal.of_kind(entries, "import"):
        steps.add(0)
    return _without_unrestored(steps, entries)


def _without_unrestored(steps: set[int], entries: list[dict[str, Any]]) -> set[int]:
    """The steps without later ones than a restoration from the mirror took, which reported them when it did."""
    restored = [n for n, entry in enumerate(entries) if entry["kind"] == "mirror-restored" and entry.get("step")]
    if not restored:
        return steps
    saved = {entry["step"] for entry in journal.of_kind(entries[restored[-1] :], "checkpoint")}
    return {step for step in steps if step <= entries[restored[-1]]["step"] or step in saved}
