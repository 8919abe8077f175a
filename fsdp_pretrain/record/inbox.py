"""Requests as files in a folder: anybody leaves them, one process takes them. Works on any file system they share."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

from pydantic import Field

from . import state_files
from .files import now
from .journal import who
from .state_files import StateFile


class Request(StateFile):
    """What somebody asks for; the verb is empty in place of a request that was damaged.

    `reason` and `avoid_hosts` are of a stop (see `requests.send`), `key` is of an alarm.
    """

    verb: str = ""
    reason: str = ""
    avoid_hosts: list[str] = Field(default_factory=list)
    key: str = ""
    by: str = "?"


def leave(folder: Path, **content: Any) -> Path:
    """Leave a request, with the time and the user; its file. Raises OSError."""
    path = folder / f"{time.time_ns()}-{uuid.uuid4().hex[:6]}.json"
    state_files.write(path, {**content, "time": now(), "by": who()})
    return path


def take(folder: Path) -> list[Request]:
    """Remove all requests, oldest first; a damaged one is empty."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json") and name[0] != ".")  # noqa: PTH208
    except OSError:
        return []
    found = []
    for name in names:
        found.append(state_files.view(folder / name, Request) or Request())
        (folder / name).unlink(missing_ok=True)
    return found
