"""The id of a run directory, which distinguishes it from an empty mount point.

When a mount disappears, its path is an empty directory, and a run started there would begin at step 0. So a run
directory has a file with a random id, as has its `checkpoints/`, which may be a separate mount. A process that works in
a run binds itself to these ids: it then creates no file or directory where the id is missing. Each start also notes
the state of the run outside of it (`LauncherMemory`), so that the next start under the same launcher notices a loss.
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

from fsdp_pretrain.errors import RunGoneError, StorageError, raising
from fsdp_pretrain.files import create_file, replace_file

NAME = "run_id"

_bound: dict[Path, str | None] = {}
"""Directories that this process is bound to, with their ids; None: not known yet."""


def read(directory: Path) -> str | None:
    """The id of a directory; None if it has none or does not exist. Raises StorageError if it cannot be read."""
    try:
        return (directory / NAME).read_text(encoding="utf-8").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(
            f"{socket.gethostname()} cannot read {directory / NAME}: {error.strerror}",
            remedy="check that its file system responds on that host",
        ) from None
    except UnicodeDecodeError:
        raise StorageError(
            f"{directory / NAME} is damaged: it is not text",
            remedy="restore it, or remove it if this is the right directory",
        ) from None


def assign(directory: Path, run_id: str = "") -> str:
    """Create a directory and its id if they are missing. Returns the id. Raises StorageError.

    With an empty `run_id`, the id is random.
    """
    with raising(StorageError, f"cannot write to the run directory {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        if (known := read(directory)) is None:
            with contextlib.suppress(FileExistsError):  # another process was faster
                create_file(directory / NAME, f"{run_id or os.urandom(16).hex()}\n")
            known = read(directory)
    if known is None:
        raise StorageError(f"{directory / NAME} is empty", remedy="remove it, if this is the right directory")
    return known


def bind(directory: Path, run_id: str | None) -> None:
    """Let this process write to a directory only while it has this id; None: not at all."""
    _bound[directory] = run_id


def unbind(directory: Path) -> None:
    """Let this process write to a directory regardless of its id, as before `bind`."""
    _bound.pop(directory, None)


def bound_to(directory: Path) -> str | None:
    """The id that this process is bound to in a directory; None if it has none, or is not bound."""
    return _bound.get(directory)


def require(path: Path) -> Path | None:
    """The innermost bound directory that contains a path, if any. Raises OSError if such a directory lost its id."""
    around = [directory for directory in _bound if path.is_relative_to(directory)]
    for directory in around:
        run_id = None
        with contextlib.suppress(StorageError):
            run_id = read(directory)
        if run_id is None or run_id != _bound[directory]:
            raise FileNotFoundError(errno.ENOENT, f"{directory} is no longer the directory of the run", str(path))
    return max(around, key=lambda directory: len(directory.parts), default=None)


def lost() -> Path | None:
    """A bound directory that has lost its id, if any. Raises StorageError."""
    known = [(directory, run_id) for directory, run_id in _bound.items() if run_id is not None]
    return next((directory for directory, run_id in known if read(directory) != run_id), None)


def check() -> None:
    """Raise RunGoneError if a bound directory has lost its id, StorageError if an id cannot be read."""
    if (directory := lost()) is not None:
        raise run_gone_error(directory)


def run_gone_error(directory: Path, problem: str = "") -> RunGoneError:
    """The error for a lost run or checkpoint directory; `problem`: what is there instead (empty: inspect it)."""
    what = "checkpoint" if directory.name == "checkpoints" else "run"
    return RunGoneError(
        f"the {what} directory {directory} is gone on {socket.gethostname()}: {problem or _describe(directory)}",
        effect="nothing was trained or saved there: that would be another run, from step 0",
        remedy="check that its file system is mounted on that host, or restore it; then the same command continues "
        "from the last checkpoint",
    )


def _describe(directory: Path) -> str:
    if not directory.is_dir():
        return "there is no such directory"
    if (directory / NAME).exists():
        return "the directory is that of another run"
    return f"the directory {'holds no ' + NAME if any(directory.iterdir()) else 'is empty'}"


@dataclass(frozen=True)
class SeenRun:
    """The state of a run as a start saw it."""

    run_id: str
    segment: int = 0  # the newest segment on the kept line; 0: none yet
    checkpoint: int | None = None  # the newest checkpointed step of that line
    restored: int = 0  # the newest segment that came from the mirror; 0: nothing was restored


class LauncherMemory:
    """The last state of a run (`seen`) that starts under one launcher or torchrun saw, on one node.

    `note` is a file outside the run directory that passes it on to the next start; None if there will be none. Only the
    `active` process of a node checks and writes it. Raises StorageError if the note cannot be read.
    """

    def __init__(self, note: Path | None, *, active: bool = True) -> None:
        self._note, self._active = note, active
        self.seen: SeenRun | None = None
        try:
            if note is not None and note.exists():
                self.seen = SeenRun(**json.loads(note.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise StorageError(f"cannot read {note}, the note of earlier starts about the run: {error}") from None

    def check(self, directory: Path, newest: Callable[[], int]) -> None:
        """Raise RunGoneError if a directory is not the run in `seen`, or an earlier state of it (by `newest` segment).

        Raises also StorageError.
        """
        if self.seen is None or not self._active:
            return
        if read(directory) != self.seen.run_id:
            raise run_gone_error(directory)
        if (segment := newest()) < self.seen.segment:
            raise run_gone_error(directory, f"its newest segment is {segment}, but segment {self.seen.segment} existed")

    def remember(self, **facts: Any) -> None:
        """Update fields of `seen`. Prints a warning if the note cannot be written."""
        self.seen = SeenRun(**facts) if self.seen is None else replace(self.seen, **facts)
        if self._note is None or not self._active:
            return
        try:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._note, json.dumps(asdict(self.seen)) + "\n")
        except OSError as error:
            print(f"warning: a restart may not notice that the run directory is gone: {error}", file=sys.stderr)
