"""The live view: a thread follows the run, and the screen is drawn once a second until Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
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
"""All runs under a directory are read again after these seconds, or this many times what reading took, if more."""
_PIPED = 160
"""Columns of what is printed into a file or pipe, where nothing says how many there are."""
_SILENT = 5.0
"""Seconds after which storage that does not answer is reported."""


def console() -> Console:
    """Standard output; characters that it cannot show become question marks."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _PIPED
    return Console(highlight=False, width=wide)


def is_live() -> bool:
    """Whether standard output is a terminal that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class _Screen:
    """A run, or all runs under a directory: polled by a thread, so that storage that hangs is shown."""

    def __init__(self, run: RunDir, *, of_runs: bool) -> None:
        self._path, self._of_runs = run.path, of_runs
        self._poll = (lambda: fleet.read_rows(fleet.find_runs(run.path))) if of_runs else RunFollower(run).poll
        self._poll_began: float | None = None  # when the poll in progress began; None between polls
        self._failure: BaseException | None = None
        self._latest: Any = None  # a `RunView`, or rows of runs
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._poll_began = begun = time.monotonic()
            try:
                self._latest = self._poll()
            except BaseException as error:
                self._failure = error
                return
            self._poll_began, took = None, time.monotonic() - begun
            time.sleep(max(_FLEET_SECONDS, _FLEET_SHARE * took) if self._of_runs else _SECONDS)

    def draw(self, out: Console) -> RenderableType:
        """The screen as it is known so far; the terminal cuts it to its size. Raises what the thread raised."""
        if self._failure is not None:
            raise self._failure
        width, height = out.size
        poll_began, parts = self._poll_began, list[RenderableType]()
        if poll_began is not None and (silent := time.monotonic() - poll_began) > _SILENT:
            parts.append(Text(f"the storage has not answered for {human_time(silent)}", "bold red"))
        if self._latest is None:
            parts.append(Text(f"reading {self._path} ..."))
        elif self._of_runs:
            parts.append(fleet.render(self._path, self._latest, width))
        else:
            parts.append(page.render(self._latest, width, height))
        return Group(*parts)


def show(run: RunDir, *, fleet_of_runs: bool) -> None:
    """Show a run, or all runs under its directory, until the user leaves."""
    for name in ("LINES", "COLUMNS"):  # exported by some shells; the size of the terminal changes
        os.environ.pop(name, None)
    for number in (signal.SIGTERM, signal.SIGHUP):  # leave the terminal as it was
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    view, out = _Screen(run, of_runs=fleet_of_runs), console()
    with Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            live.update(view.draw(out), refresh=True)
            time.sleep(_SECONDS)
