"""State of copying to `checkpoint.mirror`: `RUN/mirror/report.json`, written by the uploader.

The watchdog reads it, and retention spares the checkpoint that is being copied.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from fsdp_pretrain.errors import UserError

from . import run_id, state_files
from .files import RunDir
from .state_files import StateFile


class MirrorReport(StateFile):
    """State of the uploader."""

    segment: int  # segment of the job that started the uploader
    copying: int | None = None  # step of the checkpoint that is being copied, if any
    problem: str = ""  # why nothing can be copied now; empty if nothing is wrong
    needs_person: bool = False  # whether the problem will not pass by itself
    newest: int | None = None  # newest step whose copy is complete


def folder(run: RunDir) -> Path:
    return run.path / "mirror"


def report_file(run: RunDir) -> Path:
    return folder(run) / "report.json"


def read(run: RunDir, segment: int | None = None) -> MirrorReport | None:
    """The newest report, if there is one (and if it is from `segment`, where given)."""
    report = state_files.view(report_file(run), MirrorReport)
    return report if report is not None and segment in (None, report.segment) else None


def copied_steps(run: RunDir, segment: int) -> list[int]:
    """The step whose checkpoint the uploader of a segment copies, if it copies one."""
    report = read(run, segment)
    return [] if report is None or report.copying is None else [report.copying]


def tell_death(run: RunDir, segment: int, code: int) -> None:
    """Report on behalf of the uploader that it has ended with an exit code."""
    report = read(run, segment) or MirrorReport(segment=segment)
    text = f"the process that copies ended with {code} and is started again"
    with contextlib.suppress(OSError, UserError):
        run_id.check()  # else it could be the directory of another run by now
        state_files.write(report_file(run), report.model_copy(update={"problem": text}).model_dump())
