"""Timing of steps: marks set while a step is issued, and read once it is complete, without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_pretrain.heartbeat import Heartbeat, Phase
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.run.step_record import StepSeconds

from .device_timing import between, mark
from .straggler_timing import ComputeTime


@dataclass(frozen=True)
class StepTimes:
    """Timing of one step.

    Attributes:
        before, forward, update, updated, end: marks of `device_timing.mark`: end of the previous step, start of the
            forward passes, start and end of the update, end of the step.
        compute: argument of `ComputeTime.add`.
        data, checkpoint: seconds that the host waited for data and for saves.
        paused: seconds of a pause, which ended at `before`.
    """

    before: Any
    forward: Any
    update: Any
    updated: Any
    end: Any
    compute: list[Any] | None
    data: float
    checkpoint: float
    paused: float

    def seconds(self) -> StepSeconds:
        """Parts of the iteration, which runs from the end of the previous step to the end of this one."""
        gap = between(self.before, self.forward)
        checkpoint = min(self.checkpoint, gap)
        data = min(self.data, gap - checkpoint)
        return StepSeconds(
            iteration=between(self.before, self.end),
            data=data,
            forward_backward=between(self.forward, self.update),
            optimizer=between(self.update, self.updated),
            heldout=between(self.updated, self.end) if self.end is not self.updated else 0.0,
            checkpoint=checkpoint,
            other=gap - checkpoint - data,
            paused=self.paused,
        )


class StepClock:
    """Times the step that is being issued, and reports its phases to the watchdog.

    Args:
        model: sharded; see `ComputeTime`.
        heartbeat: receives the phases.
        compiled: whether the blocks of the model are compiled.
    """

    def __init__(self, model: Decoder, device: torch.device, heartbeat: Heartbeat, *, compiled: bool) -> None:
        self._device, self._heartbeat = device, heartbeat
        self._compute = ComputeTime(model, device, heartbeat, compiled=compiled)
        self._data = 0.0  # seconds of waits, see `StepTimes`
        self._stalled = 0.0
        self._paused = 0.0
        self._marks = [mark(device)]
        self._compute_marks: list[Any] | None = None

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Start a step, and time how long the host waits for its data inside."""
        self._heartbeat.step(step)
        start = time.perf_counter()
        yield
        self._data = time.perf_counter() - start

    def begin_forward(self) -> None:
        """Mark that the forward passes start."""
        self._marks.append(mark(self._device))
        self._compute.begin()

    def begin_update(self) -> None:
        """Mark that the step's gradients are complete and the update starts."""
        self._marks.append(mark(self._device))
        self._heartbeat.beat(Phase.OPTIMIZER)

    def end_update(self) -> None:
        """Mark that the update ends."""
        self._marks.append(mark(self._device))
        self._compute_marks = self._compute.end()

    def stalled(self, seconds: float) -> None:
        """Add seconds that the host waited for a save before the next step."""
        self._stalled += seconds

    def end_step(self, *, measured: bool) -> StepTimes:
        """End the step and return its times. `measured`: the held-out loss was measured after the update."""
        before, forward, update, updated = self._marks
        end = mark(self._device) if measured else updated
        self._marks = [end]
        times = StepTimes(
            before, forward, update, updated, end, self._compute_marks, self._data, self._stalled, self._paused
        )
        self._stalled = self._paused = 0.0
        return times

    def resume_after(self, paused: float) -> None:
        """Start the next iteration now, after a pause of `paused` seconds; waits for saves before it do not count."""
        self._paused, self._stalled = self._paused + paused, 0.0
        self._marks = [mark(self._device)]

    def finish(self, times: StepTimes) -> None:
        """Read the compute time of a step that the device has finished."""
        self._compute.add(times.compute, times.data)
