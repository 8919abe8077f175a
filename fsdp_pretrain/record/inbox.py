"""A message queue of files in a shared folder: many writers, one reader."""

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
    """A request; a damaged one has an empty verb.

    `segment` is the start it was sent to; `avoid_hosts` belongs to a stop (see `requests.send`), `key` to an alarm,
    `changes` and `seen` to a `set`, `steps` and `ranks` to a profile, `at` to both.
    """

    id: str = ""  # the name of its file
    verb: str = ""
    reason: str = ""
    segment: int | None = None
    changes: list[str] = Field(default_factory=list)  # `section.key=value`
    at: int | None = None
    seen: int | None = None  # number of timeline entries that its sender knew
    avoid_hosts: list[str] = Field(default_factory=list)
    key: str = ""
    steps: int = 0
    ranks: list[int] = Field(default_factory=list)
    by: str = "?"


def put(folder: Path, **content: Any) -> Path:
    """Write a request with time and user. Returns its file. Raises OSError."""
    path = folder / f"{time.time_ns()}-{uuid.uuid4().hex[:6]}.json"
    state_files.write(path, {**content, "time": now(), "by": who()})
    return path


def take(folder: Path) -> list[Request]:
    """Remove and return all requests, oldest first, but not one that its sender takes back at this moment."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json") and name[0] != ".")  # noqa: PTH208
    except OSError:
        return []
    found = []
    for name in names:
        request = state_files.view(folder / name, Request) or Request()
        try:
            (folder / name).unlink()
        except FileNotFoundError:
            continue
        found.append(request.model_copy(update={"id": name.removesuffix(".json")}))
    return found
