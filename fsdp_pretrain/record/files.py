"""The run directory and the ways its files are written: appended line by line, or replaced as a whole.

Several processes append to the same journal (trainer, evaluation, operator commands), so a line is one `write` to a
descriptor opened for appending. A full disk must not stop training: lines wait in memory until they can be written.
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

from .. import atomic
from . import run_id

T = TypeVar("T")
_WAITING_LINES = 100_000
_SEGMENT = re.compile(r"\d{4}|[1-9]\d{4,}")


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
        """One directory per start, oldest first. What is called otherwise than a segment is none."""
        folder = self.path / "segments"
        found = folder.iterdir() if folder.is_dir() else ()
        named = [path for path in found if _SEGMENT.fullmatch(path.name) and path.is_dir()]
        return sorted(named, key=lambda path: int(path.name))

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

    A process that was killed in a write, or whose disk was full, leaves a line without an end. Every write first looks
    whether the file ends with one, and else begins a new line, so that a fragment costs no other line. Two processes
    that do so at once leave an empty line, which readers do not mind.

    Args:
        path: created, with its directory, at the first line.
        durable: fsync after every line.

    Attributes:
        problem: why a write failed, the last time that one did.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self._path, self._durable = path, durable
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque(maxlen=_WAITING_LINES)
        self._synced, self.problem = True, ""

    def write(self, line: str) -> bool:
        """Append a line; if the file cannot take it now, keep it for later. Whether everything is written."""
        self._waiting.append(line.encode() + b"\n")
        return self.flush()

    def flush(self) -> bool:
        """Try to write what is waiting. Whether everything is written."""
        try:
            if self._descriptor is None:
                make_directory(self._path.parent)
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            while self._waiting:
                line = b"" if _ends_with_a_line(self._descriptor) else b"\n"
                line += self._waiting[0]
                written = os.write(self._descriptor, line)
                if written < len(line):  # a full disk took a part of it; the whole is written again
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
        """Write what can be written and close. Whether everything is written."""
        written = self.flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        return written


def _ends_with_a_line(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) in (b"\n", b"")


def json_object(line: bytes) -> dict[str, Any] | None:
    """The object that a line holds; None if it holds none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_lines(
    path: Path,
    parse: Callable[[bytes], T | None],
    offset: int = 0,
    holding: bytes = b"",
    *,
    on_damaged: Callable[[bytes], object] = lambda line: None,
) -> Iterator[tuple[T, int]]:
    """Parsed lines of a JSONL file from byte `offset` on, each with the offset behind it.

    Passes over lines without the bytes `holding`. Stops at an unfinished last line (a writer may be in the middle of
    it).

    Args:
        path: the file; an absent one has no lines.
        parse: gives what a line holds; None if it is damaged, and is passed over.
        offset: where to begin.
        holding: bytes that a line must have.
        on_damaged: called with every damaged line.
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
            if holding not in line or not line.strip():
                continue
            found = parse(line)
            if found is not None:
                yield found, offset
            else:
                on_damaged(line)


def tail_offset(path: Path, reach: int) -> int:
    """Where to begin to read the last `reach` bytes of a file; the first line from there on may be cut."""
    try:
        return max(0, path.stat().st_size - reach)
    except OSError:
        return 0


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
    """Replace a small file atomically and durably; makes its directory. Raises OSError."""
    make_directory(path.parent)
    atomic.replace_file(path, content)


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
    except (TypeError, ValueError, OverflowError):
        return None


def age(stamp: Any) -> float:
    """Seconds since a time of the record, at least 0; infinite if it is none."""
    seconds = seconds_of(stamp)
    return math.inf if seconds is None else max(0.0, time.time() - seconds)
