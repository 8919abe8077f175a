"""Starts training ranks quickly: a process that has imported everything once and forks a child per rank.

Reads one JSON request per line from standard input, `{"arguments", "environment", "log"}`, answers with the child's pid, and
writes `EXITS/<pid>` with the exit code (negative for a signal) when the child ends. The children are ordinary
processes; only their first three seconds, importing torch, are saved.
"""

import json
import os
import runpy
import select
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401 (half a second, at the first parameter)

from fsdp_pretrain import train


def child(request: dict) -> int:
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    if "EXECUTE_FIRST" in os.environ:  # of a test: a trap, for example
        runpy.run_path(os.environ["EXECUTE_FIRST"])
    sys.argv = ["train", *request["arguments"]]
    os.chdir("/")
    try:
        return train.main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


def main(exits: Path) -> None:
    print("ready", flush=True)
    pending = b""
    while True:
        if select.select([0], [], [], 0.02)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return
            pending += data
            *lines, pending = pending.split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    code = child(json.loads(line))
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
                print(pid, flush=True)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            partial = exits / f".{pid}"
            partial.write_text(str(os.waitstatus_to_exitcode(status)))
            partial.rename(exits / str(pid))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
