"""The worker processes of a command: they end with it, and at once on an error or Ctrl-C, whatever they wait for."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from fsdp_pretrain.errors import DataError
from fsdp_pretrain.processes import die_with_parent


@contextmanager
def worker_processes(count: int, start: Callable[..., object] = bool, *arguments: Any) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes first call `start(*arguments)`. Raises DataError if one was killed."""
    first = (os.getpid(), start, arguments)
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start, first)
    try:
        yield pool
    except BaseException as error:
        for process in list((pool._processes or {}).values()):
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise DataError(
                "a worker process was killed (out of memory?)",
                remedy="run the same command again; fewer --workers need less memory",
            ) from None
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(parent: int, start: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    die_with_parent(parent)  # else a worker of a killed command would take more work, and write it among another's
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # handled by the parent
    start(*arguments)
