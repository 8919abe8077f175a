"""Disk space for checkpoints: how much is free, and what may be deleted for the next one. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_pretrain.errors import StorageError
from fsdp_pretrain.units import human_bytes

from .store import Checkpoint

Reclaimable = Sequence[tuple[str, Callable[[], object]]]
"""Pairs (name, action), the most valuable last; an action returns a falsy value if there was nothing to delete."""

_BALLAST = ".ballast"
_LARGEST_SHARE = 0.02
_LARGEST_RESERVE = 20 << 30


@dataclass(frozen=True)
class Room:
    """Free and total space of a directory's file system.

    Attributes:
        path: the directory, or its nearest existing ancestor.
        free, total: bytes; `free` excludes what is reserved for root.
        files_free, files: inodes; `files` is 0 where they are not limited.
        device: `st_dev` of the file system.
    """

    path: str
    free: int
    total: int
    files_free: int = 0
    files: int = 0
    device: int = 0

    @classmethod
    def of(cls, directory: Path) -> Room:
        """The space for a directory, which need not exist yet. Raises OSError."""
        while not directory.exists() and directory != directory.parent:
            directory = directory.parent
        found, device = os.statvfs(directory), directory.stat().st_dev
        free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        return cls(str(directory), free, total, found.f_favail, found.f_files, device)

    def reserved(self, share: float) -> float:
        """Bytes that do not count as free: a share of the file system, at most 20 GiB."""
        return min(_LARGEST_RESERVE, share * self.total)


@dataclass(frozen=True)
class SpaceNeeded:
    """Bytes and inodes that checkpoints take."""

    bytes: int
    files: int

    def fits(self, room: Room) -> bool:
        """Whether it fits, without any margin."""
        return room.free >= self.bytes and (not room.files or room.files_free >= self.files)

    def compare(self, room: Room) -> str:
        """Text with what is needed and what is free."""
        names = f" and room for {room.files_free} files" if room.files else ""
        need = f"needs {human_bytes(self.bytes)} in {self.files} files"
        return f"{need}, {room.path} has {human_bytes(room.free)} free{names}"


def attempts(directory: Path) -> dict[str, int]:
    """Bytes already written by saves in flight, by directory name."""
    found = directory.glob("step-*.writing-*") if directory.is_dir() else ()
    return {path.name: sum(_bytes(inner) for inner in path.rglob("*")) for path in found}


def _bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def prunable(checkpoints: Iterable[Checkpoint]) -> SpaceNeeded:
    """Upper bound of what `checkpoint.prune` may delete; `keep_every` may protect some of it."""
    verified = [item for item in checkpoints if item.problem is None and item.verified]
    files = [entry for item in verified[:-2] if not item.pinned for entry in item.files()]
    return SpaceNeeded(sum(entry.bytes for entry in files), len(files))


def make_room(directory: Path, need: SpaceNeeded, reclaimable: Reclaimable) -> Iterator[str]:
    """Run the actions in order until a checkpoint fits; yields the names of those that freed something.

    Raises:
        StorageError: it still does not fit.
    """
    try:
        for name, act in reclaimable:
            if need.fits(Room.of(directory)):
                return
            if act():
                yield name
        room = Room.of(directory)
    except OSError as error:
        raise StorageError(f"cannot read {directory}: {error}") from None
    if not need.fits(room):
        raise StorageError(
            need.compare(room),
            effect="nothing was written; steps from here on are in no checkpoint",
            remedy="free space, or keep fewer checkpoints (checkpoint.keep_last, checkpoint.keep_every)",
        )


class Ballast:
    """A file in `RUN/checkpoints` that reserves space; deleted when a save would not fit otherwise."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / _BALLAST

    def take(self, checkpoint_bytes: int) -> None:
        """Reserve a tenth of a checkpoint or 2% of the file system, whichever is less, if there is enough space."""
        if self.path.exists():
            return
        try:
            room = Room.of(self.path.parent)
            size = min(checkpoint_bytes // 10, int(room.total * _LARGEST_SHARE))
            if size <= 0 or room.free < checkpoint_bytes + 2 * size:
                return
            with self.path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError:  # not worth failing for
            self.release()

    def release(self) -> bool:
        """Delete the file. Returns whether there was one."""
        try:
            self.path.unlink()
        except OSError:
            return False
        return True
