"""Writing a checkpoint while training goes on: a copy of the state in host memory, and a thread that writes it.

The thread does what a synchronous save does, over a process group of its own: collectives of two threads on one group
would meet in the wrong order. At most one save is in flight. What became of it is known from `Pending` alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.parallel.mesh import local_part

T = TypeVar("T")
_PAGE = 4096
"""Bytes from which on a tensor's host memory is pinned."""


class Pending(Generic[T]):
    """A call that runs in a thread of its own; the thread does not outlive the process."""

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
        return not self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        return self._error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, `timeout` seconds at most; whether it came."""
        self._thread.join(timeout)
        return self.done

    def result(self) -> T:
        """What it returned; raises what it raised. Only when `done`."""
        assert self.done
        if self._error is not None:
            raise self._error
        return cast(T, self._result)


class Stager:
    """Copies state into host memory, the same memory every time: the next copy overwrites the last.

    DCP's `DefaultStager` does not: in torch 2.11 it frees the memory after every copy, and fails at the second. From a
    GPU (`device`, where the live state is) the copies go to pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy: dict[str, Any] | None = None

    @torch.no_grad()
    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of nested dictionaries of tensors, DTensors among them; complete when this returns.

        Names, shapes and dtypes must be the same every time.
        """
        gpu = self._device.type == "cuda"
        if self._copy is None:
            self._copy = _empty_copy(state, pinned=gpu)
        _fill(self._copy, state)
        if gpu:
            torch.cuda.current_stream(self._device).synchronize()
        return self._copy


def _empty_copy(state: Any, *, pinned: bool) -> Any:
    """The same tree, its tensors in host memory. DTensors keep their mesh and placements, which DCP reads."""
    if isinstance(state, dict):
        return {name: _empty_copy(value, pinned=pinned) for name, value in state.items()}
    copy = torch.empty_like(local_part(state), device="cpu")
    if pinned and copy.nbytes >= _PAGE:
        _pin(copy)
    # Not `DTensor.from_local`, which would move it to the device of the mesh.
    return DTensor(copy, state._spec, requires_grad=False) if isinstance(state, DTensor) else copy


def _pin(tensor: Tensor) -> None:
    """Pin a tensor's memory until it is freed. (`pin_memory=True` would round its size up to a power of two.)

    Raises ConfigError.
    """
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    try:
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, tensor.nbytes, 0)))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot pin host memory for a copy of the state: {error}",
            effect="checkpoints cannot be made beside training",
            remedy="set checkpoint.background = false, or give the node more memory",
        ) from None
    weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address).atexit = False


def _fill(copy: dict[str, Any], state: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, dict):
            _fill(copy[name], value)
        else:
            local_part(copy[name]).copy_(local_part(value), non_blocking=True)
