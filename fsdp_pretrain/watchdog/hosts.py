"""Which hosts had incidents, over many starts and runs: those with several are proposed for exclusion. No torch."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ..record.files import now, read_json, replace_file

WINDOW = timedelta(days=14)
"""How long an incident counts."""


class Hosts:
    """Incidents by host, `{"node-7": [{"time": ..., "kind": ...}]}`.

    Args:
        path: of the file; runs may share it. An incident that two processes add at the same moment may be lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, host: str, kind: str) -> int:
        """Remember an incident; how many the host has had in the last two weeks. Never raises OSError."""
        known = read_json(self._path) or {}
        known.setdefault(host, []).append({"time": now(), "kind": kind})
        with contextlib.suppress(OSError):
            replace_file(self._path, json.dumps(known, indent=1) + "\n")
        return len(_recent(known[host]))

    def proposed(self, incidents: int) -> list[str]:
        """Hosts with at least so many incidents in the last two weeks."""
        known = read_json(self._path) or {}
        return sorted(host for host, entries in known.items() if len(_recent(entries)) >= incidents)


def _recent(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    oldest = datetime.now(UTC) - WINDOW
    return [entry for entry in entries if datetime.fromisoformat(entry["time"]) > oldest]
