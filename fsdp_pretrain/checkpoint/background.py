"""Writing a checkpoint while training goes on: a copy of the state in host memory, and a thread that writes it.

The thread does what a synchronous save does, over a process group of its own: collectives of two threads on one group
would meet in the wrong order. At most one save is in flight. What became of it is known from `Pending` alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

T = TypeVar("T")


class Pending(Generic[T]):
    """A call that runs in a thread of its own; the thread does not outlive the process.

    Args:
        work: what to call.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # DCP's is a BaseException; any other must reach the main thread too
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it ended, however."""
        return not self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What it raised, once it has."""
        return self._error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, so many seconds at most; whether it came."""
        self._thread.join(timeout)
        return self.done

    def result(self) -> T:
        """What it returned; raises what it raised. Only when `done`."""
        assert self.done
        if self._error is not None:
            raise self._error
        return cast(T, self._result)


class Stager:
    """Copies state into host memory, the same memory every time.

    Args:
        device: where the live state is; from a GPU the copies go to pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        gpu = device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
        )
        self._stager = DefaultStager(options)

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of nested dictionaries of tensors, DTensors among them; complete when this returns."""
        return cast(dict[str, Any], self._stager.stage(state))
