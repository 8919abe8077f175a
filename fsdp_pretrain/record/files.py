"""The run directory and the ways its files are written: appended line by line, or replaced as a whole.

Several processes append to the same journal (trainer, evaluation, operator commands), so a line is one `write` to a
descriptor opened for appending. A full disk must not stop training: lines wait in memory until they can be written.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import run_id

_WAITING_LINES = 100_000


@dataclass(frozen=True)
class RunDir:
    """Paths inside a run directory (design, section 5)."""

    path: Path

    @property
    def begun(self) -> bool:
        """Whether it holds a run: one that was started, or one that will start from an imported checkpoint."""
        return (self.path / "segments").is_dir() or self.checkpoints.is_dir()

    @property
    def config(self) -> Path:
        """Resolved configuration of the current segment."""
        return self.path / "config.toml"

    @property
    def status(self) -> Path:
        """State of the run right now; replaced atomically."""
        return self.path / "status.json"

    @property
    def journal(self) -> Path:
        """The chronicle, one JSON object per line."""
        return self.path / "journal.jsonl"

    @property
    def chronicle(self) -> Path:
        """The chronicle for people."""
        return self.path / "CHRONICLE.md"

    @property
    def checkpoints(self) -> Path:
        """Checkpoint store."""
        return self.path / "checkpoints"

    @property
    def evals(self) -> Path:
        """Evaluation results."""
        return self.path / "evals"

    @property
    def control(self) -> Path:
        """Inbox of requests to the running job."""
        return self.path / "control"

    @property
    def lock(self) -> Path:
        """Who may write; see `record.lock`."""
        return self.path / "lock.json"

    @property
    def overrides(self) -> Path:
        """What rollbacks and forks changed for good; see `overrides`."""
        return self.path / "overrides.toml"

    @property
    def rollback(self) -> Path:
        """A rollback under way; see `rollback`."""
        return self.path / "rollback.json"

    @property
    def avoid_hosts(self) -> Path:
        """Hosts not to be used, one per line; see `launch`."""
        return self.path / "avoid_hosts"

    @property
    def tokenizer(self) -> Path:
        """Copy of the tokenizer the run was started with."""
        return self.path / "tokenizer"

    @property
    def segments(self) -> list[Path]:
        """One directory per start, oldest first."""
        folder = self.path / "segments"
        found = [path for path in folder.glob("[0-9]*") if path.is_dir()] if folder.is_dir() else []
        return sorted(found, key=lambda path: int(path.name))

    def segment(self, number: int) -> Path:
        """Directory of the start with this number."""
        return self.path / "segments" / f"{number:04d}"

    def new_segment(self) -> Path:
        """Create the directory of a new start."""
        existing = self.segments
        number = int(existing[-1].name) + 1 if existing else 1
        path = self.segment(number)
        make_directory(path.parent)
        path.mkdir()
        return path


class AppendFile:
    """A file of lines that several processes may append to.

    Args:
        path: created, with its directory, at the first line.
        durable: fsync after every line.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self._path, self._durable = path, durable
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque(maxlen=_WAITING_LINES)

    def write(self, line: str) -> bool:
        """Append a line; if the file cannot take it now, keep it for later. Whether everything is written."""
        self._waiting.append(line.encode() + b"\n")
        return self.flush()

    def flush(self) -> bool:
        """Try to write what is waiting. Whether everything is written."""
        try:
            if self._descriptor is None:
                make_directory(self._path.parent)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            while self._waiting:
                written = os.write(self._descriptor, self._waiting[0])
                rest = self._waiting[0][written:]
                if rest:  # a full disk took a part of the line
                    self._waiting[0] = rest
                    return False
                self._waiting.popleft()
            if self._durable:
                os.fsync(self._descriptor)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Write what can be written and close."""
        self.flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_lines(path: Path, offset: int = 0, holding: bytes = b"") -> Iterator[tuple[dict[str, Any], int]]:
    """Parsed lines of a JSONL file from byte `offset` on, each with the offset behind it.

    Passes over lines without the bytes `holding`, and lines damaged by a crash. Stops at an unfinished last line (a
    writer may be in the middle of it).
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            if holding not in line:
                continue
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record, offset


def last_lines(path: Path, tail: int = 1 << 18) -> list[dict[str, Any]]:
    """Parsed lines within the last `tail` bytes of a JSONL file, oldest first; see `read_lines`."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return []
    return [line for line, _ in read_lines(path, max(0, size - tail))]  # the first, cut, is passed over as damaged


def make_directory(path: Path) -> None:
    """Make a directory with what is missing above it. Raises OSError.

    A run directory that this process is bound to is never made: one that is gone must not come back empty.
    """
    bound = run_id.require(path)
    if bound is None:
        path.mkdir(parents=True, exist_ok=True)
        return
    for level in reversed([level for level in (path, *path.parents) if bound in level.parents]):
        level.mkdir(exist_ok=True)


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a small file atomically and durably. Raises OSError."""
    make_directory(path.parent)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if the file is absent or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def now() -> str:
    """UTC time for the record, to the millisecond."""
    return stamp(time.time())


def stamp(seconds: float) -> str:
    """Seconds since 1970 as the record writes a time."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(stamp: Any) -> float | None:
    """A time of the record as seconds since 1970; None if it is none."""
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (TypeError, ValueError):
        return None
