"""Disk space for checkpoints: how much is free, and what may be deleted for the next one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fsdp_pretrain.errors import CheckpointError, StorageError
from fsdp_pretrain.units import counted, human_bytes

from .store import Checkpoint

Prune = Callable[[], object]
"""Deletes old checkpoints; returns a falsy value if there was nothing to delete."""

_LARGEST_RESERVE = 20 << 30


@dataclass(frozen=True)
class Room:
    """Free and total space of a directory's file system."""

    path: str  # the directory, or its nearest existing ancestor
    free: int  # this and the next: bytes; `free` excludes what is reserved for root
    total: int
    files_free: int = 0  # this and the next: inodes; `files` is 0 where they are not limited
    files: int = 0
    device: int = 0  # `st_dev` of the file system

    @classmethod
    def of(cls, directory: Path) -> Room:
        """The space on a directory's file system; the directory need not exist yet. Raises OSError."""
        while not directory.exists() and directory != directory.parent:
            directory = directory.parent
        space, device = os.statvfs(directory), directory.stat().st_dev
        free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
        return cls(str(directory), free, total, space.f_favail, space.f_files, device)

    def reserved(self, share: float) -> float:
        """Bytes that do not count as free: a share of the file system, at most 20 GiB."""
        return min(_LARGEST_RESERVE, share * self.total)


@dataclass(frozen=True)
class SpaceNeeded:
    """Bytes and inodes that one or more checkpoints need."""

    bytes: int
    files: int

    def fits(self, room: Room) -> bool:
        """Whether this fits into the free space, without any margin."""
        return room.free >= self.bytes and (not room.files or room.files_free >= self.files)

    def compare(self, room: Room) -> str:
        """A sentence with the space that is needed and that is free."""
        names = f" and room for {room.files_free} files" if room.files else ""
        need = f"needs {human_bytes(self.bytes)} in {counted(self.files, 'file')}"
        return f"{need}, {room.path} has {human_bytes(room.free)} free{names}"


def attempts(directory: Path) -> dict[str, int]:
    """Bytes already written by saves in flight, by directory name."""
    saves = directory.glob("step-*.writing-*") if directory.is_dir() else ()
    return {path.name: sum(_bytes(inner) for inner in path.rglob("*")) for path in saves}


def _bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def prunable(checkpoints: Iterable[Checkpoint]) -> SpaceNeeded:
    """Upper bound of the space of checkpoints that may be deleted for the next one; `keep_every` may protect some."""
    verified = [item for item in checkpoints if item.problem is None and item.verified]
    files = [entry for item in verified[:-2] for entry in item.files()]
    return SpaceNeeded(sum(entry.bytes for entry in files), len(files))


def make_room(directory: Path, need: SpaceNeeded, prune: Prune | None) -> bool:
    """Delete old checkpoints if a new one does not fit. Returns whether any were deleted. Raises StorageError if the
    new one does not fit, even so."""
    try:
        pruned = prune is not None and not need.fits(Room.of(directory)) and bool(prune())
        room = Room.of(directory)
    except OSError as error:
        raise StorageError(f"cannot read {directory}: {error}") from None
    except CheckpointError as error:
        raise StorageError(f"old checkpoints cannot be deleted: {error.cause}") from None
    if not need.fits(room):
        raise StorageError(
            need.compare(room),
            effect="nothing was written; steps from here on are in no checkpoint",
            remedy="free space, or keep fewer checkpoints (checkpoint.keep_last, checkpoint.keep_every)",
        )
    return pruned
