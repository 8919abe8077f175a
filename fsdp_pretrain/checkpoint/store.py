"""The checkpoint store: which checkpoints exist, which are proved, which are kept. No torch.

A checkpoint is written into `step-N.writing-<id>/`, which nobody else ever considers. `commit` writes the manifest
(every file with its size and checksum), makes everything durable and renames the directory to `step-N`: from then on
it exists. Reading its bytes back against the manifest makes it verified. Nothing is deleted before its successors
are verified, and a deletion begins by renaming, so a half-deleted checkpoint is never taken for a whole one.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import Field

from ..errors import CheckpointError, StorageError, UserError
from ..record import state_files
from ..record.environment import WorldShape
from ..record.files import make_directory, now
from ..record.state_files import StateFile

MANIFEST, VERIFIED, TRAIN_STATE, CONFIG = "manifest.json", "verified.json", "train_state.json", "config.toml"
PINNED = "pinned.json"
_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
_LEFTOVER = re.compile(r"^step-\d{8,}\.(writing|deleting)-")
Count = Annotated[int, Field(ge=0)]


class FileEntry(StateFile):
    """A file of a checkpoint as its writer made it."""

    name: Annotated[str, Field(pattern=r"^[^/]+$")]
    bytes: Count
    xxh3: str


class Manifest(StateFile):
    """`manifest.json`: what a checkpoint is, and what its files are.

    Attributes:
        step, consumed, cursor, batch, tokens: of the training state, see `state.TrainState`.
        run: name of the run.
        segment: that wrote it; None if no segment did (an import).
        final: it is the last of a complete run.
        optimizer: it holds optimiser state; else weights alone.
        imported: folder or checkpoint that its weights are from, if they were imported.
        suspect: why nothing should go back to it, if it was saved during an incident.
        world: the ranks that wrote it.
        state_digest: of its tensors, see `digest`.
        torch, fsdp_pretrain: versions that wrote it.
        committed: when.
        files: all its files but this and the marks that are added later.
    """

    step: Count
    consumed: Count
    cursor: Count
    batch: Count
    tokens: Count
    run: str
    segment: int | None = None
    final: bool
    optimizer: bool = True
    imported: str | None = None
    suspect: str | None = None
    world: WorldShape
    state_digest: str
    torch: str
    fsdp_pretrain: str
    committed: str
    files: list[FileEntry]


class SavedState(StateFile):
    """`train_state.json`: the counters of the run, and what no resume may change.

    Attributes:
        step, consumed, cursor, batch, loss_scale: see `state.TrainState`.
        tokens: trained.
        world: the ranks that wrote it.
        identity: see `state.identity`.
    """

    step: Count
    consumed: Count
    cursor: Count
    batch: Count
    loss_scale: list[float] | None = None
    tokens: Count
    world: WorldShape
    identity: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A directory called like a checkpoint.

    Attributes:
        step: optimiser steps taken.
        path: its directory.
        problem: why it must not be used, from a look at names and sizes; None if it looks whole.
        verified: its bytes were read back after it was written.
        pinned: a person wants it kept.
    """

    step: int
    path: Path
    problem: str | None
    verified: bool
    pinned: bool = False

    def manifest(self) -> Manifest:
        """Contents of its manifest. Raises CheckpointError."""
        try:
            manifest = state_files.read(self.path / MANIFEST, Manifest)
        except UserError as error:
            raise CheckpointError(error.cause) from None
        if manifest is None:
            raise CheckpointError(f"{self.path / MANIFEST} is missing")
        if manifest.step != self.step:
            raise CheckpointError(f"{self.path / MANIFEST} is that of step {manifest.step}")
        return manifest

    def files(self) -> list[FileEntry]:
        """Files listed in the manifest. Raises CheckpointError."""
        return self.manifest().files

    def train_state(self) -> SavedState:
        """Contents of `train_state.json`, which are those that the manifest promises. Raises CheckpointError."""
        path = self.path / TRAIN_STATE
        promised = [entry for entry in self.files() if entry.name == TRAIN_STATE]
        try:
            raw = path.read_bytes()
            if not promised or xxhash.xxh3_128_hexdigest(raw) != promised[0].xxh3:
                raise ValueError("is damaged: its bytes are not the ones that were written (checksum)")
            return state_files.parse(raw, SavedState)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise CheckpointError(f"{path} {error}") from None


