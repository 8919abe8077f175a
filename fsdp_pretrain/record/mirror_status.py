"""How copying to `checkpoint.mirror` goes: small files in `RUN/mirror/`, written by the uploader of each node.

The watchdog and `status` read them; the processes of the nodes agree by them on what is copied now.
"""

from __future__ import annotations

from pathlib import Path

from . import state_files
from .files import RunDir
from .state_files import StateFile


class MirrorTask(StateFile):
    """`current.json`: the checkpoint that all nodes copy now; written by the first.

    Attributes:
        id: of this task; empty: the first node has ended, and there will be no other.
        step, path: of the checkpoint.
    """

    id: str = ""
    step: int = 0
    path: str = ""


class MirrorReport(StateFile):
    """`node-N.json`: what one node's process does.

    Attributes:
        node, host, pid: who writes it.
        segment: of the start that it belongs to.
        beat: grows while the process lives.
        task: id of the last task whose files of this node are all in the mirror.
        files, bytes: copied in this start.
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
    task: str = ""
    files: int = 0
    bytes: int = 0
    problem: str = ""
    since: float | None = None
    needs_person: bool = False
    newest: int | None = None
    url: str = ""


def folder(run: RunDir) -> Path:
    return run.path / "mirror"


def report_file(run: RunDir, node: int) -> Path:
    return folder(run) / f"node-{node}.json"


def task_file(run: RunDir) -> Path:
    return folder(run) / "current.json"


def read_reports(run: RunDir) -> list[MirrorReport]:
    """The reports of all nodes that have one."""
    found = (state_files.view(path, MirrorReport) for path in sorted(folder(run).glob("node-*.json")))
    return [report for report in found if report is not None]
