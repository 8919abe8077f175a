"""Other processes, and calls that may hang.

A lost file system blocks every process that accesses it, for hours, even against SIGKILL. So nothing here waits for the
end of a call that timed out: its thread or process is abandoned, and the caller continues.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

from .errors import Exit

T = TypeVar("T")
_ROOT = Path(__file__).resolve().parent.parent
_OF_A_RANK = tuple("RANK WORLD_SIZE LOCAL_ GROUP_ ROLE_ MASTER_ TORCHELASTIC_ TORCH_NCCL_ TORCH_FR_ OMP_NUM".split())
"""Prefixes of variables that torchrun and the watchdog set for a rank."""
_PR_SET_PDEATHSIG = 1
_TURN = 1.0
_REAP_SECONDS = 1.0
"""Time for a killed process to end; a process that waits for a file system in the kernel does not end."""


class NoAnswerError(TimeoutError):
    """No answer in time; the call may still be running."""


def start_module(
    module: str,
    *arguments: str,
    nice: int = 0,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE` from this source tree, installed or not, without torchrun's variables of a rank.

    Args:
        module, arguments: the module and its command line.
        nice: increment of its niceness.
        environment: variables to add.
        log: file to which its outputs are appended; None: it inherits the outputs of this process.
        options: options of `subprocess.Popen`. The child has its own session, so signals to the job do not reach it.

    Raises:
        OSError: the module cannot be started, or its log cannot be opened.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_RANK)}
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    command = [*(["nice", "-n", str(nice)] if nice else []), sys.executable, "-m", module, *arguments]
    variables = {**kept, "PYTHONPATH": path, **(environment or {})}
    with contextlib.ExitStack() as stack:
        if log is not None:
            output = stack.enter_context(log.open("ab"))
            options |= {"stdout": output, "stderr": output}
        return subprocess.Popen(command, env=variables, start_new_session=True, **options)


def run_module(
    module: str, *arguments: str, limit: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run `python -m MODULE` to its end and capture its outputs; then kill what remains of its process group.

    Raises:
        NoAnswerError: it has not ended after `limit` seconds.
        OSError: it cannot be started.
    """
    process = start_module(module, *arguments, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return _finish(process, limit)


def run_program(
    command: Sequence[str],
    seconds: float,
    *,
    text: bytes | None = None,
    output: int = subprocess.DEVNULL,
    environment: Mapping[str, str] | None = None,
    spare_children: bool = False,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program in its own session, then kill what remains of it and its children.

    Args:
        command: the program and its arguments.
        seconds: timeout.
        text: standard input.
        output: destination of standard output; `subprocess.PIPE` captures it in the result.
        environment: all its variables; None: those of this process.
        spare_children: whether processes that it left behind may finish if its exit status is 0.

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
    return _finish(process, seconds, text, spare_children=spare_children)


def _finish(
    process: subprocess.Popen[bytes], seconds: float, text: bytes | None = None, *, spare_children: bool = False
) -> subprocess.CompletedProcess[bytes]:
    try:
        output, errors = process.communicate(text, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoAnswerError from None
    finally:
        if not (spare_children and process.returncode == 0):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


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
        """Run `act` in the thread. Returns its result, or raises its exception. Raises NoAnswerError if it took too
        long, or the previous call is still running. Time is counted in short turns, so a suspended process does not use
        it up."""
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


def process_stat(pid: int) -> list[str]:
    """Fields of `/proc/PID/stat` from the state on; empty if there is no such process, or no `/proc`."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_same_process(pid: int, started: float) -> bool:
    """Whether the process that had this `process_start` still exists, and is not a zombie."""
    now = process_start(pid)
    return now is not None and abs(now - started) <= 1


def launched_at(pid: int) -> float:
    """When a process started, in seconds since 1970; more exact than psutil, whose boot time is in whole seconds.

    Raises psutil.NoSuchProcess.
    """
    if hasattr(time, "CLOCK_BOOTTIME") and (stat := process_stat(pid)):
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - float(stat[19]) / os.sysconf("SC_CLK_TCK"))
    import psutil

    return psutil.Process(pid).create_time()


def process_start(pid: int) -> float | None:
    """Start time of a process, comparable within a host; None if there is no such live process.

    The unit is ticks since boot where available, so that setting the wall clock does not make a live process look like
    another one with the same id.
    """
    if stat := process_stat(pid):
        return None if stat[0] in "ZX" else float(stat[19])
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def collect_seldom() -> None:
    """Let Python look for garbage less often, and not at the end of the process.

    It finds little, but takes a third of the CPU time of a command that imports torch.
    """
    gc.set_threshold(50_000, 50)
    atexit.register(gc.freeze)


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent dies; exit now if the parent is no longer `parent`. Does nothing
    except on Linux."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        exit_now(1)


def run_rank(main: Callable[[], int]) -> NoReturn:
    """Run the main function of a rank, and end its process with the exit code.

    After an error, at once: NCCL's part of a process group that is still open would wait for ranks that did not fail
    (https://github.com/NVIDIA/nccl/issues/1777).
    """
    code = int(Exit.UNEXPECTED)
    try:
        code = main()
    except BaseException:
        if not _in_process_group():
            raise
        traceback.print_exc()
    if _in_process_group():
        sys.stdout.flush()
        sys.stderr.flush()
        exit_now(code)
    sys.exit(code)


def _in_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def exit_now(code: int) -> NoReturn:
    """End this process at once, although threads of a library or in a call that hangs may still run."""
    os._exit(code)
