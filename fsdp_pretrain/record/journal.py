"""The chronicle of a run: every start, stop, checkpoint, change, evaluation and failure, written by machine.

`journal.jsonl` is the record, `CHRONICLE.md` the same for people. Any process of the run may add entries.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any, Literal, get_args

from .files import AppendFile, RunDir, now, read_lines

Kind = Literal[
    "start", "ready", "resume", "changed", "overrides", "skip", "optimizer", "loss-scale", "control",
    "milestone", "stop",
    "checkpoint", "checkpoint-deleted", "checkpoint-failed", "checkpoint-fallback", "checkpoint-late",
    "checkpoint-rejected", "checkpoint-room", "on-commit-failed", "import", "rollback", "fork",
    "health", "health-again", "health-rollback", "health-skip", "data-read",
    "launch", "restart", "hosts", "avoid-hosts",
    "eval", "eval-failed", "eval-late", "eval-refused",
    "alarm", "mute", "watchdog", "note", "aim-stopped",
]  # fmt: skip
"""What an entry is about."""
KINDS: tuple[str, ...] = get_args(Kind)
_POLL_SECONDS = 0.5


class Journal:
    """Appends entries to a run's chronicle.

    Args:
        run: the run directory.
        segment: number of the current start, noted in every entry; None for commands outside the job.
    """

    def __init__(self, run: RunDir, segment: int | None = None) -> None:
        self._segment = segment
        self._lines = AppendFile(run.journal, durable=True)
        self._chronicle = AppendFile(run.chronicle)

    def write(self, kind: Kind, text: str, **data: Any) -> None:
        """Add an entry.

        Args:
            kind: what it is about.
            text: one sentence for people.
            data: the facts, JSON values.
        """
        entry: dict[str, Any] = {"time": now(), "kind": kind, "text": text}
        if self._segment is not None:
            entry["segment"] = self._segment
        entry.update(host=socket.gethostname(), pid=os.getpid(), **data)
        self._lines.write(json.dumps(entry))
        self._chronicle.write(render(entry))

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        self._chronicle.close()


def who() -> str:
    """The user who runs this command, for entries that tell of a person's decision."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id without a name, as in containers
        return str(os.getuid())


def render(entry: dict[str, Any]) -> str:
    """An entry as a line of the chronicle."""
    step = f" (step {entry['step']:,})" if isinstance(entry.get("step"), int) else ""
    by = f" ({entry['by']})" if entry.get("by") else ""
    return f"- {entry['time'][:19].replace('T', ' ')} **{entry['kind']}**{step} {entry['text']}{by}"


def read(run: RunDir) -> list[dict[str, Any]]:
    """All entries, oldest first."""
    return [entry for entry, _ in read_lines(run.journal)]


def follow(run: RunDir) -> Iterator[dict[str, Any]]:
    """All entries, and then those that are added, for ever."""
    offset = 0
    while True:
        for entry, behind in read_lines(run.journal, offset):
            offset = behind
            yield entry
        time.sleep(_POLL_SECONDS)
