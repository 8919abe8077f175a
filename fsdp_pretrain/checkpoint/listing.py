"""The rows that `checkpoints list` and `verify` show for a checkpoint."""

from __future__ import annotations

import contextlib

from pydantic import BaseModel

from fsdp_pretrain.errors import CheckpointError
from fsdp_pretrain.run.environment import WorldShape
from fsdp_pretrain.units import human_bytes

from .store import Checkpoint, verify_files
from .tensors import wrong_tensors


class Row(BaseModel):
    """A checkpoint in the output of `list` and `verify`."""

    step: int
    path: str
    state: str
    bytes: int | None = None
    committed: str | None = None
    world: WorldShape | None = None
    suspect: str | None = None
    optimizer: bool = True
    problem: str | None = None

    def __str__(self) -> str:
        size = human_bytes(self.bytes) if self.bytes is not None else "-"
        line = f"{self.step:>12_}  {size:>9}  {self.state:<10} {self.committed or '-':<25} "
        line += f"suspect: {self.suspect} " if self.suspect else ""
        line += self.problem or ("" if self.optimizer else "weights alone ")
        return line.rstrip()


def listed(checkpoint: Checkpoint) -> Row:
    """The row of a checkpoint by its manifest and the sizes of its files, which are not read."""
    state = "verified" if checkpoint.verified else "committed"
    row = Row(
        step=checkpoint.step,
        path=str(checkpoint.path),
        state="damaged" if checkpoint.problem else state,
        problem=checkpoint.problem,
    )
    with contextlib.suppress(CheckpointError):
        manifest = checkpoint.manifest()
        row.bytes = sum(entry.bytes for entry in manifest.files)
        row.committed, row.world, row.suspect = manifest.committed, manifest.world, manifest.suspect
        row.optimizer = manifest.optimizer
    return row


def read_back(checkpoint: Checkpoint) -> Row:
    """The row of a checkpoint after reading all its files and comparing their checksums."""
    row = listed(checkpoint)
    if checkpoint.problem is None:
        wrong = verify_files(checkpoint.path, checkpoint.files()) or wrong_tensors(checkpoint.path)
        row.state, row.problem = ("damaged", wrong[0]) if wrong else ("verified", None)
    return row
