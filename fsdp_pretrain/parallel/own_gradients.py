"""Checksums of a rank's own gradients, before they are summed over the ranks; backward passes to be repeated."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .replica_check import bit_sum


@contextmanager
def checksum(model: nn.Module, device: torch.device, *, compiled: bool) -> Iterator[Tensor]:
    """Add up the bits of this rank's gradients of the one forward and backward pass in the `with` block.

    FSDP gives modules their gathered parameters just before their forward passes; hooks on these see every gradient as
    it was computed, on any mesh. (FSDP's own hooks do not: there is no reduce-scatter with one shard, and its hook of
    the all-reduce comes after the sum.)

    Args:
        model: sharded.
        compiled: the blocks are compiled, and their graphs must not contain the hooks.

    Yields:
        int64 0-dim on the device, complete after the block, which does not wait for it.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    hooks, seen = [], set[int]()

    def add(factor: int, gradient: Tensor) -> None:
        total.add_(bit_sum(gradient), alpha=factor)

    def watch(module: nn.Module, args: object) -> None:
        del args
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor) and id(parameter) not in seen:  # recomputed blocks come twice
                seen.add(id(parameter))
                hooks.append(parameter.register_hook(partial(add, 2 * len(seen) - 1)))

    called = torch.compiler.disable(watch) if compiled else watch
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    hooks += [unit.register_forward_pre_hook(called) for unit in units]
    try:
        yield total
        assert len(seen) == len(list(model.parameters())), "a parameter was not gathered before its module's forward"
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def fixed_order() -> Iterator[None]:
    """Let kernels that add in any order, such as those of attention's backward pass, add in a fixed one if they can.

    What is compiled is compiled again inside, once: torch runs no graph with another setting than it was made with.
    """
    before = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that cannot: their gradients tell
        torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
