"""How copying to `checkpoint.mirror` goes: `RUN/mirror/node-N.json`, written by the uploader of each node.

The watchdog reads them, and retention spares the checkpoint that is copied.
"""

from __future__ import annotations

from pathlib import Path

from . import state_files
from .files import RunDir
from .state_files import StateFile


class MirrorReport(StateFile):
    """What one node's uploader does.

    Attributes:
        node, host, pid: who writes it.
        segment: of the start that it belongs to.
        beat: grows while the process lives.
        copying: step of the checkpoint that is copied now, if one is.
        files: copied in this start.
        problem: why nothing can be copied now; empty: nothing is wrong.
        since: when that began, in seconds since 1970.
        needs_person: it will not pass by itself.
        newest: newest step that is whole in the mirror, on the first node.
        url: of the mirror.
    """

    node: int
    host: str
    pid: int
    segment: int
    beat: int = 0
    copying: int | None = None
    files: int = 0
    problem: str = ""
    since: float | None = None
    needs_person: bool = False
    newest: int | None = None
    url: str = ""


def folder(run: RunDir) -> Path:
    return run.path / "mirror"


def report_file(run: RunDir, node: int) -> Path:
    return folder(run) / f"node-{node}.json"


def read_reports(run: RunDir, segment: int | None = None) -> dict[int, MirrorReport]:
    """The reports of the nodes that have one, by their number; only those of a start, if it is given."""
    found = (state_files.view(path, MirrorReport) for path in sorted(folder(run).glob("node-*.json")))
    return {report.node: report for report in found if report is not None and segment in (None, report.segment)}