def directory_name(step: int) -> str:
    """`step-00001000`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of which a directory of this name holds the checkpoint, or evaluations; None if of none."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class Shelf(ABC):
    """What can be asked of checkpoints wherever they are.

    Attributes:
        directory: where they should be.
    """

    directory: Path

    @abstractmethod
    def scan(self) -> list[Checkpoint]:
        """Everything called like a checkpoint, oldest step first; of one step, the one to prefer last."""

    def find(self, step: int) -> Checkpoint:
        """The checkpoint of a step. Raises CheckpointError if there is none or it does not look whole."""
        found = [checkpoint for checkpoint in self.scan() if checkpoint.step == step]
        whole = [checkpoint for checkpoint in found if checkpoint.problem is None]
        if whole:
            return whole[-1]
        if found:
            raise CheckpointError(f"{found[-1].path} cannot be used: {found[-1].problem}")
        steps = ", ".join(str(checkpoint.step) for checkpoint in self.scan()) or "none"
        raise CheckpointError(f"{self.directory} has no checkpoint of step {step} (there are: {steps})")

    def newest(self) -> Checkpoint | None:
        """The newest that looks whole, or None."""
        return next((checkpoint for checkpoint in reversed(self.scan()) if checkpoint.problem is None), None)

    def mark_verified(self, checkpoint: Checkpoint) -> Checkpoint:
        """Note that the bytes were read back and match. Raises StorageError."""
        try:
            state_files.write(checkpoint.path / VERIFIED, {"verified": now()})
        except OSError as error:
            raise StorageError(f"cannot write {checkpoint.path / VERIFIED}: {error}") from None
        return replace(checkpoint, verified=True)

    def pin(self, checkpoint: Checkpoint, pinned: bool) -> None:
        """Keep a checkpoint whatever the policy says, or no longer. Raises StorageError."""
        try:
            if pinned:
                state_files.write(checkpoint.path / PINNED, {"pinned": now()})
            else:
                (checkpoint.path / PINNED).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot write {checkpoint.path / PINNED}: {error}") from None


class Store(Shelf):
    """The checkpoints of a run in one directory.

    Args:
        directory: `RUN/checkpoints`, or the run's directory in a fallback.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def scan(self) -> list[Checkpoint]:
        """Everything called like a checkpoint, oldest step first."""
        if not self.directory.is_dir():
            return []
        try:
            paths = list(self.directory.iterdir())
        except OSError as error:
            raise StorageError(f"cannot read {self.directory}: {error.strerror}") from None
        found = [(step, path) for path in paths if (step := step_of(path.name)) is not None]
        return [_look(step, path) for step, path in sorted(found)]

    def begin(self, step: int) -> Path:
        """A fresh directory to write the checkpoint of `step` into; its name is never used twice.

        Raises:
            StorageError: it cannot be created.
        """
        path = self.directory / f"{directory_name(step)}.writing-{uuid.uuid4().hex[:12]}"
        try:
            make_directory(path)
        except OSError as error:
            raise StorageError(f"cannot create {path}: {error.strerror}") from None
        return path

    def commit(self, attempt: Path, files: Iterable[FileEntry], facts: dict[str, Any]) -> Checkpoint:
        """Make a completely written attempt a checkpoint.

        Args:
            attempt: from `begin`; all its files durable, `train_state.json` and `config.toml` among them.
            files: what the manifest promises.
            facts: further entries of the manifest, see `Manifest`.

        Raises:
            StorageError: the manifest or the rename could not be made durable; nothing was committed.
        """
        listed = [entry.model_dump() for entry in sorted(files, key=lambda entry: entry.name)]
        content = {**facts, "committed": now(), "files": listed}
        manifest = Manifest.model_validate(content)
        target = attempt.with_name(attempt.name.partition(".")[0])
        try:
            state_files.write(attempt / MANIFEST, content)
            sync_directory(attempt)
            if target.exists():  # a damaged one of the same step, which the run passed over when it resumed
                self.abandon(target)
            attempt.rename(target)
            try:
                sync_directory(self.directory)
            except OSError:
                target.rename(attempt)  # or the next attempt at this step would find it in its place
                raise
        except OSError as error:
            raise StorageError(f"cannot commit {target}: {error}") from None
        return Checkpoint(manifest.step, target, None, False)

    def abandon(self, path: Path) -> Path:
        """Move a checkpoint aside into `abandoned/`, where nothing looks for one. Raises OSError."""
        aside = self.directory / "abandoned" / f"{path.name}-{uuid.uuid4().hex[:8]}"
        aside.parent.mkdir(exist_ok=True)
        path.rename(aside)
        return aside

    def retain(
        self, keep_last: int, keep: Callable[[Checkpoint], bool], protected: Collection[int] = ()
    ) -> list[Checkpoint]:
        """Delete what the policy does not name.

        Kept: the newest `keep_last` verified checkpoints, pinned ones, those that `keep` accepts, the steps in
        `protected`, and everything newer than the oldest of these that is not verified yet.

        Returns:
            What was deleted. A deletion that fails is left for the next `sweep`.
        """
        whole = [checkpoint for checkpoint in self.scan() if checkpoint.problem is None]
        verified = [checkpoint.step for checkpoint in whole if checkpoint.verified]
        recent = set(verified[-keep_last:])
        if len(verified) < keep_last:
            return []
        deleted = []
        for checkpoint in whole:
            step = checkpoint.step
            if step in recent or step > min(recent) or step in protected or checkpoint.pinned or keep(checkpoint):
                continue
            self._delete(checkpoint.path)
            deleted.append(checkpoint)
        return deleted

    def sweep(self) -> list[Path]:
        """Remove what killed saves and deletions left behind. Only for the one job that owns the run.

        Raises:
            StorageError: the directory cannot be read.
        """
        if not self.directory.is_dir():
            return []
        try:
            stale = [path for path in self.directory.iterdir() if _LEFTOVER.match(path.name)]
        except OSError as error:
            raise StorageError(f"cannot read {self.directory}: {error.strerror}") from None
        for path in stale:
            shutil.rmtree(path, ignore_errors=True)
        return stale

    def discard(self, attempt: Path) -> None:
        """Remove a failed attempt, to give its space back."""
        shutil.rmtree(attempt, ignore_errors=True)

    def _delete(self, path: Path) -> None:
        doomed = path.with_name(f"{path.name}.deleting-{uuid.uuid4().hex[:8]}")
        try:
            path.rename(doomed)
        except OSError:
            return
        shutil.rmtree(doomed, ignore_errors=True)


