"""A checkpoint's `tensors.json`: its tensors, and their places in its files.

DCP's own description, `.metadata`, is written too, so that plain DCP reads our checkpoints. It is a pickle, which can
run any program when it is opened, so we never open it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, Strict, model_validator

from fsdp_pretrain.errors import CheckpointError, UserError
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.state_files import StateFile

from .manifest import Count

TENSORS, METADATA = "tensors.json", ".metadata"


class Chunk(StateFile):
    """Rows of a tensor (a scalar has one), in an archive of `torch.save`."""

    first: Count  # this and the next: index of the first row, and number of rows
    rows: Count
    file: Annotated[str, Field(pattern=r"^__\d+_\d+\.distcp$")]  # name of the file in the checkpoint that holds them
    start: Count  # this and the next: bytes at which the archive begins in the file, and its length
    length: Count


class StoredTensor(StateFile):
    """A tensor of a checkpoint; its chunks hold each of its rows once."""

    dtype: Literal["float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]
    shape: Annotated[tuple[Count, ...], Strict(False)]
    chunks: list[Chunk]

    @model_validator(mode="after")
    def _check_chunks(self) -> StoredTensor:
        reached = 0
        for chunk in sorted(self.chunks, key=lambda chunk: (chunk.first, chunk.rows)):
            if chunk.first != reached:
                raise ValueError(f"a chunk begins at row {chunk.first}, the one before it ends at {reached}")
            reached += chunk.rows
        if reached != (self.shape[0] if self.shape else 1):
            raise ValueError(f"the chunks have {reached} rows, the shape is {self.shape}")
        return self

    def shape_of(self, chunk: Chunk) -> tuple[int, ...]:
        return (chunk.rows, *self.shape[1:]) if self.shape else ()


class TensorsFile(StateFile):
    """`tensors.json`: the tensors by name."""

    tensors: dict[str, StoredTensor]


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name. Raises CheckpointError if `tensors.json` is missing or damaged, or cannot be
    read."""
    try:
        content = state_files.read(folder / TENSORS, TensorsFile)
    except UserError as error:
        raise CheckpointError(error.cause, effect="nothing was loaded", remedy="take another checkpoint") from None
    if content is None:
        raise CheckpointError(
            f"{folder / TENSORS} is missing",
            effect="nothing was loaded",
            remedy="if the run is live, retention may just have deleted it: take a newer one",
        )
    return content.tensors


def wrong_tensors(folder: Path) -> list[str]:
    """The defect of a checkpoint's `tensors.json`: a list of at most one text."""
    try:
        read_tensors(folder)
    except CheckpointError as error:
        return [error.cause.removeprefix(f"{folder}/")]
    return []
