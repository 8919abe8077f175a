"""Schemas of a checkpoint's `manifest.json` and `train_state.json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.run.environment import WorldShape
from fsdp_pretrain.run.state_files import StateFile
from fsdp_pretrain.units import Progress

Count = Annotated[int, Field(ge=0)]


class FileEntry(StateFile):
    """Name, size and checksum of a file when it was written."""

    name: Annotated[str, Field(pattern=r"^[^/]+$")]
    bytes: Count
    xxh3: str


class Counters(StateFile):
    """The counters at a checkpoint, see `state.TrainState`, and the ranks that wrote it."""

    step: Count
    consumed: Count
    cursor: Count
    batch: Count
    loss_scale: list[float] | None = None
    tokens: Count
    world: WorldShape


class TokenizerIdentity(StateFile):
    """A tokenizer's fingerprint and document separator."""

    fingerprint: str
    eod: int


class PartIdentity(StateFile):
    """A part of the code of a run, see `code_identity`."""

    part: str  # its name, as in the configuration
    source: str  # version and hash of its package's source
    witness: list[float]  # what a tiny instance computes from fixed input


class RunIdentity(StateFile):
    """The facts of a run that no resume may change, see `state.identity`; each start compares its own with them."""

    model: dict[str, Any]
    data: dict[str, Any]
    mixture: dict[str, dict[str, Any]]
    corpora: dict[str, str]
    reshuffle: list[int]
    excluded: str = ""  # digest of the documents of `data.exclude`, which may change if that is declared
    tokenizer: TokenizerIdentity
    code: dict[str, PartIdentity] = Field(default_factory=dict)


class SavedState(Counters):
    """`train_state.json`: counters and identity of the run."""

    written: str | None = None
    identity: RunIdentity


class MergedParent(StateFile):
    """One of the checkpoints whose mean a merge is: its step, its weight in the mean, the digest of its tensors."""

    step: Count
    weight: float
    state_digest: str


class Facts(Counters):
    """The part of a manifest that is known before the checkpoint is written."""

    run: str  # name of the run
    segment: int | None = None  # number of the segment that wrote it; None for an import
    final: bool  # whether it is the last of a complete run
    torch: str  # this and the next: versions that wrote it
    fsdp_pretrain: str
    imported: str | None = None  # source folder or checkpoint, if the weights were imported
    suspect: str | None = None  # why not to roll back to it, if it was saved during an incident
    merged: list[MergedParent] | None = None  # the checkpoints whose mean it is, oldest first; None: it was trained


class CheckpointManifest(Facts):
    """`manifest.json`: facts and files of a checkpoint."""

    optimizer: bool = True  # whether it has optimiser state, not only weights
    state_digest: str  # hash of its tensors, see `digest`
    committed: str  # time of the commit
    files: list[FileEntry]  # all files except the manifest itself and `verified.json`


def is_permanent(config: Config, manifest: CheckpointManifest, intervals: Iterable[Progress]) -> bool:
    """Whether retention never deletes a checkpoint: it is final, or completes one of the intervals."""
    before, after = manifest.consumed - manifest.batch, manifest.consumed
    due = (config.schedule.due(every, step=manifest.step, before=before, after=after) for every in intervals)
    return manifest.final or any(due)


def evaluation_due(config: Config, manifest: CheckpointManifest) -> bool:
    """Whether the configuration asks to evaluate a checkpoint with this manifest."""
    every = config.eval.every
    return every is not None and is_permanent(config, manifest, [every])
