"""Requests as files in a folder: anybody leaves them, one process takes them. Works on any file system they share."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from .files import now, read_json, replace_file
from .journal import who


def leave(folder: Path, **content: Any) -> Path:
    """Leave a request, with the time and the user; its file. Raises OSError."""
    path = folder / f"{time.time_ns()}-{uuid.uuid4().hex[:6]}.json"
    replace_file(path, json.dumps({**content, "time": now(), "by": who()}) + "\n")
    return path


def take(folder: Path) -> list[dict[str, Any]]:
    """Remove all requests, oldest first; a damaged one is empty."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json") and name[0] != ".")  # noqa: PTH208
    except OSError:
        return []
    found = []
    for name in names:
        found.append(read_json(folder / name) or {})
        (folder / name).unlink(missing_ok=True)
    return found
