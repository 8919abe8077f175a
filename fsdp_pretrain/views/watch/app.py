"""The live view: what is followed in the background, drawn once a second until Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.units import human_time

from . import fleet, page
from .following import RunFollower

_SECONDS = 1.0
_FLEET_SECONDS, _FLEET_SHARE = 5.0, 50
"""All runs under a directory are looked at again after this time, and after so many times what it took."""
_SILENT = 5.0
"""Seconds without an answer of the storage until that is shown."""


def console() -> Console:
    """Standard output; characters that it cannot show become question marks."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)


def is_live() -> bool:
    """Whether standard output is a terminal that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class _Screen:
    """A run, or all runs under a directory: polled by a thread, so that storage that hangs is shown."""

    def __init__(self, path: Path, *, of_runs: bool) -> None:
        self._path, self._of_runs = path, of_runs
        self._poll = (lambda: fleet.read_rows(fleet.find_runs(path))) if of_runs else RunFollower(RunDir(path)).poll
        self._asked: float | None = None  # when the poll began that is under way
        self._failure: BaseException | None = None
        self._found: Any = None  # a `RunView`, or rows of runs
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._asked = begun = time.monotonic()
            try:
                self._found = self._poll()
            except BaseException as error:
                self._failure = error
                return
            self._asked, took = None, time.monotonic() - begun
            time.sleep(max(_FLEET_SECONDS, _FLEET_SHARE * took) if self._of_runs else _SECONDS)

    def draw(self, out: Console) -> RenderableType:
        """What there is; the terminal shows what fits. Raises what the thread raised."""
        if self._failure is not None:
            raise self._failure
        width, height = out.size
        asked, parts = self._asked, list[RenderableType]()
        if asked is not None and (silent := time.monotonic() - asked) > _SILENT:
            parts.append(Text(f"the storage has not answered for {human_time(silent)}", "bold red"))
        if self._found is None:
            parts.append(Text(f"reading {self._path} ..."))
        elif self._of_runs:
            parts.append(fleet.render(self._path, self._found, width))
        else:
            parts.append(page.render(self._found, width, height))
        return Group(*parts)


def show(path: Path, *, fleet_of_runs: bool) -> None:
    """Show a run, or all runs under a directory, until the person leaves."""
    for name in ("LINES", "COLUMNS"):  # exported by some shells; the size of the terminal changes
        os.environ.pop(name, None)
    for number in (signal.SIGTERM, signal.SIGHUP):  # leave the terminal as it was
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    shown, out = _Screen(path, of_runs=fleet_of_runs), console()
    with Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            live.update(shown.draw(out), refresh=True)
            time.sleep(_SECONDS)
