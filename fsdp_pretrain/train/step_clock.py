"""Step timing: taken while a step is issued, read once it is complete, without waiting for the device."""

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
from .straggler_timing import OwnTime


@dataclass(frozen=True)
class StepTimes:
    """Timing of one step.

    Attributes:
        before, forward, update, updated, end: marks: end of the previous step, start of the forward passes, start and
            end of the update, end of the step.
        own: argument of `OwnTime.add`.
        data, checkpoint: seconds that the host waited for data and for saves.
        paused: seconds that the ranks were held before `before`.
    """

    before: Any
    forward: Any
    update: Any
    updated: Any
    end: Any
    own: list[Any] | None
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
        model: sharded; see `OwnTime`.
        device: where it computes.
        heartbeat: receives the phases.
        compiled: whether the blocks are.
    """

    def __init__(self, model: Decoder, device: torch.device, heartbeat: Heartbeat, *, compiled: bool) -> None:
        self._device, self._heartbeat = device, heartbeat
        self._own = OwnTime(model, device, heartbeat, compiled=compiled)
        self._data = self._stalled = self._paused = 0.0
        self._marks = [mark(device)]
        self._own_marks: list[Any] | None = None

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """A step starts: the host waits for its data."""
        self._heartbeat.step(step)
        start = time.perf_counter()
        yield
        self._data = time.perf_counter() - start

    def begin_forward(self) -> None:
        self._marks.append(mark(self._device))
        self._own.begin()

    def begin_update(self) -> None:
        """The step's gradients are complete: the update starts."""
        self._marks.append(mark(self._device))
        self._heartbeat.beat(Phase.OPTIMIZER)

    def end_update(self) -> None:
        """The update ends."""
        self._marks.append(mark(self._device))
        self._own_marks = self._own.end()

    def stalled(self, seconds: float) -> None:
        """The host waited for a save, before the step that comes next."""
        self._stalled += seconds

    def end_step(self, *, measured: bool) -> StepTimes:
        """The step ends. `measured`: the held-out loss was, since the end of the update."""
        before, forward, update, updated = self._marks
        end = mark(self._device) if measured else updated
        self._marks = [end]
        times = StepTimes(
            before, forward, update, updated, end, self._own_marks, self._data, self._stalled, self._paused
        )
        self._stalled = self._paused = 0.0
        return times

    def resume_after(self, paused: float) -> None:
        """The next iteration starts now, after a pause of so many seconds, in which nothing waited for a save."""
        self._paused, self._stalled = self._paused + paused, 0.0
        self._marks = [mark(self._device)]

    def finish(self, times: StepTimes) -> None:
        """The device has finished a step."""
        self._own.add(times.own, times.data)
