"""Reads stack dumps, in the format of `faulthandler`, to find out which rank waits for which."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_OURS = re.compile(r"(?:fsdp_pretrain|data|eval)/")
_DEVICE_WAIT = re.compile(r"/torch/cuda/(?:streams|__init__)\.py$")
DEVICE = "a collective on the device"
"""What a rank that waits for its GPU waits for: NCCL's collectives block the device, not the host."""
_NEAR = 6
"""Number of innermost frames that are compared."""


class Frame(NamedTuple):
    """A line of a stack dump; `name` is the function's."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} {self.name}"


@dataclass(frozen=True)
class Stack:
    """The stack of a rank's main thread, innermost frame first."""

    frames: tuple[Frame, ...]
    root: str  # the directory that the rank imported this project from, with a slash at its end

    @property
    def collective(self) -> str | None:
        """Name of the collective that it waits in, if any; `DEVICE` if it waits for the GPU."""
        names = [frame.name for frame in self.signature if "/torch/distributed/" in frame.file]
        waits = any(_DEVICE_WAIT.search(frame.file) and frame.name == "synchronize" for frame in self.signature)
        return names[-1] if names else DEVICE if waits else None

    @property
    def _own(self) -> Frame | None:
        """The innermost frame of this project."""
        return next((frame for frame in self.frames if _OURS.match(_inside(frame, self.root))), None)

    @property
    def place(self) -> str:
        """The innermost frame, and (if different) the innermost frame of this project, as text."""
        if not self.frames:
            return "unknown"
        inner, own = self.frames[0], self._own
        return str(inner) if own in (None, inner) else f"{inner} (from {own})"

    @property
    def signature(self) -> tuple[Frame, ...]:
        """Identifies a position, and stays the same while the thread does not move."""
        return self.frames[:_NEAR]

    @property
    def group(self) -> tuple[str, ...]:
        """Equal for ranks that wait for the same thing: collective and caller of this project, without line numbers."""
        own = self._own
        return (self.collective or "", "" if own is None else f"{Path(own.file).name}:{own.name}")


class Dumps:
    """The stack dumps of one rank, which are appended to its file."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._main, self._root = "", ""
        self.text = ""

    def skip(self) -> None:
        """Skip what is already in the file."""
        self.text = ""
        try:
            self._offset = self._path.stat().st_size
        except OSError:
            self._offset = 0

    def latest(self) -> Stack | None:
        """The main thread's stack in a dump made since `skip`; None if nothing is new. The dump is then in `text`."""
        try:
            with self._path.open(encoding="utf-8", errors="replace") as file:
                if not self._main:
                    self._main, _, self._root = file.readline().removeprefix("main ").rstrip("\n").partition(" ")
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return None
        if text == self.text or not self._main:
            return None
        self.text = text
        main = _threads(text).get(int(self._main, 16))
        return None if main is None else Stack(tuple(main), self._root)


def _inside(frame: Frame, root: str) -> str:
    """The frame's file relative to `root`; empty if it is elsewhere."""
    return frame.file.removeprefix(root) if frame.file.startswith(root) else ""


def _threads(text: str) -> dict[int, list[Frame]]:
    """Frames of each thread of the last dump in a text."""
    threads: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            frames = threads[int(thread[1], 16)] = []
        elif frame := _FRAME.match(line):
            frames.append(Frame(frame[1], int(frame[2]), frame[3]))
    return threads
