"""Undelivered messages, on disk to survive restarts: in the run directory, or else on this node. No torch.

The run directory may be full, read-only or on a mount that hangs, which may be the very thing to report. So every
access to it has a time limit, and messages are also kept in memory: a failing disk delays nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pydantic_core import to_json

from fsdp_pretrain.deadline import Worker
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.files import replace_file

from .formatting import Note
from .throttle import ChannelState

_LIMIT = 5.0
_MEMORY = "state.json"


class Outbox:
    """One channel's undelivered messages, oldest first, and the state of its throttle.

    Args:
        run: the run directory.
        channel: name of the channel.

    Attributes:
        memory: what `keep` wrote last, in this process or an earlier one.
    """

    def __init__(self, run: Path, channel: str) -> None:
        self._run, self._local = run / "watchdog/spool" / channel, local_folder(run) / channel
        self._disk = Worker("disk")
        self._notes: dict[str, Note] = {}
        """By file name."""
        self.memory = ChannelState()
        with contextlib.suppress(OSError):
            self._load(*self._disk.call(lambda: _contents(self._run), _LIMIT))
        with contextlib.suppress(OSError):
            self._load(*_contents(self._local))

    def _load(self, notes: dict[str, Note], memory: ChannelState | None) -> None:
        self._notes |= notes
        if memory is not None and memory.saved > self.memory.saved:
            self.memory = memory

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, note: Note) -> None:
        """Add a message, unless one with the same id is waiting."""
        if all(note.id != other.id for other in self._notes.values()):
            name = f"{time.time_ns():020d}-{note.id[:8]}.json"
            self._notes[name] = note
            self._write(name, note)

    def oldest(self) -> Note | None:
        """The next to deliver."""
        return next(iter(self._notes.values()), None)

    def delivered(self) -> None:
        """Remove the oldest, which has arrived."""
        self._remove_oldest(lambda path: path.unlink(missing_ok=True))

    @property
    def refused(self) -> Path:
        """Folder of what was refused."""
        return self._run / "refused"

    def refuse(self) -> None:
        """Set the oldest aside for a person: the receiver will never take it."""

        def aside(path: Path) -> None:
            folder = path.parent / self.refused.name
            folder.mkdir(exist_ok=True)
            path.rename(folder / path.name)

        self._remove_oldest(aside)

    def keep(self) -> None:
        """Write the memory for the next process."""
        self.memory.saved = time.time()
        self._write(_MEMORY, self.memory)

    def _remove_oldest(self, remove: Callable[[Path], None]) -> None:
        """Remove it from both folders: a write that hung may have succeeded later."""
        name = next(iter(self._notes))
        del self._notes[name]
        with contextlib.suppress(OSError):
            self._disk.call(lambda: remove(self._run / name), _LIMIT)
        with contextlib.suppress(OSError):
            remove(self._local / name)

    def _write(self, name: str, content: Note | ChannelState) -> None:
        """Write to the run directory, or else on this node, or else keep it in memory only."""
        text = to_json(content).decode() + "\n"
        try:
            self._disk.call(lambda: replace_file(self._run / name, text), _LIMIT)
        except OSError:
            with contextlib.suppress(OSError):
                _own(self._local.parent)
                replace_file(self._local / name, text)


def local_folder(run: Path) -> Path:
    """Where messages of a run wait on this node if its directory cannot be written."""
    name = hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"fsdp-pretrain-{os.getuid()}" / name


def _own(folder: Path) -> None:
    """Create a folder in a world-writable place; refuse one that belongs to another user."""
    for path in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise PermissionError(f"{path} belongs to another user")


def _contents(folder: Path) -> tuple[dict[str, Note], ChannelState | None]:
    notes = {path.name: state_files.view(path, Note) for path in sorted(folder.glob("[0-9]*.json"))}
    return {name: note for name, note in notes.items() if note}, state_files.view(folder / _MEMORY, ChannelState)
