"""Which hosts had incidents, over many starts and runs: those with several are proposed for exclusion. No torch."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ..record import state_files
from ..record.files import now, replace_file, seconds_of

WINDOW = timedelta(days=14)
"""How long an incident counts."""


@dataclass(frozen=True)
class Incident:
    """Something that happened on a host: when, and of what kind."""

    time: str
    kind: str


class Hosts:
    """Incidents by host, `{"node-7": [{"time": ..., "kind": ...}]}`.

    Args:
        path: of the file; runs may share it. An incident that two processes add at the same moment may be lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, host: str, kind: str) -> int:
        """Remember an incident; how many the host has had in the last two weeks. Never raises OSError."""
        known = self._read()
        known.setdefault(host, []).append(Incident(now(), kind))
        content = {name: [asdict(incident) for incident in incidents] for name, incidents in known.items()}
        with contextlib.suppress(OSError):
            replace_file(self._path, json.dumps(content, indent=1) + "\n")
        return len(_recent(known[host]))

    def _read(self) -> dict[str, list[Incident]]:
        return state_files.view(self._path, dict[str, list[Incident]]) or {}

    def proposed(self, incidents: int) -> list[str]:
        """Hosts with at least so many incidents in the last two weeks."""
        return sorted(host for host, known in self._read().items() if len(_recent(known)) >= incidents)


def _recent(incidents: list[Incident]) -> list[Incident]:
    oldest = (datetime.now(UTC) - WINDOW).timestamp()
    return [incident for incident in incidents if (seconds_of(incident.time) or 0.0) > oldest]
