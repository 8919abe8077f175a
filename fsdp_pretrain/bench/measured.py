"""Measures in processes of their own, none of which inherits memory, caches or a failure from another."""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_pretrain.models.flops import Speed
from fsdp_pretrain.processes import NoAnswerError, run_module
from fsdp_pretrain.units import human_bytes, human_count

LIMIT = 900.0
"""Seconds after which a process is ended: a compilation and slow steps fit in."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps of one implementation on one mesh."""

    run: str
    side: str  # the implementation, `ours` or one of `peers.NETWORKS`
    torch: str
    dtype: str  # dtype of the matrix products
    compiled: bool
    parameters: int
    replicas: int
    shards: int
    steps: int
    speed: Speed  # speed by the wall-clock time of all timed steps, until the device has finished them
    memory: int  # bytes on the fullest rank: peak allocated on the GPU, or resident in a CPU process
    loss: float  # loss of the last step, in nats per target
    # median seconds of what the trainer records of a step, by part; None for other implementations
    parts: dict[str, float] | None
    fake: bool = False  # whether only one rank of the mesh existed, so that nothing went over a wire

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> MeasuredSteps:
        """Make it from the JSON values of a result."""
        return cls(**{**values, "speed": Speed(**values["speed"])})

    def __str__(self) -> str:
        """Speed and memory in one line."""
        speed = self.speed
        mfu = "unknown" if speed.mfu is None else f"{speed.mfu:.1%}"
        return (
            f"{speed.seconds_per_step:.4g}s a step, {human_count(speed.tokens_per_second_per_device)} tokens/s per "
            f"device, MFU {mfu}, {human_bytes(self.memory)}"
        )


@dataclass(frozen=True)
class Spread:
    """Repeated measurements: `1.83 [1.70 to 2.33]`."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.least:.3g} to {self.most:.3g}]"


def measure(command: Sequence[str], *, limit: float, ranks: int = 1) -> MeasuredSteps | str:
    """The result of `python -m fsdp_pretrain.bench COMMAND` on some ranks of this node, or why there is none."""
    # It is passed on here only, since torchrun sets it for ranks.
    threads = {name: value for name, value in os.environ.items() if name == "OMP_NUM_THREADS"}
    module = ["fsdp_pretrain.bench"]
    if ranks > 1:
        module = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", *module]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        try:
            done = run_module(*module, *command, "--result", str(result), environment=threads, limit=limit)
        except NoAnswerError:
            return f"not finished after {limit:g} seconds"
        if done.returncode or not result.exists():
            return reason(done.stderr.decode(errors="replace"))
        return MeasuredSteps.from_json(json.loads(result.read_text(encoding="utf-8")))


def reason(errors: str) -> str:
    """The line of an error output that says why a process failed; torchrun's report of it comes last."""
    lines = [line.strip() for line in errors.splitlines()]
    exception = r"(\[rank\d+\]: ?)?(?!torch\.distributed\.elastic)[\w.]+(Error|Exception|Unsupported)\b"
    messages = [line for line in lines if line.startswith("error:") or re.match(exception, line)]
    killed = [line for line in lines if "Signal " in line]
    return (messages or killed or ["it ended without a message"])[-1][:200]
