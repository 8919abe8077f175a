"""The checkpoint store: which checkpoints exist, which are verified, which are kept. No torch.

A checkpoint is written into `step-N.writing-<id>/`, which nothing else considers. `commit` writes the manifest (every
file with its size and checksum), makes everything durable and renames the directory to `step-N`: from then on it
exists. Reading its bytes back against the manifest makes it verified. Nothing is deleted before its successors are
verified, and a deletion begins by renaming, so a half-deleted checkpoint is never taken for a whole one.
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

import xxhash

from fsdp_pretrain.errors import CheckpointError, StorageError, UserError
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.files import make_directory, now

from .manifest import CheckpointManifest, FileEntry, SavedState

MANIFEST, VERIFIED, TRAIN_STATE, CONFIG = "manifest.json", "verified.json", "train_state.json", "config.toml"
PINNED = "pinned.json"
_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
_LEFTOVER = re.compile(r"^step-\d{8,}\.(writing|deleting)-")


@dataclass(frozen=True)
class Checkpoint:
    """A directory called like a checkpoint.

    Attributes:
        step: optimiser steps taken.
        path: its directory.
        problem: why it must not be used, from a look at names and sizes; None if it looks whole.
        verified: its bytes were read back after it was written.
        pinned: the retention policy must not delete it.
    """

    step: int
    path: Path
    problem: str | None
    verified: bool
    pinned: bool = False

    def manifest(self) -> CheckpointManifest:
        """Raises CheckpointError."""
        try:
            manifest = state_files.read(self.path / MANIFEST, CheckpointManifest)
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
        """Contents of `train_state.json`, proved to be those that the manifest promises. Raises CheckpointError."""
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

    def mark_verified(self) -> Checkpoint:
        """Record that the bytes were read back and match. Raises StorageError."""
        self._mark(VERIFIED, "verified")
        return replace(self, verified=True)

    def pin(self, pinned: bool) -> None:
        """Keep it whatever the policy says, or no longer. Raises StorageError."""
        self._mark(PINNED, "pinned" if pinned else None)

    def _mark(self, name: str, key: str | None) -> None:
        """Write a mark, or remove it if there is no key."""
        try:
            if key is not None:
                state_files.write(self.path / name, {key: now()})
            else:
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot write {self.path / name}: {error}") from None


def directory_name(step: int) -> str:
    """`step-00001000`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step whose checkpoint, or evaluations, a directory of this name holds; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class CheckpointReader(ABC):
    """Checkpoints wherever they are; `directory` is where they should be."""

    directory: Path

    @abstractmethod
    def scan(self) -> list[Checkpoint]:
        """Everything called like a checkpoint, oldest step first; of one step, the one to prefer last."""

    def find(self, step: int) -> Checkpoint:
        """The checkpoint of a step. Raises CheckpointError if there is none or it does not look whole."""
        every = self.scan()
        found = [checkpoint for checkpoint in every if checkpoint.step == step]
        whole = [checkpoint for checkpoint in found if checkpoint.problem is None]
        if whole:
            return whole[-1]
        if found:
            raise CheckpointError(f"{found[-1].path} cannot be used: {found[-1].problem}")
        steps = ", ".join(str(checkpoint.step) for checkpoint in every) or "none"
        raise CheckpointError(f"{self.directory} has no checkpoint of step {step} (there are: {steps})")

    def newest(self) -> Checkpoint | None:
        """The newest that looks whole, or None."""
        return next((checkpoint for checkpoint in reversed(self.scan()) if checkpoint.problem is None), None)


class Store(CheckpointReader):
    """The checkpoints of a run in one directory: `RUN/checkpoints`, or the run's directory in a fallback."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def scan(self) -> list[Checkpoint]:
        """Raises StorageError if the directory cannot be read."""
        found = [(step, path) for path in self._entries() if (step := step_of(path.name)) is not None]
        return [_look(step, path) for step, path in sorted(found)]

    def _entries(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        try:
            return list(self.directory.iterdir())
        except OSError as error:
            raise StorageError(f"cannot read {self.directory}: {error.strerror}") from None

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

    def commit(self, attempt: Path, manifest: CheckpointManifest) -> Checkpoint:
        """Make a completely written attempt a checkpoint.

        Args:
            attempt: from `begin`; all its files durable, `train_state.json` and `config.toml` among them.
            manifest: what is promised of it.

        Raises:
            StorageError: the manifest or the rename could not be made durable; nothing was committed.
        """
        target = attempt.with_name(attempt.name.partition(".")[0])
        try:
            state_files.write(attempt / MANIFEST, manifest.model_dump(exclude_unset=True))
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
        stale = [path for path in self._entries() if _LEFTOVER.match(path.name)]
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
    # The marks say what they say by being there; their contents are for people.
    found = Checkpoint(step, path, None, (path / VERIFIED).is_file(), (path / PINNED).is_file())
    return replace(found, problem=_problem(found))


def _problem(checkpoint: Checkpoint) -> str | None:
    """What is wrong with a checkpoint, from its manifest, names and sizes."""
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
            found = describe_file(path / entry.name)
        except OSError as error:
            wrong.append(f"{entry.name}: {error.strerror}")
            continue
        if found.bytes != entry.bytes:
            wrong.append(f"{entry.name} has {found.bytes} bytes, the manifest says {entry.bytes}")
        elif found.xxh3 != entry.xxh3:
            wrong.append(f"{entry.name}: its bytes are not the ones that were written (checksum)")
    return wrong


def describe_file(path: Path) -> FileEntry:
    """The manifest entry of a file, read from storage rather than from the page cache where the system allows.

    Raises OSError.
    """
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(name=path.name, bytes=size, xxh3=digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
