"""Helper processes: modules that work beside a rank, where neither their crash nor storage that hangs can harm it.

A helper reads its settings from the first line of its standard input, as JSON. The input stays open as long as the
process that started the helper lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from .processes import exit_now, start_module

_Process = subprocess.Popen[bytes]
Settings = TypeVar("Settings", bound=NamedTuple)
_PAUSE, _LONGEST_PAUSE, _LIVED = 1.0, 15.0, 60.0
"""Seconds before the first restart, and at most; the pause doubles while helpers live for less than `_LIVED`."""


def start_helper(module: str, *words: str, log: Path | None, nice: int = 0, text: bytes = b"") -> _Process:
    """Start a module with an open standard input, which begins with `text` and ends when this process ends.

    Args:
        module: for `start_module`.
        words: its command line.
        log: file for its outputs, which are lost if it cannot be written; None: those of this process.
        nice: increment of its niceness.

    Raises:
        OSError: it cannot be started.
    """
    if log is not None:
        try:
            log.parent.mkdir(exist_ok=True)
            log.open("ab").close()
        except OSError:
            log = Path(os.devnull)
    process = start_module(module, *words, nice=nice, log=log, stdin=subprocess.PIPE)
    _write(process, text)
    return process


class HelperProcess:
    """Runs a module as a process beside this one, and restarts it when it ends with another exit code than 0.

    Args:
        module: name of the module, which calls `read_settings`.
        words: its command line, by which people recognise the process.
        settings: what it reads. A field `restarts` becomes the number of restarts so far.
        log: see `start_helper`.
        nice: increment of its niceness.
        died: called in a thread, with the exit code, before a restart.

    Attributes:
        process: the latest process; None if none could be started.
    """

    def __init__(
        self,
        module: str,
        *words: str,
        settings: NamedTuple,
        log: Path | None = None,
        nice: int = 0,
        died: Callable[[int], object] = lambda code: None,
    ) -> None:
        self._command, self._settings = (module, *words), settings
        self._log, self._nice, self._died = log, nice, died
        self._restarts = 0
        self._closed, self._starting = threading.Event(), threading.Lock()
        self.process: _Process | None = None
        self._start()
        threading.Thread(target=self._supervise, name=f"{module} helper", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the helper does not run now."""
        return self.process is None or self.process.poll() is not None

    @property
    def finished(self) -> bool:
        """Whether the helper ended with exit code 0."""
        return self.process is not None and self.process.poll() == 0

    def finish(self) -> None:
        """Ask the helper to do what is left and to end, see `end_with_input`; it is not restarted any more."""
        self._close()
        if self.ended and not self.finished:
            self._restarts += 1
            self._start()
        if self.process is not None:
            _write(self.process, b"finish\n")

    def close(self, seconds: float) -> None:
        """Close the helper's input, and kill it unless it ends within `seconds`."""
        self._close()
        if self.process is None:
            return
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.process.stdin.close()
            self.process.wait(seconds)
        self.process.kill()

    def _close(self) -> None:
        with self._starting:
            self._closed.set()

    def _start(self) -> None:
        given = self._settings._asdict() | {"restarts": self._restarts}
        text = json.dumps(given).encode() + b"\n"
        module, *words = self._command
        with contextlib.suppress(OSError):
            self.process = start_helper(module, *words, log=self._log, nice=self._nice, text=text)

    def _supervise(self) -> None:
        pause = 0.0
        while True:
            begun = time.monotonic()
            code = self.process.wait() if self.process is not None else 1
            if code == 0:
                return
            lived = time.monotonic() - begun > _LIVED
            pause = _PAUSE if lived or not pause else min(2 * pause, _LONGEST_PAUSE)
            if self._closed.wait(pause):
                return
            self._died(code)
            with self._starting:
                if self._closed.is_set():
                    return
                self._restarts += 1
                self._start()


def _write(process: _Process, text: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has just died
        process.stdin.write(text)
        process.stdin.flush()


# ---------------------------------------------------------------- in the helper


def read_settings(kind: type[Settings]) -> Settings:
    """The settings that a `HelperProcess` was given, from the first line of standard input."""
    given = json.loads(sys.stdin.readline())
    return kind._make(given[name] for name in kind._fields)


def end_with_input(asked: Callable[[], object] = lambda: None) -> None:
    """Exit when standard input ends; call `asked`, in a thread, for its next line.

    Requests to stop are ignored, since schedulers send them to every process of a job.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

    def listen() -> None:
        if sys.stdin.readline():
            asked()
        sys.stdin.read()
        exit_now(0)

    threading.Thread(target=listen, daemon=True).start()
