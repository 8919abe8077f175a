"""The checkpoint that the record of a run says is there, and whether it is. No torch.

Checkpoints that somebody deleted, or whose mount is missing, leave no trace in the directories where they were. The
record remembers them: without a look at it, a run without its checkpoints would be taken for one that has not begun.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_pretrain.record import journal, lineage, state_files
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.run_id import SeenRun
from fsdp_pretrain.record.status import Status

from .locations import stores
from .store import directory_name


@dataclass(frozen=True)
class MissingCheckpoint:
    """A checkpoint of the kept line that was committed and is not there, nor one of a later step.

    Attributes:
        newest: step of the newest checkpoint that there is, whole or damaged; None: there is none at all.
        seen: an earlier start under the same launcher had a newer one than there is.
    """

    step: int
    newest: int | None
    seen: bool = False

    @property
    def text(self) -> str:
        left = "there is none" if self.newest is None else f"the newest there is of step {self.newest}"
        return f"the record says that a checkpoint of step {self.step} was saved, and {left}"


def missing(run: RunDir, seen: SeenRun | None = None) -> MissingCheckpoint | None:
    """The newest checkpoint of the kept line, if neither it nor a later one is there; None if all is well.

    If others are left, one that was moved to `abandoned/` is not missed. A damaged one is there.

    Args:
        seen: what earlier starts under the same launcher have seen.

    Raises:
        StorageError: a directory cannot be read.
    """
    steps, known = recorded(run), -1
    if seen is not None and seen.checkpoint is not None:
        left = lineage.left_on_purpose(lineage.nodes(run), seen.segment, seen.checkpoint)
        if left is None:
            steps.add(known := seen.checkpoint)
    if not steps:
        return None
    expected, found = max(steps), stores(run)  # the record first: a live run deletes nothing without a later one
    there = found.scan()
    if any(item.step == expected or (item.step > expected and item.problem is None) for item in there):
        return None
    aside = f"abandoned/{directory_name(expected)}-*"
    if there and any(any(store.directory.glob(aside)) for store in found.all):
        return None
    newest = max((item.step for item in there), default=None)
    return MissingCheckpoint(expected, newest, known > (-1 if newest is None else newest))


def recorded(run: RunDir) -> set[int]:
    """Steps of the kept line that had a checkpoint, by the record; those deleted by retention are among them."""
    known = lineage.nodes(run)
    parts, head = lineage.line(known), max((node.segment for node in known), default=0)
    steps = {part.after for part in parts if part.after}  # a start went on from there
    entries = journal.read(run)
    for entry in journal.of_kind(entries, "checkpoint"):
        if not parts or lineage.holds(parts, entry.get("segment") or 0, entry["step"]):
            steps.add(entry["step"])
    status = state_files.view(run.status, Status) or Status()
    if status.checkpoint is not None and status.checkpoint.step is not None and (status.segment or 0) >= head:
        steps.add(status.checkpoint.step)
    if not any(node.kind == "fresh" for node in known) and journal.of_kind(entries, "import"):
        steps.add(0)
    return steps
