"""How copying to `checkpoint.mirror` goes: `RUN/mirror/report.json`, written by the uploader.

The watchdog reads it, and retention spares the checkpoint that is copied.
"""

from __future__ import annotations

from pathlib import Path

from . import state_files
from .files import RunDir
from .state_files import StateFile


class MirrorReport(StateFile):
    """What the uploader does.

    Attributes:
        host, pid: who writes it.
        segment: of the start that it belongs to.
        beat: grows while the process lives.
        copying: step of the checkpoint that is copied now, if one is.
        problem: why nothing can be copied now; empty: nothing is wrong.
        since: when that began, in seconds since 1970.
        needs_person: it will not pass by itself.
        newest: newest step that is whole in the mirror.
    """

    host: str
    pid: int
    segment: int
    beat: int = 0
    copying: int | None = None
    problem: str = ""
    since: float | None = None
    needs_person: bool = False
    newest: int | None = None


def folder(run: RunDir) -> Path:
    return run.path / "mirror"


def report_file(run: RunDir) -> Path:
    return folder(run) / "report.json"


def read(run: RunDir, segment: int | None = None) -> MirrorReport | None:
    """The newest report, if there is one; only that of a start, if it is given."""
    found = state_files.view(report_file(run), MirrorReport)
    return found if found is not None and segment in (None, found.segment) else None
