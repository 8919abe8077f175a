"""What a person is shown of a checkpoint: from its names and manifest, or after reading it back."""

from __future__ import annotations

import contextlib

from pydantic import BaseModel

from fsdp_pretrain.errors import CheckpointError
from fsdp_pretrain.record.environment import WorldShape
from fsdp_pretrain.units import human_bytes

from .manifest import CheckpointManifest
from .store import Checkpoint, verify_files
from .tensors import wrong_tensors


class Row(BaseModel):
    """A checkpoint in the output of `list` and `verify`.

    `mirror`: its state in `checkpoint.mirror`: whole, incomplete, damaged or absent; None: the run has none, or it does
    not answer.
    """

    step: int
    path: str
    state: str
    bytes: int | None = None
    committed: str | None = None
    world: WorldShape | None = None
    pinned: bool
    suspect: str | None = None
    optimizer: bool = True
    problem: str | None = None
    mirror: str | None = None

    def describe(self, manifest: CheckpointManifest) -> None:
        """Take what its manifest says."""
        self.bytes = sum(entry.bytes for entry in manifest.files)
        self.committed, self.world, self.suspect = manifest.committed, manifest.world, manifest.suspect
        self.optimizer = manifest.optimizer

    def __str__(self) -> str:
        size = human_bytes(self.bytes) if self.bytes is not None else "-"
        line = f"{self.step:>12_}  {size:>9}  {self.state:<10} {self.committed or '-':<25} "
        line += "pinned " * self.pinned
        line += f"suspect: {self.suspect} " if self.suspect else ""
        line += self.problem or ("" if self.optimizer else "weights alone ")
        line += f" mirror: {self.mirror}" if self.mirror is not None else ""
        return line.rstrip()


def listed(checkpoint: Checkpoint) -> Row:
    """A checkpoint by its names, sizes and manifest, without reading its files."""
    row = Row(
        step=checkpoint.step,
        path=str(checkpoint.path),
        state="damaged" if checkpoint.problem else "verified" if checkpoint.verified else "committed",
        pinned=checkpoint.pinned,
        problem=checkpoint.problem,
    )
    with contextlib.suppress(CheckpointError):
        row.describe(checkpoint.manifest())
    return row


def read_back(checkpoint: Checkpoint) -> Row:
    """The same after reading all its files and comparing their checksums."""
    row = listed(checkpoint)
    if checkpoint.problem is None:
        wrong = verify_files(checkpoint.path, checkpoint.files()) or wrong_tensors(checkpoint.path)
        row.state, row.problem = ("damaged", wrong[0]) if wrong else ("verified", None)
    return row
