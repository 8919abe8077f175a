"""Starts `python -m MODULE ARGUMENTS` quickly: a process that has imported everything once and forks a child per command.

    python tests/zygote.py IMPORTED ...

Reads one JSON request per line from standard input, `{"module", "arguments", "environment", "out", "err", "exit", "cwd"}`,
answers with the child's pid, and writes the file `exit` with the exit code (negative for a signal) when the child ends.
Exit codes, outputs, tracebacks and interrupts are those of `python -m`. It saves importing torch or lm-eval, seconds
each, and tearing down the imported modules at the end. Modules of FORKED that such a command starts are forked from it.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path
from typing import Any, NoReturn

FORKED = {"fsdp_pretrain.eval.attempt"}


def start(self: subprocess.Popen, command: Any, *options: Any) -> None:
    """In place of `Popen._execute_child`, with its arguments: in a new session, and from here on like a fresh process."""
    if not isinstance(command, list) or not FORKED & {*command[2:3]} or "EXECUTE_FIRST" in os.environ:
        execute(self, command, *options)
        return
    environment, pipes = options[5], options[9:15]
    self.pid = os.fork()
    if self.pid:
        self._child_created = True
        self._close_pipe_fds(*pipes)
        return
    os.setsid()
    for place, descriptor in enumerate((pipes[0], pipes[3], pipes[5])):
        if descriptor != -1:
            os.dup2(descriptor, place)
    atexit._clear()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    be(command[2], command[3:])
    run(command[2])


execute = subprocess.Popen._execute_child
subprocess.Popen._execute_child = start


def be(module: str, arguments: list[str]) -> None:
    """Look as if Python had just begun to run a module."""
    sys.argv = ["-m", *arguments]
    sys.modules.pop(module, None)  # imported before: executed again as __main__
    sys.modules["__main__"] = types.ModuleType("__main__")


def become(request: dict) -> None:
    """Make this forked child look like a fresh `python -m`."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "out"), (2, "err")):
        opened = os.open(request[name], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    runpy.run_path(str(Path(__file__).parent / "constants/sitecustomize.py"))
    if "EXECUTE_FIRST" in os.environ:  # set by a test, such as a trap
        runpy.run_path(os.environ["EXECUTE_FIRST"])
    given = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in given if path and path not in sys.path]
    be(request["module"], request["arguments"])


def reap(running: dict[int, Path]) -> None:
    """Record the exit codes of ended children."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        path = running.pop(pid)
        partial = path.with_suffix(".partial")
        partial.write_text(str(os.waitstatus_to_exitcode(status)))
        partial.rename(path)


def serve() -> str | None:
    """Fork a child per request; in the child the module to run, in this process None when standard input closes."""
    running: dict[int, Path] = {}
    pending = b""
    while True:
        if select.select([0], [], [], 0.01 if running else None)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return None
            *lines, pending = (pending + data).split(b"\n")
            for request in map(json.loads, lines):
                assert len(list(Path("/proc/self/task").iterdir())) == 1, (
                    "a fork copies no threads, but may copy a lock one holds"
                )
                pid = os.fork()
                if pid == 0:
                    become(request)
                    return str(request["module"])
                running[pid] = Path(request["exit"])
                print(pid, flush=True)
        reap(running)


def run(module: str) -> NoReturn:
    """`python -m MODULE` to its end; waits for threads and calls exit handlers, but tears no module down."""
    code, interrupted = 0, False
    try:
        runpy._run_module_as_main(module)
    except SystemExit as end:
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for registered in weakref.finalize._registry.values():
        registered.atexit = False  # torch would take its libraries apart, for half a second
    gc.collect()
    gc.freeze()  # never touched again, so never copied
    print("ready", flush=True)
    if chosen := serve():
        run(chosen)
