"""The checkpoint store: which checkpoints exist, which are verified, which are kept.

A checkpoint is written into `step-N.writing-<id>/`, which readers ignore. `commit` writes the manifest (size and
checksum of every file), makes everything durable and renames the directory to `step-N`: now the checkpoint exists.
Reading its bytes back against the manifest makes it verified. Nothing is deleted before its successors are verified,
and a deletion starts with a rename, so a half-deleted checkpoint never looks whole.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from fsdp_pretrain.errors import CheckpointError, StorageError, UserError, raising
from fsdp_pretrain.files import sync
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import make_directory, now

from .manifest import CheckpointManifest, FileEntry, SavedState

MANIFEST, VERIFIED, TRAIN_STATE, CONFIG = "manifest.json", "verified.json", "train_state.json", "config.toml"
_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
_LEFTOVER = re.compile(r"^step-\d{8,}\.(writing|deleting)-")


@dataclass(frozen=True)
class Checkpoint:
    """A directory with a checkpoint's name."""

    step: int  # optimiser steps taken
    path: Path
    problem: str | None  # why it must not be used, judged by manifest, names and sizes; None if it looks whole
    verified: bool  # whether its bytes were read back after it was written

    def manifest(self) -> CheckpointManifest:
        """Contents of `manifest.json`. Raises CheckpointError."""
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
        """Contents of `train_state.json`, checked against the manifest. Raises CheckpointError."""
        path = self.path / TRAIN_STATE
        entries = [entry for entry in self.files() if entry.name == TRAIN_STATE]
        try:
            raw = path.read_bytes()
            if not entries or xxhash.xxh3_128_hexdigest(raw) != entries[0].xxh3:
                raise ValueError("is damaged: its bytes are not the ones that were written (checksum)")
            return state_files.parse(raw, SavedState)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise CheckpointError(f"{path} {error}") from None

    def mark_verified(self) -> Checkpoint:
        """Record that the bytes were read back and match. Returns the updated checkpoint. Raises StorageError."""
        try:
            state_files.write(self.path / VERIFIED, {"verified": now()})
        except OSError as error:
            raise StorageError(f"cannot write {self.path / VERIFIED}: {error}") from None
        return replace(self, verified=True)


