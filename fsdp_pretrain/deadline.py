"""Calls with a timeout, for what may hang: in a thread or a program.

A lost file system blocks every process that accesses it, for hours, even against SIGKILL. So nothing here waits for the
end of a call that timed out: its thread or process is left behind, and the caller continues.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_TURN = 1.0
_REAP_SECONDS = 1.0
"""Time for a killed process to end; one that waits for a file system in the kernel does not."""


class NoAnswerError(TimeoutError):
    """No answer in time; the call may still be running."""


class Worker:
    """A daemon thread that runs one call at a time. Passing it a call costs about 20 microseconds."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._late = False
        thread = threading.Thread(target=_serve, args=(self._calls, self._outcomes), name=name, daemon=True)
        thread.start()
        self.identity = thread.ident or 0
        weakref.finalize(self, self._calls.put, None).atexit = False

    def call(self, act: Callable[[], T], seconds: float) -> T:
        """Run `act` in the thread. Returns its result, or raises its exception.

        Raises:
            NoAnswerError: it took too long, or the previous call is still running. Time is counted in short turns, so
                a suspended process does not use it up.
        """
        if self._late:
            self._take(0.0)
        self._late = True
        self._calls.put(act)
        result, error = self._take(seconds)
        try:
            if error is not None:
                raise error
            return result  # type: ignore[no-any-return]
        finally:
            del error  # it references this frame, and would keep the thread alive

    def _take(self, seconds: float) -> tuple[Any, BaseException | None]:
        while True:
            try:
                outcome = self._outcomes.get(timeout=max(0.0, min(seconds, _TURN)))
            except Empty:
                seconds -= _TURN
                if seconds <= 0:
                    raise NoAnswerError from None
            else:
                self._late = False
                return outcome


def _serve(
    calls: SimpleQueue[Callable[[], Any] | None], outcomes: SimpleQueue[tuple[Any, BaseException | None]]
) -> None:
    while (act := calls.get()) is not None:
        result, raised = None, None
        try:
            result = act()
        except BaseException as error:
            raised = error
        outcomes.put((result, raised))
        del act, result, raised  # else what they reference, such as the last file, would stay open


def run_program(
    command: Sequence[str],
    seconds: float,
    *,
    text: bytes | None = None,
    output: int = subprocess.DEVNULL,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program in its own session, and kill what is left of it and its children.

    Args:
        command: the program and its arguments.
        seconds: timeout.
        text: standard input.
        output: of standard output; `subprocess.PIPE`: into the result.
        environment: None: that of this process.

    Raises:
        NoAnswerError: it took too long.
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    try:
        found, _ = process.communicate(text, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoAnswerError from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_SECONDS)
    return subprocess.CompletedProcess(command, process.returncode, found)
