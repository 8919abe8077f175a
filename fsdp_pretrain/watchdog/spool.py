"""Messages on their way, on disk, to outlive the process: in the run directory, or else on this node. No torch.

The run directory may be full, read-only or on a mount that hangs, and that may be the very thing to be told. So every
access to it has a time limit, and the messages also stand in memory: a disk that fails delays nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..deadline import Worker
from ..record import state_files
from ..record.files import replace_file

_LIMIT = 5.0
_STATE = "state.json"


class Spool:
    """What one channel has not delivered yet, oldest first, and the state of what decides for it.

    Args:
        run: the run directory.
        channel: name of the channel.
    """

    def __init__(self, run: Path, channel: str) -> None:
        self._run, self._local = run / "watchdog/spool" / channel, local_folder(run) / channel
        self._disk = Worker("disk")
        self._notes: dict[str, dict[str, Any]] = {}
        self._names: dict[str, str] = {}
        self._number = 0
        self.state: dict[str, Any] | None = None
        """What `keep` was given last, by this process or one before it."""
        with contextlib.suppress(OSError):
            self._load(*self._disk.call(lambda: _contents(self._run), _LIMIT))
        with contextlib.suppress(OSError):
            self._load(*_contents(self._local))

    def _load(self, notes: list[tuple[Path, dict[str, Any]]], state: dict[str, Any] | None) -> None:
        for path, content in notes:
            self._notes[content["id"]], self._names[content["id"]] = content, path.name
        if state is not None and (self.state is None or state.get("saved", 0.0) > self.state.get("saved", 0.0)):
            self.state = state

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, note: dict[str, Any]) -> None:
        """One more to deliver; one with the same id is the same."""
        if note["id"] in self._notes:
            return
        self._notes[note["id"]] = note
        self._number += 1
        self._names[note["id"]] = name = f"{time.time_ns():020d}-{self._number:04d}.json"
        self._write(name, note)

    def oldest(self) -> dict[str, Any] | None:
        """The next to deliver."""
        return next(iter(self._notes.values()), None)

    def delivered(self, note: dict[str, Any]) -> None:
        """It has arrived."""
        self._take(note, lambda path: path.unlink(missing_ok=True))

    @property
    def refused(self) -> Path:
        """Folder of what was refused."""
        return self._run / "refused"

    def refuse(self, note: dict[str, Any]) -> None:
        """The receiver will never take it: set aside for a person, out of the way of the others."""

        def aside(path: Path) -> None:
            (path.parent / self.refused.name).mkdir(exist_ok=True)
            path.rename(path.parent / self.refused.name / path.name)

        self._take(note, aside)

    def keep(self, state: dict[str, Any]) -> None:
        """Remember JSON values for the next process."""
        self.state = {**state, "saved": time.time()}
        self._write(_STATE, self.state)

    def _take(self, note: dict[str, Any], act: Callable[[Path], None]) -> None:
        """Out of both folders: a write that hung may have come through after all."""
        del self._notes[note["id"]]
        name = self._names.pop(note["id"])
        with contextlib.suppress(OSError):
            self._disk.call(lambda: act(self._run / name), _LIMIT)
        with contextlib.suppress(OSError):
            act(self._local / name)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        """Into the run directory, or else on this node, or else it stands in memory alone."""
        text = json.dumps(content) + "\n"
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
    """Make a folder in a place where everybody can write, and refuse one that another user has put there."""
    for path in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise PermissionError(f"{path} belongs to another user")


def _contents(folder: Path) -> tuple[list[tuple[Path, dict[str, Any]]], dict[str, Any] | None]:
    paths = sorted(path for path in folder.glob("[0-9]*.json"))
    notes = [(path, content) for path in paths if (content := _content(path)) is not None and "id" in content]
    return notes, _content(folder / _STATE)


def _content(path: Path) -> dict[str, Any] | None:
    return state_files.view(path, dict[str, Any])
