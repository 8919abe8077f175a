"""Kills a process, or does worse, before a chosen change it makes to the file system; no hook in the program.

Python reports every file about to be opened, renamed or removed to audit hooks; `os.fsync` is wrapped. A trap is armed
by a test in a forked child, or by a training rank that executes this file before it starts: the variable
`EXECUTE_FIRST` names this file (see `zygote.py`), `TRAP` says what to wait for, as JSON.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHANGES = {"os.rename": 1, "os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.link": 1, "os.symlink": 1}
"""Audit events, and which of their arguments is the name that appears or disappears."""


def before_changes(act: Callable[[str, str], None]) -> None:
    """Call `act(verb, path)` before this process, in any thread, changes the file system. Cannot be undone."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            if not isinstance(arguments[0], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                act("open", os.fsdecode(arguments[0]))
        elif event in _CHANGES:
            path, folder = os.fsdecode(arguments[_CHANGES[event]]), arguments[-1]
            if event in ("os.remove", "os.rmdir") and folder != -1:  # as `shutil.rmtree` does
                path = f"{os.readlink(f'/proc/self/fd/{folder}')}/{path}"  # noqa: PTH115 (not a path)
            act(event.removeprefix("os."), path)

    def fsync(descriptor: int) -> None:
        act("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        synced(descriptor)

    synced, os.fsync = os.fsync, fsync
    sys.addaudithook(hook)


def kill_before(
    number: int, verb: str = ".*", path: str = "", *, after: str = "", then: Callable[[], None] = lambda: None
) -> None:
    """Arm a trap: kill -9 before the change with this number among those that match.

    Args:
        number: from 1.
        verb: regular expression of open, rename, mkdir, remove, rmdir, link, symlink, fsync.
        path: regular expression, searched in the new or removed name.
        after: count only what follows the creation of a folder whose name matches.
        then: called immediately before.
    """
    left, waiting = [number], [bool(after)]

    def act(what: str, where: str) -> None:
        if waiting[0]:
            waiting[0] = not (what == "mkdir" and re.search(after, where))
        elif re.fullmatch(verb, what) and re.search(path, where):
            left[0] -= 1
            if left[0] == 0:
                then()
                os.kill(os.getpid(), signal.SIGKILL)

    before_changes(act)


def killed_at(act: Callable[[], object], operation: int) -> bool:
    """Run `act` in a child that is killed before its n-th file system change; whether it was killed."""
    pid = os.fork()
    if pid == 0:
        kill_before(operation, "open|rename|mkdir|remove|rmdir|link|symlink")
        try:
            act()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def kill_when_larger(size: int) -> None:
    """Arm a trap: the kernel kills this process in the write that takes any file beyond `size` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def kill_others(pids: Path) -> None:
    """kill -9 all processes named in a folder except this one."""
    for path in pids.iterdir():
        if path.name != str(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name), signal.SIGKILL)


def fail(trap: dict[str, Any], path: str) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def end_thread(trap: dict[str, Any], path: str) -> None:
    """A thread that writes during training ends without notifying the other ranks."""
    if threading.current_thread() is not threading.main_thread():
        raise SystemExit("planted")


def wait(trap: dict[str, Any], path: str) -> None:
    """The storage is slow: `seconds`."""
    time.sleep(trap["seconds"])


def await_file(trap: dict[str, Any], path: str) -> None:
    """Wait until the file `file` exists, so that the test acts meanwhile."""
    while not os.path.exists(trap["file"]):  # noqa: PTH110
        time.sleep(0.01)


def take_space(hog: str, leave: int) -> None:
    """Take all but `leave` bytes of a file system with the file `hog`, also while others write there."""
    with open(hog, "wb") as file:  # noqa: PTH123 (small: every change runs through here)
        while True:
            found = os.fstatvfs(file.fileno())
            try:
                return os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - leave)
            except OSError as error:
                if error.errno != errno.ENOSPC:  # otherwise another process wrote in between
                    raise


def fill(trap: dict[str, Any], path: str) -> None:
    """A neighbour takes all but `leave` bytes of the file system, with the file `hog`."""
    take_space(trap["hog"], trap["leave"])


def flip(trap: dict[str, Any], path: str) -> None:
    """The storage flips a bit: in the first rank's file of the attempt being committed."""
    (attempt,) = Path(path).parent.glob("*.writing-*")
    with (attempt / "__0_0.distcp").open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))


def log(to: str) -> None:
    """Append every change below a `checkpoints` folder to a file, before it is made, as JSON: verb, path, size."""
    descriptor = os.open(to, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def act(what: str, where: str) -> None:
        if "/checkpoints" in where:
            size = os.stat(where).st_size if what == "fsync" else 0  # noqa: PTH116
            os.write(descriptor, json.dumps([what, where, size]).encode() + b"\n")

    before_changes(act)


ACTS = {function.__name__: function for function in (fail, end_thread, wait, await_file, fill, flip)}


def _arm(trap: dict[str, Any]) -> None:
    """Arm a trap on one rank.

    `{"rank": 0, "size": 1000}` or rank, verb, path, after: it is killed; with `pids`, a folder, all ranks die. Or rank,
    verb, path and `act`, one of ACTS with its arguments: at `times` such changes, from the one after `skip` on. Or
    `{"log": file}` on all ranks.
    """
    if "log" in trap:
        log(trap["log"])
        return
    everybody = trap.get("pids")
    if everybody:
        (Path(everybody) / str(os.getpid())).touch()
    if trap["rank"] != int(os.environ["RANK"]):
        return
    if "act" in trap:
        seen = [0]

        def act(what: str, where: str) -> None:
            if re.fullmatch(trap["verb"], what) and re.search(trap["path"], where):
                seen[0] += 1
                if trap["skip"] < seen[0] <= trap["skip"] + trap["times"]:
                    ACTS[trap["act"]](trap, where)

        before_changes(act)
    elif "size" in trap:
        kill_when_larger(trap["size"])
    else:
        then = (lambda: kill_others(Path(everybody))) if everybody else lambda: None
        kill_before(1, trap["verb"], trap["path"], after=trap["after"], then=then)


if "TRAP" in os.environ:
    _arm(json.loads(os.environ["TRAP"]))
