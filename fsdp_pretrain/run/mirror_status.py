"""How copying to `checkpoint.mirror` goes: `RUN/mirror/report.json`, written by the uploader.

The watchdog reads it, and retention spares the checkpoint that is copied.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from . import state_files
from .files import RunDir
from .state_files import StateFile


class MirrorReport(StateFile):
    """What the uploader does.

    Attributes:
        segment: of the start that it belongs to.
        copying: step of the checkpoint that is copied now, if one is.
        problem: why nothing can be copied now; empty: nothing is wrong.
        needs_person: it will not pass by itself.
        newest: newest step that is whole in the mirror.
    """

    segment: int
    copying: int | None = None
    problem: str = ""
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
    found = read(run, segment) or MirrorReport(segment=segment)
    text = f"the process that copies ended with {code} and is started again"
    with contextlib.suppress(OSError):
        state_files.write(report_file(run), found.model_copy(update={"problem": text}).model_dump())
