"""Incidents of hosts over many starts and runs: hosts with several are proposed for exclusion. No torch.

The file holds `{"node-7": [{"time": ..., "kind": ...}]}`.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.files import now, seconds_of

_WINDOW = 14 * 86400.0
"""Seconds for which an incident counts."""


@dataclass(frozen=True)
class HostIncident:
    """Something that happened on a host: when, and of what kind."""

    time: str
    kind: str


def remember(path: Path, host: str, kind: str) -> dict[str, int]:
    """Add an incident of a host; returns every host's count in the last two weeks. Never raises OSError.

    Runs may share the file. Of two incidents added at the same moment, one may be lost.
    """
    known = state_files.view(path, dict[str, list[HostIncident]]) or {}
    known.setdefault(host, []).append(HostIncident(now(), kind))
    content = {name: [asdict(incident) for incident in incidents] for name, incidents in known.items()}
    with contextlib.suppress(OSError):
        state_files.write(path, content)
    oldest = time.time() - _WINDOW
    return {
        name: sum((seconds_of(incident.time) or 0.0) > oldest for incident in incidents)
        for name, incidents in known.items()
    }