def _look(step: int, path: Path) -> Checkpoint:
    """A directory called like the checkpoint of a step, as far as its manifest, names and sizes tell."""
    # The marks say what they say by being there; their contents are for people.
    found = Checkpoint(step, path, None, (path / VERIFIED).is_file(), (path / PINNED).is_file())
    return replace(found, problem=_problem(found))


def _problem(checkpoint: Checkpoint) -> str | None:
    """What is wrong with a checkpoint as far as its manifest, names and sizes tell."""
    if not checkpoint.path.is_dir():
        return "not a directory"
    try:
        entries = checkpoint.files()
    except CheckpointError as error:
        return error.cause.replace(f"{checkpoint.path}{os.sep}", "")
    for entry in entries:
        try:
            size = (checkpoint.path / entry.name).stat().st_size
        except OSError:
            return f"{entry.name} is missing"
        if size != entry.bytes:
            return f"{entry.name} has {size} bytes, the manifest says {entry.bytes}"
    return None


def verify_files(path: Path, entries: Iterable[FileEntry]) -> list[str]:
    """Read files back and compare with the manifest; what is wrong, one text per bad file."""
    wrong = []
    for entry in entries:
        try:
            size, digest = checksum(path / entry.name)
        except OSError as error:
            wrong.append(f"{entry.name}: {error.strerror}")
            continue
        if size != entry.bytes:
            wrong.append(f"{entry.name} has {size} bytes, the manifest says {entry.bytes}")
        elif digest != entry.xxh3:
            wrong.append(f"{entry.name}: its bytes are not the ones that were written (checksum)")
    return wrong


def checksum(path: Path) -> tuple[int, str]:
    """(size, xxh3-128) of a file, read from storage rather than from the page cache where the system allows."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def describe_file(path: Path) -> FileEntry:
    """The manifest entry of a file on disk. Raises OSError."""
    size, digest = checksum(path)
    return FileEntry(name=path.name, bytes=size, xxh3=digest)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
