"""Starts followers (see `follow`) beside training and after evaluations. Imports no tracker; never raises."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence

from fsdp_pretrain.child_process import start_module
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.record import journal
from fsdp_pretrain.record.files import RunDir, make_directory

from .mirror import folder, is_held
from .sink import wanted

_FOLLOW = "fsdp_pretrain.trackers.follow"
_FINISH_SECONDS = 20.0


def start_follower(run: RunDir) -> subprocess.Popen[bytes] | None:
    """Start a live run's follower, which ends when its stdin closes; None if no tracker is wanted.

    On failure, a journal entry and None.
    """
    names = wanted(run)
    if not names:
        return None
    try:
        return _start(run, stdin=subprocess.PIPE)
    except OSError as error:
        report(run, names, f"could not be started: {error}")
        return None


def finish_follower(run: RunDir, follower: subprocess.Popen[bytes]) -> None:
    """Let the follower catch up and end; leave it running if that takes too long. Records its own death."""
    if follower.stdin is not None:
        with contextlib.suppress(OSError):
            follower.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = follower.wait(_FINISH_SECONDS)
        if code:
            report(run, wanted(run), f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}")


def catch_up(run: RunDir) -> None:
    """Bring the wanted views up to date with what was just added to the record, unless a follower does."""
    if all(is_held(run, name) for name in wanted(run)):  # its last act is to look again
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        _start(run, "--once", stdin=subprocess.DEVNULL).wait(_FINISH_SECONDS)


def report(run: RunDir, names: Sequence[str], reason: str) -> None:
    """Add an entry to the journal: views that are not written any more."""
    again = " and ".join(f"`fsdp-pretrain {name}`" for name in names)
    views = " and ".join(f"the view in {name}" for name in names)
    with contextlib.suppress(UserError):
        text = f"{views} stopped, training goes on: {reason}; rebuild it with {again}"
        journal.add(run, "tracker-stopped", text, trackers=list(names))


def _start(run: RunDir, *arguments: str, stdin: int) -> subprocess.Popen[bytes]:
    make_directory(folder(run))
    with (folder(run) / "log").open("ab") as log:
        return start_module(_FOLLOW, str(run.path), *arguments, nice=10, stdin=stdin, stdout=log, stderr=log)
