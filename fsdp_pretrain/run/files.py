"""Paths of the run directory, and the two ways to write its files: append lines, or replace the whole file.

Several processes append to the same journal (trainer, evaluation, operator commands), so a line is one `write` with
O_APPEND. A full disk must not stop training: lines wait in memory until they can be written.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from fsdp_pretrain import files
from fsdp_pretrain.units import human_time

from . import run_id

T = TypeVar("T")
_WAITING_LINES = 100_000
_SEGMENT = re.compile(r"\d{4}|[1-9]\d{4,}")


@dataclass(frozen=True)
class Fetched:
    """Where a copy of a run's record comes from, and when it was made there: a timestamp of the record."""

    url: str
    made: str

    def __str__(self) -> str:
        return f"as of {self.made[:16].replace('T', ' ')} UTC, {human_time(age(self.made))} ago, from {self.url}"


class RunDir:
    """Paths inside a run directory, see docs/training.md; `fetched` is set for a copy, see `mirror.record_copy`."""

    fetched: Fetched | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"  # the resolved configuration of the current segment
        self.status = path / "status.json"  # see `run.status`
        self.journal = path / "journal.jsonl"  # one JSON object per line
        self.chronicle = path / "CHRONICLE.md"  # the journal for people
        self.checkpoints = path / "checkpoints"
        self.evals = path / "evals"
        self.control = path / "control"  # inbox of requests to the running job
        self.lock = path / "lock.json"  # names the process that may write, see `run.lock`
        self.profiles = path / "profiles"  # traces of steps
        self.overrides = path / "overrides.toml"  # changes by rollbacks and forks, see `run.overrides`
        self.rollback = path / "rollback.json"  # a rollback in progress, see `lineage.rollback`
        self.avoid_hosts = path / "avoid_hosts"  # one host per line, see `launch`
        self.tokenizer = path / "tokenizer"  # copy of the run's tokenizer

    def refresh(self) -> None:
        """Bring a copy of a record up to date. Raises UserError, OSError."""

    @property
    def begun(self) -> bool:
        """Whether it holds a run: started, or ready to start from an imported checkpoint."""
        return (self.path / "segments").is_dir() or self.checkpoints.is_dir()

    @property
    def segments(self) -> list[Path]:
        """One directory per start, oldest first. Other names are ignored."""
        folder = self.path / "segments"
        paths = folder.iterdir() if folder.is_dir() else ()
        named = [path for path in paths if _SEGMENT.fullmatch(path.name) and path.is_dir()]
        return sorted(named, key=lambda path: int(path.name))

    def segment(self, number: int) -> Path:
        return self.path / "segments" / f"{number:04d}"

    def new_segment(self) -> Path:
        """Create the directory of a new start."""
        existing = self.segments
        path = self.segment(int(existing[-1].name) + 1 if existing else 1)
        make_directory(path.parent)
        path.mkdir()
        return path


class AppendFile:
    """A file of lines that several processes may append to.

    A process that is killed during a write, or whose disk is full, leaves an unterminated line. So every write first
    adds a newline if the file does not end with one: a fragment damages no other line. Two processes that do this
    concurrently leave an empty line, which readers ignore. The file is created at the first line. With `durable`, every
    write is followed by an fsync.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self._path, self._durable = path, durable
        self._synced = True
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque(maxlen=_WAITING_LINES)
        self.problem = ""  # why the last failed write failed

    def write(self, line: str) -> bool:
        """Append a line, or queue it if it cannot be written now. Returns whether everything is written."""
        self._waiting.append(line.encode() + b"\n")
        return self.flush()

    def flush(self) -> bool:
        """Try to write queued lines. Returns whether everything is written."""
        try:
            if self._descriptor is None:
                make_directory(self._path.parent)
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            while self._waiting:
                line = b"" if _ends_with_a_line(self._descriptor) else b"\n"
                line += self._waiting[0]
                written = os.write(self._descriptor, line)
                if written < len(line):  # the disk is full; the whole line is written again later
                    if line[written:] == b"\n":
                        self._waiting[0] = b"\n"
                    self.problem = "no space left"
                    return False
                self._waiting.popleft()
                self._synced = not self._durable
            if not self._synced:
                os.fsync(self._descriptor)
                self._synced = True
        except OSError as error:
            self.problem = error.strerror or str(error)
            return False
        return True

    def close(self) -> bool:
        """Flush and close. Returns whether everything is written."""
        written = self.flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        return written


def _ends_with_a_line(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) in (b"\n", b"")


def json_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object on a line; None if the line is something else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_lines(
    path: Path, parse: Callable[[bytes], T | None], offset: int = 0, holding: bytes = b""
) -> Iterator[tuple[T, int]]:
    """Parsed lines of a JSONL file from byte `offset` on, each with the offset after it; none if there is no file.

    Skips lines without the bytes `holding`, and damaged lines (`parse` returns None). Stops at an
    unterminated last line: it may still be being written.
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
            if holding in line and (parsed := parse(line)) is not None:
                yield parsed, offset


def tail_offset(path: Path, reach: int) -> int:
    """Offset of a file's last `reach` bytes, 0 if it is shorter or missing. The first line there may be partial."""
    try:
        return max(0, path.stat().st_size - reach)
    except OSError:
        return 0


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, but never a run directory that this process is bound to: a lost one
    must not be recreated empty. Raises OSError."""
    bound = run_id.require(path)
    if bound is None:
        path.mkdir(parents=True, exist_ok=True)
        return
    for level in reversed([level for level in (path, *path.parents) if bound in level.parents]):
        level.mkdir(exist_ok=True)


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a small file atomically and durably, creating its directory. Raises OSError."""
    make_directory(path.parent)
    files.replace_file(path, content)


def now() -> str:
    """The present time as a timestamp of the record."""
    return stamp(time.time())


def stamp(seconds: float) -> str:
    """A timestamp of the record from seconds since 1970: ISO 8601, UTC, milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(stamp: Any) -> float | None:
    """Seconds since 1970 of a timestamp; None if it is invalid."""
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def age(stamp: Any) -> float:
    """Seconds since a timestamp, at least 0; infinite if it is invalid."""
    seconds = seconds_of(stamp)
    return math.inf if seconds is None else max(0.0, time.time() - seconds)
