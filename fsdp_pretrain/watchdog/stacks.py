"""Where ranks stand: stack dumps made by a signal at C level, and what they say about who waits for whom. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_WAITING = "/torch/distributed/"
_NEAR = 6
"""Innermost frames that are looked at."""


@dataclass(frozen=True)
class Stack:
    """The main thread of a rank, innermost frame first.

    Attributes:
        frames: (file, line, function).
        readers: identities of threads that are in the middle of reading data.
    """

    frames: tuple[tuple[str, int, str], ...]
    readers: tuple[int, ...] = ()

    @property
    def collective(self) -> str | None:
        """Name of the collective operation it is in; None if it is in none."""
        names = [name for file, _, name in self.frames[:_NEAR] if _WAITING in file]
        return names[-1] if names else None

    @property
    def place(self) -> str:
        """Where it is in words: the innermost frame, and the innermost one of this project if that is another."""
        if not self.frames:
            return "unknown"
        inner = self.frames[0]
        own = next((frame for frame in self.frames if _is_ours(frame[0])), inner)
        text = f"{Path(inner[0]).name}:{inner[1]} {inner[2]}"
        return text if own == inner else f"{text} (from {Path(own[0]).name}:{own[1]} {own[2]})"

    @property
    def signature(self) -> tuple[tuple[str, int, str], ...]:
        """What tells one place from another, and stays the same while it stands still."""
        return self.frames[:_NEAR]

    @property
    def group(self) -> tuple[str, ...]:
        """What ranks that wait for the same thing have in common: collective and caller of ours, without lines."""
        own = next((f"{Path(file).name}:{name}" for file, _, name in self.frames if _is_ours(file)), "")
        return (self.collective or "", own)


def _is_ours(file: str) -> bool:
    return (
        any(f"/{package}/" in file for package in ("fsdp_pretrain", "data", "eval"))
        and "site-packages/torch" not in file
    )


def _is_reading(frames: list[tuple[str, int, str]]) -> bool:
    """Whether a thread that makes reads of data is in one: it is not when it waits to be given the next."""
    return any(file.endswith("data/reading.py") and name == "_serve" for file, _, name in frames[1:])


class Dumps:
    """The dumps of one rank, as they are added to its file.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._main: str | None = None
        self.text = ""

    def skip(self) -> None:
        """What is there is of no interest."""
        self.text = ""
        try:
            self._offset = self._path.stat().st_size
        except OSError:
            self._offset = 0

    def latest(self) -> Stack | None:
        """The main thread in the dump made since `skip`; None if nothing new is there. The dump is in `text`."""
        try:
            with self._path.open(encoding="utf-8", errors="replace") as file:
                if self._main is None:
                    self._main = file.readline().removeprefix("main ").strip()
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return None
        if text == self.text or not self._main:
            return None
        self.text = text
        threads = _threads(text)
        main = threads.get(int(self._main, 16))
        readers = tuple(thread for thread, frames in threads.items() if _is_reading(frames))
        return None if main is None else Stack(tuple(main), readers)


def _threads(text: str) -> dict[int, list[tuple[str, int, str]]]:
    """Frames of each thread of the last dump in a text."""
    found: dict[int, list[tuple[str, int, str]]] = {}
    frames: list[tuple[str, int, str]] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            frames = found[int(thread[1], 16)] = []
        elif frame := _FRAME.match(line):
            frames.append((frame[1], int(frame[2]), frame[3]))
    return found
