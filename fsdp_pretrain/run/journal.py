"""The journal of a run: every start, stop, checkpoint, change, evaluation and failure.

`journal.jsonl` is for programs; `CHRONICLE.md` has the same entries for people. Any process of the run may add entries.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args

from fsdp_pretrain.errors import StorageError

from .files import AppendFile, RunDir, json_object, now, read_lines, seconds_of

Kind = Literal[
    "start", "fresh", "ready", "resume", "changed", "overrides", "skip", "control",
    "heldout", "profile", "profile-failed", "stop",
    "checkpoint", "checkpoint-deleted", "checkpoint-failed", "checkpoint-late",
    "checkpoint-missing", "checkpoint-rejected", "checkpoint-room", "import", "rollback", "fork",
    "health", "health-again", "health-rollback", "health-skip", "data-read",
    "launch", "restart", "avoid-hosts",
    "eval", "eval-failed", "eval-refused", "eval-retry", "eval-verdict",
    "alarm", "watchdog", "note", "tracker-stopped", "mirror", "mirror-missed", "mirror-restored",
]  # fmt: skip
Tone = Literal["good", "warning", "bad", ""]


class Mark(IntEnum):
    """How the report shows an entry: only in the table, also above the curves, also as a line through every panel."""

    TABLE = 0
    STRIP = 1
    LINE = 2


class KindInfo(NamedTuple):
    """Properties of a kind of entries."""

    group: str = "other"  # the row of its entries above the curves of the report
    tone: Tone = ""  # whether they are good or bad news; for a stop, its exit code decides, see `tone`
    mark: Mark = Mark.TABLE  # how the report shows them; warnings are shown at least above the curves
    needed: Mapping[str, type | UnionType] = {}  # keys that programs need in an entry, with their types


_INFO: dict[Kind, KindInfo] = {
    "start": KindInfo("starts", mark=Mark.STRIP),
    "fresh": KindInfo("starts", "warning"),
    "ready": KindInfo("starts", "good"),
    "resume": KindInfo("starts"),
    "import": KindInfo("starts", mark=Mark.STRIP),
    "fork": KindInfo("starts", mark=Mark.LINE),
    "launch": KindInfo("starts"),
    "restart": KindInfo("starts"),
    "stop": KindInfo("ends", mark=Mark.STRIP),
    "rollback": KindInfo("changes", "warning", Mark.LINE),
    "skip": KindInfo("changes", mark=Mark.LINE),
    "changed": KindInfo("changes", mark=Mark.STRIP),
    "overrides": KindInfo("changes"),
    "control": KindInfo("changes", mark=Mark.STRIP),
    "health-rollback": KindInfo("changes", "warning", Mark.LINE, {"key": str, "start": int}),
    "health-skip": KindInfo("changes", "warning"),
    "health-again": KindInfo("changes", "warning"),
    "alarm": KindInfo("alarms", "warning"),
    "health": KindInfo("alarms", "warning"),
    "checkpoint": KindInfo("saves", "good", Mark.STRIP, {"step": int, "seconds": int | float, "bytes": int | float}),
    "checkpoint-deleted": KindInfo("saves"),
    "checkpoint-failed": KindInfo("saves", "bad"),
    "checkpoint-late": KindInfo("saves", "warning"),
    "checkpoint-missing": KindInfo("saves", "bad", Mark.LINE),
    "checkpoint-rejected": KindInfo("saves", "bad"),
    "checkpoint-room": KindInfo("saves", "warning"),
    "eval": KindInfo("evaluations", "good", Mark.STRIP, {"step": int, "scores": dict}),
    "eval-failed": KindInfo("evaluations", "bad"),
    "eval-refused": KindInfo("evaluations", "bad"),
    "eval-retry": KindInfo("evaluations"),
    "eval-verdict": KindInfo("evaluations", "bad", Mark.LINE),
    "note": KindInfo("notes", mark=Mark.LINE),
    "avoid-hosts": KindInfo(tone="warning"),
}
"""Kinds that differ from `KindInfo()`."""
KINDS: dict[str, KindInfo] = {kind: _INFO.get(kind, KindInfo()) for kind in get_args(Kind)}
GROUPS = tuple(dict.fromkeys(info.group for info in _INFO.values() if info.group != "other"))


def tone(kind: str, code: int | None = None) -> Tone:
    """Whether a journal entry of a kind is good or bad news; `code` is the exit code of a stop."""
    if kind == "stop":
        if code == 0:
            return "good"
        return "warning" if code in (75, 76) else "bad"
    return KINDS.get(kind, KindInfo()).tone


class Journal:
    """Appends entries to a run's journal; `segment` is None for commands outside the job."""

    def __init__(self, run: RunDir, segment: int | None = None) -> None:
        self._segment = segment
        self._lines = AppendFile(run.journal, durable=True)
        self._chronicle = AppendFile(run.chronicle)

    def write(self, kind: Kind, text: str, **data: Any) -> None:
        """Add an entry: a sentence for people, and `data` (JSON values) for programs."""
        entry: dict[str, Any] = {"time": now(), "kind": kind, "text": text}
        if self._segment is not None:
            entry["segment"] = self._segment
        entry.update(host=socket.gethostname(), pid=os.getpid(), **data)
        self._lines.write(json.dumps(entry))
        self._chronicle.write(f"- {render(entry, '**{}**')}")

    @property
    def problem(self) -> str:
        """Why the last failed write failed."""
        return self._lines.problem

    def close(self) -> bool:
        """Close the files. Returns whether every entry is in the journal."""
        self._chronicle.close()
        return self._lines.close()


