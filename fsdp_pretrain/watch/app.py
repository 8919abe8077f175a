"""The live view: what is followed in the background, drawn once a second and at every key."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segment, SegmentLines
from rich.text import Text

from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.units import human_time

from . import fleet, page
from .following import RunFollower

_SECONDS = 1.0
_SILENT = 5.0
"""Seconds without an answer of the storage until that is shown."""
_KEY = re.compile(rb"\x1b[\[O].|.", re.DOTALL)
"""The bytes of a key: an arrow is Escape and two more."""
_KEYS = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"q": "q", b"\x04": "q",
}  # fmt: skip


def console() -> Console:
    """Standard output; characters that it cannot show become question marks."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)


def is_live() -> bool:
    """Whether standard output is a terminal that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class _Screen:
    """A run, or all runs under a directory: polled about once a second by a thread, so that storage that hangs does
    not stop the keys.

    Attributes:
        at: how far down the person scrolled.
    """

    def __init__(self, path: Path, *, of_runs: bool) -> None:
        self._path, self._of_runs, self.at = path, of_runs, 0
        self._poll = fleet.FleetFollower(path).poll if of_runs else RunFollower(RunDir(path)).poll
        self._answered = time.monotonic()
        self._failure: BaseException | None = None
        self._found: Any = None  # a `RunView`, or rows of runs
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self._found = self._poll()
            except BaseException as error:
                self._failure = error
                return
            self._answered = time.monotonic()
            time.sleep(_SECONDS)

    def draw(self, out: Console) -> RenderableType:
        """What fits on the terminal, and the keys. Raises what the thread raised."""
        if self._failure is not None:
            raise self._failure
        width, height = out.size
        silent = time.monotonic() - self._answered
        parts: list[RenderableType] = []
        if silent > _SILENT:
            parts.append(Text(f"the storage has not answered for {human_time(silent)}", "bold red"))
        if self._found is None:
            parts.append(Text(f"reading {self._path} ..."))
        elif self._of_runs:
            parts.append(fleet.render(self._path, self._found, width))
        else:
            parts.append(page.render(self._found, width, height))
        lines = out.render_lines(Group(*parts), out.options.update(height=None), pad=False)
        self.at = min(self.at, max(0, len(lines) - height + 1))
        shown = [*lines[self.at :], *[[Segment("")]] * height][: height - 1]
        keys = Text("q quit  ↑↓ scroll".ljust(width), "reverse", no_wrap=True)
        return Group(SegmentLines(shown, new_lines=True), keys)


def show(path: Path, *, fleet_of_runs: bool) -> None:
    """Show a run, or all runs under a directory, until the person leaves."""
    for name in ("LINES", "COLUMNS"):  # exported by some shells; the size of the terminal changes
        os.environ.pop(name, None)
    shown, out = _Screen(path, of_runs=fleet_of_runs), console()
    with _keys() as pressed, Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            live.update(shown.draw(out), refresh=True)
            match pressed():
                case "q":
                    return
                case "up" | "down" as key:
                    shown.at = max(0, shown.at + (1 if key == "down" else -1))


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Keys without Enter: the next one, or nothing after a second. Signals that end the program leave the terminal as
    it was; Ctrl-Z does nothing."""
    terminal = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)

    keys: list[bytes] = []

    def pressed() -> str:
        if not keys:
            if not select.select([] if terminal is None else [terminal], [], [], _SECONDS)[0] or terminal is None:
                return ""
            keys.extend(_KEY.findall(os.read(terminal, 1024) or b"q"))  # an end of the input is the key to leave
        return _KEYS.get(keys.pop(0), "")

    before = termios.tcgetattr(terminal) if terminal is not None else None
    if terminal is not None:
        tty.setcbreak(terminal)
    try:
        yield pressed
    finally:
        if terminal is not None and before is not None:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