def directory_name(step: int) -> str:
    """`step-00001000`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint (or evaluation) directory; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class Store:
    """The checkpoints of a run, in `RUN/checkpoints`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def scan(self) -> list[Checkpoint]:
        """All directories with a checkpoint's name, oldest step first. Raises StorageError if they cannot be read."""
        named = [(step, path) for path in self._entries() if (step := step_of(path.name)) is not None]
        return [_inspect(step, path) for step, path in sorted(named)]

    def find(self, step: int) -> Checkpoint:
        """The checkpoint of a step. Raises CheckpointError if there is none or it does not look whole."""
        checkpoints = self.scan()
        matching = [checkpoint for checkpoint in checkpoints if checkpoint.step == step]
        whole = [checkpoint for checkpoint in matching if checkpoint.problem is None]
        if whole:
            return whole[-1]
        if matching:
            raise CheckpointError(f"{matching[-1].path} cannot be used: {matching[-1].problem}")
        steps = ", ".join(str(checkpoint.step) for checkpoint in checkpoints) or "none"
        raise CheckpointError(
            f"{self.directory} has no checkpoint of step {step} (there are: {steps})",
            remedy="name one of these steps" if checkpoints else "",
        )

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that looks whole, or None."""
        return next((checkpoint for checkpoint in reversed(self.scan()) if checkpoint.problem is None), None)

    def newest_clean(self, until: float) -> Checkpoint | None:
        """The newest verified checkpoint of step `until` or earlier that was not saved during an incident, or None."""
        verified = [item for item in self.scan() if item.problem is None and item.verified and item.step <= until]
        return next((item for item in reversed(verified) if not item.manifest().suspect), None)

    def _entries(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        with raising(StorageError, f"cannot read {self.directory}"):
            return list(self.directory.iterdir())

    def abandoned(self) -> list[Checkpoint]:
        """The checkpoints in `abandoned/`, oldest step first."""
        aside = self.directory / "abandoned"
        places = sorted(aside.iterdir()) if aside.is_dir() else []
        steps = [(step_of("-".join(path.name.split("-")[:2])), path) for path in places]
        return [_inspect(step, path) for step, path in steps if step is not None]

    def begin(self, step: int) -> Path:
        """Create a uniquely named directory to write the checkpoint of `step` into. Raises StorageError."""
        path = self.directory / f"{directory_name(step)}.writing-{uuid.uuid4().hex[:12]}"
        with raising(StorageError, f"cannot create {path}"):
            make_directory(path)
        return path

    def commit(self, attempt: Path, manifest: CheckpointManifest) -> Checkpoint:
        """Turn a completely written attempt into a checkpoint.

        Args:
            attempt: directory from `begin`; its files must be durable, `train_state.json` and `config.toml` among them.

        Raises:
            StorageError: the manifest or the rename could not be made durable; nothing was committed.
        """
        target = attempt.with_name(attempt.name.partition(".")[0])
        try:
            state_files.write(attempt / MANIFEST, manifest.model_dump(exclude_unset=True))
            sync(attempt)
            if target.exists():  # a damaged one of the same step, rejected when the run resumed
                self.abandon(target)
            attempt.rename(target)
            try:
                sync(self.directory)
            except OSError:
                target.rename(attempt)  # else it would block the next save of this step
                raise
        except OSError as error:
            raise StorageError(f"cannot commit {target}: {error}") from None
        return Checkpoint(manifest.step, target, None, False)

    def abandon(self, path: Path) -> Path:
        """Move a checkpoint to `abandoned/`, which is not searched. Returns its new path. Raises OSError."""
        aside = self.directory / "abandoned" / f"{path.name}-{uuid.uuid4().hex[:8]}"
        aside.parent.mkdir(exist_ok=True)
        path.rename(aside)
        return aside

    def retain(
        self, keep_last: int, keep: Callable[[Checkpoint], bool], protected: Collection[int] = ()
    ) -> list[Checkpoint]:
        """Delete checkpoints that the policy does not keep.

        Kept: the newest `keep_last` verified checkpoints, unverified ones newer than the oldest of these, those
        that `keep` accepts, the steps in `protected`, and damaged ones. With fewer than `keep_last` verified
        checkpoints nothing is deleted.

        Returns:
            What was deleted. A deletion that is not completed is left for the next `sweep`.
        """
        whole = [checkpoint for checkpoint in self.scan() if checkpoint.problem is None]
        verified = [checkpoint.step for checkpoint in whole if checkpoint.verified]
        recent = set(verified[-keep_last:])
        if len(verified) < keep_last:
            return []
        deleted = []
        for checkpoint in whole:
            step = checkpoint.step
            if step in recent or step > min(recent) or step in protected or keep(checkpoint):
                continue
            if self._delete(checkpoint.path):
                deleted.append(checkpoint)
        return deleted

    def sweep(self) -> list[Path]:
        """Remove leftovers of killed saves and deletions. Only for the job that holds the run's lock. Raises
        StorageError if the directory cannot be read."""
        stale = [path for path in self._entries() if _LEFTOVER.match(path.name)]
        for path in stale:
            shutil.rmtree(path, ignore_errors=True)
        return stale

    def discard(self, attempt: Path) -> None:
        """Remove a failed attempt."""
        shutil.rmtree(attempt, ignore_errors=True)

    def _delete(self, path: Path) -> bool:
        """Delete a checkpoint. Returns whether it is none any more."""
        doomed = path.with_name(f"{path.name}.deleting-{uuid.uuid4().hex[:8]}")
        try:
            path.rename(doomed)
        except OSError:
            return False
        shutil.rmtree(doomed, ignore_errors=True)
        return True


def _inspect(step: int, path: Path) -> Checkpoint:
    # Only the existence of `verified.json` matters; its content is for people.
    checkpoint = Checkpoint(step, path, None, (path / VERIFIED).is_file())
    return replace(checkpoint, problem=_problem(checkpoint))


def _problem(checkpoint: Checkpoint) -> str | None:
    """A defect of a checkpoint, judged by manifest, names and sizes; None: there is none."""
    if not checkpoint.path.is_dir():
        return "not a directory"
    try:
        entries = checkpoint.files()
    except CheckpointError as error:
        return error.cause.replace(f"{checkpoint.path}{os.sep}", "")
    for entry in entries:
        size = None
        with suppress(OSError):
            size = (checkpoint.path / entry.name).stat().st_size
        if problem := size_problem(entry, size):
            return problem
    return None


def size_problem(entry: FileEntry, size: int | None) -> str | None:
    """How a file's size differs from its manifest entry; None: the file is missing."""
    if size is None:
        return f"{entry.name} is missing"
    return f"{entry.name} has {size} bytes, the manifest says {entry.bytes}" if size != entry.bytes else None


class HashedFile:
    """Reads a file once from its start and hashes it; from storage rather than the page cache where possible."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._digest = path, path.open("rb"), xxhash.xxh3_128()
        self.size = 0  # bytes read
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        """Read the next `size` bytes, or fewer at the end of the file."""
        content = self._file.read(size)
        self._digest.update(content)
        self.size += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a writable buffer; returns their number, which is smaller at the end of the file."""
        size: int = self._file.readinto(buffer)
        self._digest.update(memoryview(buffer)[:size])
        self.size += size
        return size

    def skip_to(self, offset: int) -> None:
        """Read up to an offset, or to the end of the file."""
        while self.size < offset and self.read(min(1 << 22, offset - self.size)):
            pass

    def finish(self) -> FileEntry:
        """Read the rest. Returns the file's manifest entry."""
        while self.read(1 << 22):
            pass
        return FileEntry(name=self._path.name, bytes=self.size, xxh3=self._digest.hexdigest())


def verify_files(path: Path, entries: Iterable[FileEntry]) -> list[str]:
    """Read files back and compare them with their entries. Returns one text per damaged or unreadable file."""
    problems = []
    for entry in entries:
        try:
            problem = difference(entry, describe_file(path / entry.name))
        except OSError as error:
            problem = f"{entry.name}: {error.strerror}"
        if problem:
            problems.append(problem)
    return problems


def difference(entry: FileEntry, actual: FileEntry) -> str:
    """How a file differs from its manifest entry; empty if it does not."""
    if problem := size_problem(entry, actual.bytes):
        return problem
    if actual.xxh3 != entry.xxh3:
        return f"{entry.name}: its bytes are not the ones that were written (checksum)"
    return ""


def describe_file(path: Path) -> FileEntry:
    """The manifest entry of a file. Raises OSError."""
    with HashedFile(path) as file:
        return file.finish()