def add(run: RunDir, kind: Kind, text: str, /, *, segment: int | None = None, **data: Any) -> None:
    """Add one entry from a command, which cannot wait until the disk has room. Raises StorageError."""
    writer = Journal(run, segment)
    writer.write(kind, text, **data)
    if not writer.close():
        raise StorageError(
            f"cannot write {run.journal}: {writer.problem}",
            effect=f"not recorded in the chronicle: {text}",
            remedy="make the run directory writable, then repeat the command",
        )


def who() -> str:
    """The user who runs this command."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id without a name, as in containers
        return str(os.getuid())


def render(entry: dict[str, Any], kind: str = "[{}]") -> str:
    """An entry as a line for people; `kind` formats its kind."""
    step = f" (step {entry['step']:_})" if isinstance(entry.get("step"), int) else ""
    by = f" ({entry['by']})" if entry.get("by") else ""
    return f"{entry['time'][:19].replace('T', ' ')} {kind.format(entry['kind'])}{step} {entry['text']}{by}"


def entries(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """The entries of a journal with their offsets, see `files.read_lines`."""
    return read_lines(path, _entry, offset)


def _entry(line: bytes) -> dict[str, Any] | None:
    entry = json_object(line) or {}
    texts = isinstance(entry.get("kind"), str) and isinstance(entry.get("text"), str)
    whole = texts and seconds_of(entry.get("time")) is not None and isinstance(entry.get("step") or 0, int)
    return entry if whole else None


def is_whole(entry: dict[str, Any]) -> bool:
    """Whether an entry has the keys that its kind needs."""
    needed = KINDS.get(entry["kind"], KindInfo()).needed
    return all(isinstance(entry.get(key), type_) for key, type_ in needed.items())


def of_kind(entries: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The whole entries of a kind."""
    return [entry for entry in entries if entry["kind"] == kind and is_whole(entry)]


def read(run: RunDir) -> list[dict[str, Any]]:
    return [entry for entry, _ in entries(run.journal)]


def lost_optimizer(run: RunDir, segment: int, step: int) -> bool:
    """Whether a start that continued from a step began with a fresh optimizer."""
    resumed = [entry for entry in of_kind(read(run), "resume") if entry.get("segment") == segment]
    return any(entry.get("step") == step and entry.get("optimizer") is False for entry in resumed)
