"""The terminal while a live view is on it: another screen, keys without Enter, and all as before at the end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from types import FrameType
from typing import Any

from rich.console import Console, ConsoleDimensions, Group
from rich.text import Text

from .charts import plain

_NAMED = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\r": "enter", b"\n": "enter",
    b"\x1b": "escape", b"\x7f": "escape", b"\x03": "q", b"\x04": "q",
}  # fmt: skip


def is_live() -> bool:
    """Whether standard output is a terminal that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def print_plain(lines: Sequence[Text], width: int) -> None:
    """Print lines as they would be in a file: coloured only for a terminal, or if FORCE_COLOR asks for it."""
    console = Console(width=width, legacy_windows=False)
    for line in adapted(lines, console.encoding):
        line.rstrip()
        console.print(line, soft_wrap=True, highlight=False)


def adapted(lines: Sequence[Text], encoding: str) -> list[Text]:
    """The lines in characters that an encoding has."""
    if encoding.lower().replace("-", "").startswith("utf"):
        return list(lines)
    found = []
    for line in lines:
        line = line.copy()
        line.plain = plain(line.plain)
        found.append(line)
    return found


class Terminal:
    """A context in which standard output shows pages and standard input gives keys.

    Signals that end the program, or stop it (Ctrl-Z), restore the terminal first.
    """

    def __init__(self) -> None:
        self._console = Console()
        self._screen = self._console.screen()
        self._input = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] | None = None
        self._woken, self._wake = os.pipe()
        self._old: dict[int, Any] = {}

    @property
    def size(self) -> tuple[int, int]:
        """Width and height: those of the terminal, whatever COLUMNS and LINES say, which do not change with it."""
        found = os.get_terminal_size(sys.stdout.fileno())
        return found.columns or 80, found.lines or 24

    def __enter__(self) -> Terminal:
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._old[number] = signal.signal(number, _leave)
        self._old[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: self.wake())
        self._old[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._stop)
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _open(self) -> None:
        if self._input is not None:
            self._before = termios.tcgetattr(self._input)
            tty.setcbreak(self._input)
        self._screen.__enter__()

    def _close(self) -> None:
        self._screen.__exit__(None, None, None)
        if self._input is not None and self._before is not None:
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)

    def _stop(self, *_: object) -> None:
        self._close()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._open()
        self.wake()

    def wake(self) -> None:
        """End a `wait` of another thread now."""
        with contextlib.suppress(BlockingIOError):  # it is being woken already
            os.write(self._wake, b".")

    def wait(self, seconds: float) -> list[str]:
        """Keys pressed, as soon as there are any; none after `seconds`, a `wake` or a new size. `q` if input ends."""
        sources = [self._woken] if self._input is None else [self._woken, self._input]
        ready, _, _ = select.select(sources, [], [], seconds)
        if self._woken in ready:
            os.read(self._woken, 4096)
        if self._input is None or self._input not in ready:
            return []
        pressed = os.read(self._input, 1024)
        if not pressed or pressed in _NAMED:
            return [_NAMED.get(pressed, "q")]
        return _split(pressed)

    def paint(self, lines: Sequence[Text]) -> None:
        """Show a page of as many lines as the screen has."""
        self._console.size = ConsoleDimensions(*self.size)
        self._screen.update(Group(*adapted(lines, self._console.encoding)))


def _split(pressed: bytes) -> list[str]:
    """The keys in what was typed ahead."""
    keys = []
    while pressed:
        name = next((name for name in sorted(_NAMED, key=len, reverse=True) if pressed.startswith(name)), pressed[:1])
        keys.append(_NAMED.get(name, name.decode("ascii", "replace")))
        pressed = pressed[len(name) :]
    return keys


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
