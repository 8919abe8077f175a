"""How copying to `checkpoint.mirror` goes: `RUN/mirror/report.json`, written by the uploader.

The watchdog reads it, and retention spares the checkpoint that is copied.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from . import state_files
from .files import RunDir
from .state_files import StateFile


class MirrorReport(StateFile):
    """What the uploader does.

    Attributes:
        host, pid: of the uploader.
        segment: of the start that it belongs to.
        copying: step of the checkpoint that is copied now, if one is.
        problem: why nothing can be copied now; empty: nothing is wrong.
        since: when that began, in seconds since 1970.
        needs_person: it will not pass by itself.
        newest: newest step that is whole in the mirror.
    """

    host: str
    pid: int
    segment: int
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


def tell_death(run: RunDir, segment: int, code: int) -> None:
    """Report, in its place, that the uploader of a start has ended."""
    found = read(run, segment) or MirrorReport(host="", pid=0, segment=segment)
    since = found.since if found.problem else time.time()
    text = f"the process that copies ended with {code} and is started again"
    with contextlib.suppress(OSError):
        state_files.write(report_file(run), found.model_copy(update={"problem": text, "since": since}).model_dump())
