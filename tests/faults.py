"""Faults that a test injects into chosen ranks, without a hook in the program.

The variable `EXECUTE_FIRST` names this file (see `zygote.py`), or torchrun gets it as the script in place of the
trainer. `FAULT` is JSON: `{"rank": 1, "step": 30, "kind": "hold"}`, or a list of such. Before the step (0: before
training starts) the rank executes the kind, with `on` before all later steps too, up to `until`; see `KINDS`.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

_NOW = [0]
"""The current step of this rank."""
_ENDED = [0.0]
"""End of the last step that had to wait."""
_TRAINER: list[Any] = []
"""The trainer of this rank, once it has begun a step."""
_HIT: dict[str, int] = {}
"""Kind of a numeric fault -> the last step with it."""


def hold(fault: dict[str, Any]) -> None:
    """Wait forever in C with the interpreter lock held: no other thread of the rank runs, no signal wakes it."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def doze(fault: dict[str, Any]) -> None:
    """Sleep in Python, like code that waits for something."""
    time.sleep(fault.get("seconds", 600))


def wait(fault: dict[str, Any]) -> None:
    """Make every step take `seconds`, from `from` to `until` if given, as if a device were busy: hides the
    machine's noise in shorter steps."""
    from fsdp_pretrain.parallel.optimizer import Optimizer

    update = Optimizer.step

    def slow(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        if fault.get("from", 0) <= _NOW[0] < fault.get("until", 10**9):
            time.sleep(max(0.0, _ENDED[0] + fault["seconds"] - time.monotonic()))
            _ENDED[0] = time.monotonic()

    Optimizer.step = slow  # type: ignore[method-assign]


def await_file(fault: dict[str, Any]) -> None:
    """Wait until the file `path` exists, so that the test acts on the run before the following steps."""
    while not os.path.exists(fault["path"]):  # noqa: PTH110
        time.sleep(0.01)


def desync(fault: dict[str, Any]) -> None:
    """Call a collective that no other rank calls."""
    import torch.distributed as dist

    dist.barrier()


def die(fault: dict[str, Any]) -> None:
    os.kill(os.getpid(), fault.get("signal", signal.SIGKILL))


def fail(fault: dict[str, Any]) -> None:
    raise MemoryError("of this rank alone")


def drag(fault: dict[str, Any]) -> None:
    """Make every block's forward pass `seconds` slower, from `from` to `until` if given."""
    from fsdp_pretrain.models.llama import LlamaBlock

    forward = LlamaBlock.forward

    def slow(self: LlamaBlock, *args: Any) -> Any:
        if fault.get("from", 0) <= _NOW[0] < fault.get("until", 10**9):
            time.sleep(fault["seconds"])
        return forward(self, *args)

    LlamaBlock.forward = slow  # type: ignore[method-assign]


def rewind(fault: dict[str, Any]) -> None:
    """Read the data from the start again."""
    from fsdp_pretrain.data.packing.loader import Loader
    from fsdp_pretrain.data.packing.position import Position

    build, first = Loader.build, [True]

    def rewound(self: Loader, before: Position) -> Any:
        begin, first[0] = replace(before, cursor=0) if first[0] else before, False
        return build(self, begin)

    Loader.build = rewound  # type: ignore[method-assign]


def trust(fault: dict[str, Any]) -> None:
    """Assume that documents hold no special tokens."""
    from fsdp_pretrain.data.packing.packer import Packer

    Packer._clean = lambda *_: True  # type: ignore[method-assign]


def gradient(fault: dict[str, Any]) -> None:
    """Make a gradient of the step NaN."""
    from fsdp_pretrain.parallel import optimizer

    norm_really = optimizer.local_norm

    def local_norm(model: Any) -> Any:
        local = (parameter.grad.to_local() for parameter in model.parameters())
        if _HIT["gradient"] == _NOW[0]:
            next(part for part in local if part.numel()).view(-1)[0] = float("nan")
        return norm_really(model)

    if "gradient" not in _HIT:
        optimizer.local_norm = local_norm
    _HIT["gradient"] = _NOW[0]


def loss(fault: dict[str, Any]) -> None:
    """Make the losses of the step NaN, by a constant: the gradients stay finite."""
    from fsdp_pretrain.models import forward

    losses_really = forward.losses

    def losses(*args: Any, **kwargs: Any) -> Any:
        measured = losses_really(*args, **kwargs)
        return measured._replace(losses=measured.losses + float("nan")) if _HIT["loss"] == _NOW[0] else measured

    if "loss" not in _HIT:
        forward.losses = losses
    _HIT["loss"] = _NOW[0]


def nudge(fault: dict[str, Any]) -> None:
    """Change one parameter."""
    next(_TRAINER[0].model.parameters()).data.to_local().view(-1)[3] += 1e-3


def repeat(fault: dict[str, Any]) -> None:
    """Read the last batch again."""
    from fsdp_pretrain.train.batch_reader import BatchReader

    read_really = BatchReader.read

    def read(self: BatchReader, before: Any) -> Any:
        BatchReader.read = read_really  # type: ignore[method-assign]
        return self.stream.build(replace(before, cursor=before.cursor - _TRAINER[0].state.batch))  # type: ignore[attr-defined]

    BatchReader.read = read  # type: ignore[method-assign]


NUMERIC = (gradient, loss, nudge, repeat)
KINDS: dict[str, Callable[[dict[str, Any]], None]] = {
    function.__name__: function
    for function in (hold, doze, wait, await_file, desync, die, fail, drag, rewind, trust, *NUMERIC)
}


def arm(faults: list[dict[str, Any]]) -> None:
    """Install the faults of this rank in its loop."""
    mine = [fault for fault in faults if fault["rank"] in (int(os.environ.get("RANK", "0")), "all")]
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    mine = [fault for fault in mine if fault.get("attempt", attempt) == attempt]
    if not mine:
        return
    from fsdp_pretrain.train.trainer import Trainer

    for fault in mine:
        if fault["step"] == 0:  # from the first step on
            KINDS[fault["kind"]](fault)
    step = Trainer.step

    def faulty(self: Trainer) -> None:
        number = _NOW[0] = self.state.step + 1
        _TRAINER[:] = [self]
        for fault in mine:
            on = fault.get("on") and fault["step"] < number < fault.get("until", 10**9)
            if number == fault["step"] or on:
                KINDS[fault["kind"]](fault)
        step(self)

    Trainer.step = faulty  # type: ignore[method-assign]


if "FAULT" in os.environ and "RANK" in os.environ:
    content = json.loads(os.environ["FAULT"])
    arm(content if isinstance(content, list) else [content])
if __name__ == "__main__":
    sys.argv = ["-m", *sys.argv[1:]]
    runpy.run_module("fsdp_pretrain.train", run_name="__main__")
