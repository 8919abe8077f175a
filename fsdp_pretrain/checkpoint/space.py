"""Room for the next checkpoint: how much there is, and what may be given up for it. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import StorageError
from ..units import human_bytes

GiveUp = Sequence[tuple[str, Callable[[], object]]]
"""(what to call it, the act; its result is falsy if there was nothing), the dearest last."""

BYTES_PER_PARAMETER = 12
"""fp32 parameters and both moments of AdamW, in memory and in a checkpoint."""

_BALLAST = ".ballast"
_LARGEST_SHARE = 0.02


@dataclass(frozen=True)
class Need:
    """What a checkpoint takes.

    Attributes:
        bytes: exact, or a little more.
        files: names it creates.
    """

    bytes: int
    files: int

    def lacking(self, directory: Path) -> str | None:
        """What the file system of a directory has too little of; None: the checkpoint fits. Raises OSError."""
        found = os.statvfs(directory)
        free = found.f_bavail * found.f_frsize
        if free < self.bytes:
            return f"needs {human_bytes(self.bytes)}, {directory} has {human_bytes(free)} free"
        if found.f_files and found.f_favail < self.files:  # some file systems do not count them
            return f"needs {self.files} files, {directory} has room for {found.f_favail}"
        return None


def make_room(directory: Path, need: Need, give_up: GiveUp) -> Iterator[str]:
    """Give things up in order until a checkpoint fits; yields what was given up.

    Args:
        directory: where the checkpoint will be.
        need: what it takes.
        give_up: what may go.

    Raises:
        StorageError: it does not fit after all of that.
    """
    try:
        for name, act in give_up:
            if need.lacking(directory) is None:
                return
            if act():
                yield name
        lacking = need.lacking(directory)
    except OSError as error:
        raise StorageError(f"cannot look at {directory}: {error}") from None
    if lacking is not None:
        raise StorageError(
            lacking,
            effect="nothing was written; training past here is not protected",
            remedy="free space, or keep fewer checkpoints (checkpoint.keep_last, checkpoint.keep_every)",
        )


class Ballast:
    """A file that holds some space back, to be let go when a save would not fit otherwise.

    Args:
        directory: `RUN/checkpoints`.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / _BALLAST

    def take(self, checkpoint_bytes: int) -> None:
        """Hold back a tenth of a checkpoint or 2% of the file system, whichever is less, if it is to spare."""
        if self.path.exists():
            return
        try:
            found = os.statvfs(self.path.parent)
            size = min(checkpoint_bytes // 10, int(found.f_blocks * found.f_frsize * _LARGEST_SHARE))
            if size <= 0 or found.f_bavail * found.f_frsize < checkpoint_bytes + 2 * size:
                return
            with self.path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError:  # not worth failing for
            self.release()

    def release(self) -> bool:
        """Let it go; whether there was one."""
        try:
            self.path.unlink()
        except OSError:
            return False
        return True
