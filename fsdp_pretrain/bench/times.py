"""What benchmarks measure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_pretrain.models.flops import Speed
from fsdp_pretrain.units import human_bytes, human_count


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps of one implementation on one mesh.

    Attributes:
        side: which implementation, see `peers.SIDES`.
        dtype: of matrix products.
        speed: from the wall-clock time of all timed steps, until the device has finished them.
        memory: bytes on the fullest rank: peak allocated on the GPU, or resident in a CPU process.
        loss: of the last step, in nats per target.
        parts: median seconds of what the trainer records of a step, by part; None for other implementations.
    """

    run: str
    side: str
    torch: str
    dtype: str
    compiled: bool
    parameters: int
    replicas: int
    shards: int
    steps: int
    speed: Speed
    memory: int
    loss: float
    parts: dict[str, float] | None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> MeasuredSteps:
        """From the JSON values of a result."""
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
