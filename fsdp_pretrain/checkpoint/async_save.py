"""Background checkpoints: the state is copied to host memory, and a thread writes the copy while training continues.

The thread runs the synchronous save over its own process group: collectives of two threads on one group would
interleave. At most one save is in flight.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.parallel.mesh import local_part

T = TypeVar("T")
_PAGE = 4096
"""Bytes: smaller copies are not pinned."""


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run a call in a daemon thread, which, unlike an executor's, does not keep a process alive when it hangs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # every error must reach the main thread
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint-writer", daemon=True).start()
    return future


class Stager:
    """Copies state into host memory, into the same buffers each time. They are pinned if the state is on a GPU.

    Used instead of DCP's `DefaultStager`, which in torch 2.11 frees its buffers after every copy and fails at the
    second. `device`: where the live state is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy: dict[str, Any] | None = None

    @torch.no_grad()
    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy nested dictionaries of tensors or DTensors; the copy is complete on return.

        Names, shapes and dtypes must be the same every time. Raises ConfigError if memory cannot be pinned.
        """
        gpu = self._device.type == "cuda"
        if self._copy is None:
            self._copy = _empty_copy(state, pinned=gpu)
        _fill(self._copy, state)
        if gpu:
            torch.cuda.current_stream(self._device).synchronize()
        return self._copy


def _empty_copy(state: Any, *, pinned: bool) -> Any:
    """A tree of uninitialized host tensors. DTensors keep mesh and placements, from which the layout is computed."""
    if isinstance(state, dict):
        return {name: _empty_copy(value, pinned=pinned) for name, value in state.items()}
    copy = torch.empty_like(local_part(state), device="cpu")
    if pinned and copy.nbytes >= _PAGE:
        _pin(copy)
    # `DTensor.from_local` would move it to the mesh's device.
    return DTensor(copy, state._spec, requires_grad=False) if isinstance(state, DTensor) else copy


def _pin(tensor: Tensor) -> None:
    """Pin a tensor's memory until it is freed. Raises ConfigError.

    `pin_memory=True` would round its size up to a power of two.
    """
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    try:
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, tensor.nbytes, 0)))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot pin host memory for a copy of the state: {error}",
            effect="checkpoints cannot be saved in the background",
            remedy="set checkpoint.background = false, or give the node more memory",
        ) from None
    weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address).atexit = False


def _fill(copy: dict[str, Any], state: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, dict):
            _fill(copy[name], value)
        else:
            local_part(copy[name]).copy_(local_part(value), non_blocking=True)
