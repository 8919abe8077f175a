"""Asking something that may hang, and waiting only so long: in a thread, of a program, of a helper process. No torch.

A file system that went away blocks whoever touches it, for hours, and not even SIGKILL gets through. So nothing here
waits for the end of what did not answer in time: the thread or the process is left behind, and the caller goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from .child_process import start_module

T = TypeVar("T")
_TURN = 1.0
_REAP_SECONDS = 1.0
"""For a process that was killed to be gone; what waits for a file system in the kernel is not."""


class NoAnswerError(TimeoutError):
    """It did not answer in time; it may still be at it."""


class Worker:
    """A daemon thread that makes one call at a time. Handing a call over costs about 20 microseconds."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._late = False
        thread = threading.Thread(target=_serve, args=(self._calls, self._outcomes), name=name, daemon=True)
        thread.start()
        self.identity = thread.ident or 0
        weakref.finalize(self, self._calls.put, None).atexit = False

    def call(self, act: Callable[[], T], seconds: float) -> T:
        """What `act` returns or raises.

        Raises:
            NoAnswerError: it took too long, or the call before it still goes on. The time is counted in short turns:
                a process that is suspended does not use it up.
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
            del error  # it refers to this frame, and so keeps the thread and what it holds

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
        del act, result, raised  # what they hold, such as the last file, would stay open


def run_program(
    command: Sequence[str],
    seconds: float,
    *,
    text: bytes | None = None,
    output: int = subprocess.DEVNULL,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program, in a session of its own, and end what is left of it and its children.

    Args:
        command: the program and its arguments.
        seconds: that it may take.
        text: its standard input.
        output: where its standard output goes; `subprocess.PIPE`: into the result.
        environment: of the program; None: that of this process.

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


class Helper:
    """`python -m MODULE`, which answers lines of JSON with lines of JSON: asked and heard without ever waiting for it.

    It is started when it is first asked, or has ended.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = (module, *arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._left: list[subprocess.Popen[bytes]] = []
        self._partial = b""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def send(self, request: dict[str, Any]) -> bool:
        """Ask; whether the helper is there to take it."""
        try:
            if self._process is None or self.ended:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            line = json.dumps(request).encode() + b"\n"
            return os.write(self._process.stdin.fileno(), line) == len(line)
        except OSError:  # it ended, or takes nothing more; or there is no memory for another process
            return False

    def receive(self) -> list[dict[str, Any]]:
        self._left = [process for process in self._left if process.poll() is None]
        if self._process is None or self._process.stdout is None:
            return []
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._process.stdout.fileno(), 1 << 16):
                self._partial += chunk
        *lines, self._partial = self._partial.split(b"\n")
        return [json.loads(line) for line in lines]

    def replace(self) -> None:
        """Kill it, without waiting for its end; the next request starts another."""
        if self._process is not None:
            self._process.kill()
            self._left.append(self._process)
            self._process, self._partial = None, b""

    def _start(self) -> None:
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self._partial = b""
        self._process = None
        self._process = start_module(*self._command, stdin=pipe, stdout=pipe, stderr=nowhere, cwd="/", bufsize=0)
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            os.set_blocking(end.fileno(), False)
