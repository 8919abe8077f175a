"""How copying to `checkpoint.mirror` goes: `RUN/mirror/node-N.json`, written by the uploader of each node.

The watchdog reads them, and the uploaders agree by them on what is copied now.
"""

from __future__ import annotations

from pathlib import Path

from . import state_files
from .files import RunDir
from .state_files import StateFile


class MirrorTask(StateFile):
    """The checkpoint that all nodes copy now: an id, its step and its path."""

    id: str
    step: int
    path: str


class MirrorReport(StateFile):
    """What one node's uploader does.

    Attributes:
        node, host, pid: who writes it.
        segment: of the start that it belongs to.
        beat: grows while the process lives.
        task: on the first node: what is copied; None: nothing.
        copied: id of the last task whose files of this node are all in the mirror.
        files: copied in this start.
        problem: why nothing can be copied now; empty: nothing is wrong.
        since: when that began, in seconds since 1970.
        needs_person: it will not pass by itself.
        newest: newest step that is whole in the mirror, on the first node.
        ended: it has copied everything, and no task will come.
        url: of the mirror.
    """

    node: int
    host: str
    pid: int
    segment: int
    beat: int = 0
    task: MirrorTask | None = None
    copied: str = ""
    files: int = 0
    problem: str = ""
    since: float | None = None
    needs_person: bool = False
    newest: int | None = None
    ended: bool = False
    url: str = ""


def folder(run: RunDir) -> Path:
    return run.path / "mirror"


def report_file(run: RunDir, node: int) -> Path:
    return folder(run) / f"node-{node}.json"


def read_reports(run: RunDir, segment: int | None = None) -> dict[int, MirrorReport]:
    """The reports of the nodes that have one, by their number; only those of a start, if it is given."""
    found = (state_files.view(path, MirrorReport) for path in sorted(folder(run).glob("node-*.json")))
    return {report.node: report for report in found if report is not None and segment in (None, report.segment)}
