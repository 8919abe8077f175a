"""How far the agents of a start have judged record and journal, so that a restarted agent judges nothing twice."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass

from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir

_FILE = "watchdog/judged.json"


@dataclass
class Judged:
    """Byte offsets behind what was judged in the start with number `segment`: in its record and in the journal."""

    segment: int
    metrics: int = 0
    journal: int = 0

    @classmethod
    def of(cls, run: RunDir, segment: int) -> Judged:
        """What earlier agents of this start have judged: nothing in a new start."""
        known = state_files.view(run.path / _FILE, Judged)
        return known if known is not None and known.segment == segment else cls(segment)

    def save(self, run: RunDir) -> None:
        """Save it for the next agent, unless there is one of a later start."""
        known = state_files.view(run.path / _FILE, Judged)
        if known is None or (known.segment <= self.segment and known != self):
            with contextlib.suppress(OSError):  # a full disk: what follows may be judged twice
                state_files.write(run.path / _FILE, asdict(self))
