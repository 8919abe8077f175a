"""The id of a run directory, by which it is told from an empty directory in its place.

When a mount goes away, its path is an empty directory, and a run started there would begin at step 0. So a run
directory holds a random id in a file; its `checkpoints/`, which may be a mount of its own, holds one too. Whoever works
in a run binds its process to these ids: from then on the process makes no file and no directory where the id is gone.
What the starts under one launcher, or one torchrun, have seen of a run is noted outside of it (`Memory`), so that the
next start can tell when there is less.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..atomic import create_file, replace_file
from ..errors import RunGoneError, StorageError

NAME = "run_id"

_bound: dict[Path, str | None] = {}
"""Directories that this process is bound to, and the id that each must hold; None: not known yet."""


def read(directory: Path) -> str | None:
    """The id in a directory; None if it holds none, or is not there. Raises StorageError if that cannot be seen."""
    try:
        return (directory / NAME).read_text(encoding="utf-8").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(
            f"{socket.gethostname()} cannot read {directory / NAME}: {error.strerror}",
            remedy="see whether its file system answers on that host",
        ) from None
    except UnicodeDecodeError:
        raise StorageError(
            f"{directory / NAME} is damaged: it is not text",
            remedy="restore it, or remove it if this is the directory that is meant",
        ) from None


def give(directory: Path, run_id: str = "") -> str:
    """Make a directory and give it an id, unless it is there and has one; the id it has. Raises StorageError.

    Args:
        directory: made with what is missing above it.
        run_id: the id to give; empty: a new one.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        known = read(directory)
        if known is None:
            with contextlib.suppress(FileExistsError):  # another process was faster
                create_file(directory / NAME, f"{run_id or os.urandom(16).hex()}\n")
            known = read(directory)
    except OSError as error:
        raise StorageError(f"cannot write to the run directory {directory}: {error.strerror}") from None
    if known is None:
        raise StorageError(f"{directory / NAME} is empty", remedy="remove it, if this is the directory that is meant")
    return known


def bind(directory: Path, run_id: str | None) -> None:
    """From now on this process writes into a directory only while that holds this id; None: not until it is known."""
    _bound[directory] = run_id


def bound_to(directory: Path) -> str | None:
    """The id that this process is bound to in a directory; None if it is not bound, or the id is not known yet."""
    return _bound.get(directory)


def require(path: Path) -> Path | None:
    """The innermost directory around a path that this process is bound to, if any.

    Raises OSError if it, or one further out, does not hold its id.
    """
    around = [directory for directory in _bound if path.is_relative_to(directory)]
    for directory in around:
        if _bound[directory] is None or _found(directory) != _bound[directory]:
            raise FileNotFoundError(errno.ENOENT, f"{directory} is not the run's any more", str(path))
    return max(around, key=lambda directory: len(directory.parts), default=None)


def _found(directory: Path) -> str | None:
    try:
        return read(directory)
    except StorageError:
        return None


def lost() -> Path | None:
    """A directory that this process is bound to and that does not hold its id any more, if any. Raises StorageError."""
    known = [(directory, run_id) for directory, run_id in _bound.items() if run_id is not None]
    return next((directory for directory, run_id in known if read(directory) != run_id), None)


def check() -> None:
    """Raise RunGoneError if a directory that this process is bound to does not hold its id; StorageError as `read`."""
    directory = lost()
    if directory is not None:
        raise gone(directory)


def gone(directory: Path, found: str = "") -> RunGoneError:
    """What to raise about a run directory, or its checkpoints, that is not the one it was.

    Args:
        directory: where it was.
        found: what is there instead; empty: look.
    """
    what = "checkpoint" if directory.name == "checkpoints" else "run"
    return RunGoneError(
        f"the {what} directory {directory} is gone on {socket.gethostname()}: {found or _describe(directory)}",
        effect="nothing was trained or saved there: that would be another run, from step 0",
        remedy="see whether its file system is mounted on that host, or restore it; then the same command goes on from "
        "the last checkpoint",
    )


def _describe(directory: Path) -> str:
    if not directory.is_dir():
        return "there is no such directory"
    if (directory / NAME).exists():
        return "the directory is that of another run"
    return f"the directory {'holds no ' + NAME if any(directory.iterdir()) else 'is empty'}"


@dataclass(frozen=True)
class Seen:
    """What was seen of a run.

    Attributes:
        run_id: of its directory.
        segment: the newest that has joined the kept line; 0: none yet.
        checkpoint: newest step of that line with a checkpoint; None: none.
    """

    run_id: str
    segment: int = 0
    checkpoint: int | None = None


class Memory:
    """What the starts under one launcher, or one torchrun, have seen of a run, on one node.

    Args:
        note: the file that passes it on to the next start, outside the run directory; None: there will be none.
        active: this process looks after it for its node; others only know what it held at their start.

    Attributes:
        seen: None: nothing yet.

    Raises:
        StorageError: there is a note, and it cannot be read.
    """

    def __init__(self, note: Path | None, *, active: bool = True) -> None:
        self._note, self._active = note, active
        self.seen: Seen | None = None
        try:
            if note is not None and note.exists():
                self.seen = Seen(**json.loads(note.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise StorageError(f"cannot read {note}, what earlier starts have seen of the run: {error}") from None

    def check(self, directory: Path, newest: Callable[[], int]) -> None:
        """Refuse a run directory that is another than the one seen, or an earlier state of it.

        Args:
            directory: the run directory.
            newest: gives the number of its newest segment.

        Raises:
            RunGoneError: it is.
            StorageError: that cannot be seen.
        """
        if self.seen is None or not self._active:
            return
        if read(directory) != self.seen.run_id:
            raise gone(directory)
        if (found := newest()) < self.seen.segment:
            raise gone(directory, f"its newest segment is {found}, but segment {self.seen.segment} has been there")

    def remember(self, **facts: Any) -> None:
        """Change attributes of `seen`. A node that cannot note it says so, and goes on."""
        self.seen = Seen(**facts) if self.seen is None else replace(self.seen, **facts)
        if self._note is None or not self._active:
            return
        try:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._note, json.dumps(asdict(self.seen)) + "\n")
        except OSError as error:
            print(f"warning: a restart may not notice that the run directory is gone: {error}", file=sys.stderr)
