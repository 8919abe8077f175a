"""Background checkpoints: the state is copied to host memory, and a thread writes the copy while training continues.

The thread runs the synchronous save over its own process group: collectives of two threads on one group would
interleave. At most one save is in flight.
"""

from __future__ import annotations

import mmap
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.parallel.mesh import local_part
from fsdp_pretrain.units import human_bytes

T = TypeVar("T")
_PAGE = mmap.PAGESIZE
_ALIGNMENT = 64
"""Bytes: the start of every tensor in the arena is a multiple of this."""


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

    All are in one piece of memory, which is registered with CUDA at once: neighbours that were registered one by one
    would share pages. If it cannot be registered, a warning says so, and copies are slower.

    Used instead of DCP's `DefaultStager`, which in torch 2.11 frees its buffers after every copy and fails at the
    second. `device`: where the live state is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy: dict[str, Any] | None = None

    @torch.no_grad()
    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy nested dictionaries of tensors or DTensors; the copy is complete on return.

        Names, shapes and dtypes must be the same every time. Raises ConfigError if there is too little memory.
        """
        gpu = self._device.type == "cuda"
        if self._copy is None:
            self._copy = _empty_copy(state, _Arena(_bytes_needed(state), pinned=gpu))
        _fill(self._copy, state)
        if gpu:
            torch.cuda.current_stream(self._device).synchronize()
        return self._copy


class _Arena:
    """Page-aligned host memory of `size` bytes, given away piece by piece, and freed with the last piece."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        pages = -(-size // _PAGE) * _PAGE
        try:
            self._memory = np.empty(pages + _PAGE, dtype=np.uint8)
        except MemoryError:
            raise ConfigError(
                f"no host memory for a copy of the state, {human_bytes(size)}",
                effect="checkpoints cannot be saved in the background",
                remedy="set checkpoint.background = false, or give the node more memory",
            ) from None
        address = self._memory.ctypes.data
        self._used = -address % _PAGE
        if pinned:
            _pin(self._memory, address + self._used, pages)

    def take(self, like: Tensor) -> Tensor:
        """A contiguous tensor of the same shape and dtype, without values, with a storage of its own."""
        if not like.numel():  # which `frombuffer` refuses
            return torch.empty_like(like, device="cpu")
        piece = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=self._used)
        self._used += _rounded(like.nbytes)
        return piece.view(like.shape)


def _pin(memory: np.ndarray[Any, Any], address: int, size: int) -> None:
    """Pin a range of `memory` until it is freed, or warn.

    `pin_memory=True` would round its size up to a power of two.
    """
    runtime = torch.cuda.cudart()
    try:
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, size, 0)))
    except RuntimeError as error:
        warnings.warn(
            f"{human_bytes(size)} of host memory cannot be pinned, so copying the state for a save takes longer: "
            f"{error}. Is `ulimit -l` or the container's limit of memory too low?",
            stacklevel=2,
        )
        with suppress(RuntimeError):  # the next kernel reports the failure once more: not one of training
            torch.zeros(1, device="cuda").add_(1)
        return
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _bytes_needed(state: Any) -> int:
    if isinstance(state, dict):
        return sum(map(_bytes_needed, state.values()))
    return _rounded(local_part(state).nbytes)


def _empty_copy(state: Any, arena: _Arena) -> Any:
    """A tree of uninitialized host tensors. DTensors keep mesh and placements, from which the layout is computed."""
    if isinstance(state, dict):
        return {name: _empty_copy(value, arena) for name, value in state.items()}
    copy = arena.take(local_part(state))
    # `DTensor.from_local` would move it to the mesh's device.
    return DTensor(copy, state._spec, requires_grad=False) if isinstance(state, DTensor) else copy


def _fill(copy: dict[str, Any], state: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, dict):
            _fill(copy[name], value)
        else:
            local_part(copy[name]).copy_(local_part(value), non_blocking=True)
