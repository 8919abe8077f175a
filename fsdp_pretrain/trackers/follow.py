"""The follower of a run, `python -m fsdp_pretrain.trackers.follow RUN [--once]`: one process, and a child per tracker.

A child may fail, hang or be killed without effect on the others. The follower itself uses no tracker; it reports each
child that fails in the journal, once. It ends the children when its standard input closes, that is when training ends;
with `--once` they only catch up with what was added after that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path

from fsdp_pretrain.record import run_id
from fsdp_pretrain.record.files import RunDir

from .follower import report
from .mirror import STUCK_SECONDS, Mirror, failed, hold, is_behind, record_failure
from .sink import is_installed, wanted

_POLL_SECONDS = 2.0
_FORK = multiprocessing.get_context("fork")


class _Child:
    """The process of one tracker, as the follower sees it: it sends an empty message when it has done something, and
    one with the reason if it fails."""

    def __init__(self, run: RunDir, name: str, *, once: bool) -> None:
        self.name, self._run = name, run
        self.link, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_mirror, args=(run, name, theirs, os.getpid(), once))
        self._process.start()
        theirs.close()
        self._heard = time.monotonic()

    def end(self) -> None:
        """Let it catch up and end."""
        with contextlib.suppress(OSError):
            self.link.send("end")

    def check(self) -> bool:
        """Read its messages; end it if it hangs, and report a failure. Returns whether it has ended."""
        reason = ""
        try:
            while self.link.poll():
                reason, self._heard = self.link.recv(), time.monotonic()
                if reason:
                    return self._ended(reason)
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            return self._ended(f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}" * bool(code))
        if time.monotonic() - self._heard > STUCK_SECONDS:
            return self._ended(f"it did not answer for {STUCK_SECONDS:.0f}s")
        return False

    def _ended(self, reason: str) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, signal.SIGKILL)  # its destructors may wait for what is broken
        self.link.close()
        if reason:
            with contextlib.suppress(OSError):
                record_failure(self._run, self.name, reason)
            report(self._run, [self.name], reason)
        return True


def _mirror(run: RunDir, name: str, link: Connection, parent: int, once: bool) -> None:
    """In a child: mirror until asked to end."""

    def beat(count: int = 0) -> None:
        if os.getppid() != parent:
            os._exit(1)
        link.send("")

    try:
        while _mirror_once(run, name, link, beat, once) and is_behind(run, name):
            once = True  # what was added while it ended, by a process that found the view held
    except BaseException as error:  # trackers raise anything
        link.send(f"{type(error).__name__}: {error}".splitlines()[0])
        time.sleep(STUCK_SECONDS)  # the parent ends this process
    os._exit(0)  # threads of a tracker could keep it alive


def _mirror_once(run: RunDir, name: str, link: Connection, beat: Callable[..., None], once: bool) -> bool:
    """Mirror while holding the view. Returns whether it was held."""
    while True:
        with hold(run, name) as mine:
            if mine:
                mirror, ended = Mirror(run, name), once
                while True:
                    mirror.sync(beat)
                    beat()
                    if ended:
                        mirror.close()
                        return True
                    ended = link.poll(_POLL_SECONDS)
        if once and mine is False:
            return False
        beat()
        once = link.poll(_POLL_SECONDS) or once


def main(arguments: list[str]) -> None:
    """Run the follower."""
    run, once = RunDir(Path(arguments[0])), "--once" in arguments[1:]
    if (known := run_id.read(run.path)) is not None:
        run_id.bind(run.path, known)
    names = wanted(run)
    if once:
        names = [name for name in names if is_installed(name) and not failed(run, name)]
    children = [_Child(run, name, once=once) for name in names]
    asked = once
    while children:
        stdin = [] if asked else [sys.stdin.fileno()]
        ready = connection.wait([*(child.link for child in children), *stdin], 1.0)
        if stdin and stdin[0] in ready:
            asked = True
            for child in children:
                child.end()
        children = [child for child in children if not child.check()]


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)
