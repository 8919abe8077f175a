"""Runs training steps. It receives everything it needs and builds nothing.

No step waits for the device: what a step measured (loss, norm, counts, requests) is summed over the ranks on the
device, copied to the host asynchronously and read `LAG` steps later. Every rank reads the same sums after the same
step, so decisions based on them need no further communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.schedule import StepValues
from fsdp_pretrain.data.packing.loader import StepBatch
from fsdp_pretrain.heartbeat import Heartbeat, Phase
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel import fsdp, replica_check
from fsdp_pretrain.parallel import optimizer as optim
from fsdp_pretrain.parallel.loss_scaler import LossScaler
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.run.step_record import StepRecord

from .batch_reader import BatchReader, DataStream
from .device_timing import EnergyCounter, to_host
from .ledger import IssuedStep, Ledger
from .observer import Observer
from .step_clock import StepClock
from .step_metrics import StepCounts
from .update import Update


class Trainer:
    """Issues optimiser steps, and reads what they measured.

    Args:
        model, optimizer: sharded, with their values.
        scaler: loss scaler, for fp16.
        data: this rank's batches, from `state` on.
        state: counters to continue from.
        recorder: receives notices about the data.
        heartbeat: receives the phases.
        observers: take part in every step, in this order.

    Attributes:
        config: the configuration, with all changes up to now.
        state: counters after the last step that was issued.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        *,
        model: Decoder,
        optimizer: optim.Optimizer,
        scaler: LossScaler | None,
        data: DataStream,
        state: TrainState,
        recorder: Recorder,
        heartbeat: Heartbeat,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.config, self.world = config, world
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.state, self.recorder, self.heartbeat = state, recorder, heartbeat
        self.observers = tuple(observers)
        self._batches = BatchReader(data, config, world, recorder)
        self._update = Update(config, world, model, optimizer, scaler, self._before_micro_batch)
        self._ledger = Ledger(config, world, model.count_parameters(), scaled=scaler is not None)
        self._compiled = fsdp.compiles(config, world.device)
        self.clock = StepClock(model, world.device, heartbeat, compiled=self._compiled)
        self._first_step = state.step
        self._energy = EnergyCounter(world.device)
        self._compiled_widths = set[int]()

    def start(self) -> None:
        """Prepare model and observers for the first step."""
        self.model.train()
        for observer in self.observers:
            observer.start()

    def reconfigure(self, config: Config) -> None:
        """Continue with a configuration in which only the timeline differs."""
        self.config = config
        for observer in self.observers:
            observer.reconfigured(config)

    def step(self) -> None:
        """Issue one optimiser step: read a batch, run its micro-batches, reduce, clip, decide, apply."""
        for observer in self.observers:
            observer.before_step(self.state.step + 1)
        with self.clock.reading(self.state.step + 1):
            batch = self._batches.read(self.state)
        for observer in self.observers:
            observer.batch_read(batch)
        state = TrainState.at(batch.position)
        values = self.config.schedule.values_at(state.consumed)
        counts = self._sum_counts(batch)
        self.clock.begin_forward()
        sums = self._update.backward(batch, counts, values)
        self.clock.begin_update()
        self.heartbeat.beat(Phase.REDUCE)
        gradients = self._update.reduce(sums, values, len(batch.micro))
        for observer in self.observers:
            observer.before_update(state, gradients.scale)
        self._update.apply(gradients, values)
        updated = [(observer, observer.after_update()) for observer in self.observers]
        self.clock.end_update()
        ended = [(observer, observer.after_step(state)) for observer in self.observers]
        times = self.clock.end_step(measured=any(tensor is not None for _, tensor in ended))
        measured = [(observer, tensor) for observer, tensor in (*updated, *ended) if tensor is not None]
        self._issue(IssuedStep(state, values, times, self._facts(batch, values), counts, sums.packed, measured))

    def _issue(self, issued: IssuedStep) -> None:
        """Start copying the step's metrics to the host, and enter it in the ledger."""
        observers = [observer for observer, _ in issued.measured]
        tensors = [tensor for _, tensor in issued.measured]
        (counts, sums, *tensors), ready = to_host(self.world.device, issued.counts, issued.sums, *tensors)
        measured = list(zip(observers, tensors, strict=True))
        self._ledger.enter(replace(issued, counts=counts, sums=sums, measured=measured, ready=ready))
        self.state = issued.state

    def read(self, *, keep: int) -> Iterator[tuple[StepCounts, StepRecord]]:
        """Wait for issued steps, oldest first, until only `keep` are in flight; yields counts and record of each.
        Raises DataError, on every rank, if a rank could not read its data or too many documents failed the packer's
        checks."""
        while len(self._ledger) > keep:
            issued = self._ledger.settle()
            counts = StepCounts.read(issued.counts)
            if counts.without_data:
                self._batches.raise_read_error()
            self.clock.finish(issued.times)
            record = self._ledger.record(issued)
            yield counts, record
            self._batches.check(record)

    def is_finite(self, batch: StepBatch) -> bool:
        """Whether a batch gives finite losses and gradients on all ranks. Changes no parameter. Collective."""
        counts = StepCounts.of(batch).sum_over(self.world)
        values = self.config.schedule.values_at(batch.position.consumed)
        sums = self._update.backward(batch, counts, values)
        self.heartbeat.beat(Phase.REDUCE)
        return not self._update.reduce(sums, values, len(batch.micro)).skip.item()

    def last_step(self) -> int:
        """Number of the run's last step, as planned from here."""
        return self.config.schedule.last_step(self.state.step, self.state.consumed)

    def _before_micro_batch(self, width: int) -> None:
        """Report the phase: the first pass over samples of a width may compile for minutes, which is not a hang."""
        compiles = self._compiled and bool(self.config.data.stages) and width not in self._compiled_widths
        self._compiled_widths.add(width)
        self.heartbeat.beat(Phase.LOAD if compiles else Phase.COMPUTE)

    def _sum_counts(self, batch: StepBatch) -> Tensor:
        """Packed `StepCounts` of all ranks, on the device; periodically with checksums of the parameters."""
        energy = self._energy.take()
        requests: dict[str, Any] = Counter(millijoules=energy or 0, metered=energy is not None)
        for observer in self.observers:
            requests.update(observer.requests())
        counts = replace(StepCounts.of(batch), without_data=int(self._batches.failed), **requests)
        # Twice, two steps apart: this also shows parameters that no step changes.
        due = (self.state.step - self._first_step) % replica_check.COMPARE_EVERY in (0, 2)
        return counts.sum_over(self.world, replica_check.checksums(self.model, self.world) if due else None)

    def _facts(self, batch: StepBatch, values: StepValues) -> dict[str, Any]:
        """Facts for the record that need no sum over the ranks: `IssuedStep.data`."""
        beside = [name for observer in self.observers for name in observer.beside(batch.position.step)]
        facts = {"data_read": asdict(batch.reads), "data_distance": batch.distance, "beside": beside}
        ramps = {"shares": batch.shares, **self.config.schedule.steered(values)}
        return {"ramps": ramps, "epochs": batch.epochs, **facts}
