"""The two records of a checkpoint: `manifest.json`, and `train_state.json` with what no resume may change. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from fsdp_pretrain.record.environment import WorldShape
from fsdp_pretrain.record.state_files import StateFile

Count = Annotated[int, Field(ge=0)]


class FileEntry(StateFile):
    """A file of a checkpoint as its writer made it."""

    name: Annotated[str, Field(pattern=r"^[^/]+$")]
    bytes: Count
    xxh3: str


class Counters(StateFile):
    """Where training stood when a checkpoint was written, see `state.TrainState`, and on how many ranks."""

    step: Count
    consumed: Count
    cursor: Count
    batch: Count
    loss_scale: list[float] | None = None
    tokens: Count
    world: WorldShape


class TokenizerIdentity(StateFile):
    """Which tokenizer, and its separator of documents."""

    fingerprint: str
    eod: int


class RunIdentity(StateFile):
    """What no resume may change, see `state.identity`. Each part is what a later start compares its own with."""

    model: dict[str, Any]
    data: dict[str, Any]
    mixture: dict[str, dict[str, Any]]
    corpora: dict[str, str]
    reshuffle: list[int]
    tokenizer: TokenizerIdentity


class SavedState(Counters):
    """`train_state.json`: the counters of the run, and what no resume may change."""

    written: str | None = None
    identity: RunIdentity


class Facts(Counters):
    """What a manifest says of a checkpoint before it is written.

    Attributes:
        run: name of the run.
        segment: that wrote it; None if no segment did (an import).
        final: it is the last of a complete run.
        torch, fsdp_pretrain: versions that wrote it.
        imported: folder or checkpoint that its weights are from, if they were imported.
        suspect: why nothing should go back to it, if it was saved during an incident.
    """

    run: str
    segment: int | None = None
    final: bool
    torch: str
    fsdp_pretrain: str
    imported: str | None = None
    suspect: str | None = None


class CheckpointManifest(Facts):
    """`manifest.json`: what a checkpoint is, and what its files are.

    Attributes:
        optimizer: it holds optimiser state; else weights alone.
        state_digest: of its tensors, see `digest`.
        committed: when.
        files: all its files but this and the marks that are added later.
    """

    optimizer: bool = True
    state_digest: str
    committed: str
    files: list[FileEntry]
