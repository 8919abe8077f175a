"""The training loop. It receives everything it needs and builds nothing.

No step waits for the device: what a step measured (loss, norm, counts, requests) is summed over the ranks on the
device, copied to the host asynchronously and read `LAG` steps later. Every rank reads the same sums after the same
step, so decisions based on them need no further communication.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from data.packing.loader import StepBatch
from data.packing.position import Position
from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.schedule import StepValues
from fsdp_pretrain.errors import DataError, Exit, UserError
from fsdp_pretrain.health import limits
from fsdp_pretrain.health.journal import Provenance, record_findings
from fsdp_pretrain.health.monitor import Health, RollbackRequest
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel import fsdp, replica_check
from fsdp_pretrain.parallel import optimizer as optim
from fsdp_pretrain.record.requests import Request, Requests
from fsdp_pretrain.watchdog.heartbeat.page import Phase

from .batch_reader import BatchReader, DataStream
from .checkpointing import Checkpointing
from .device_timing import to_host
from .garbage import collect_garbage, collection_at_steps
from .group_statistics import GroupStatistics
from .heldout_loss import HeldOutLoss
from .live_control import Decided, LiveControl
from .passes import Passes
from .profiling import StepProfiler
from .run_context import RunContext
from .step_clock import StepClock
from .step_metrics import IssuedStep, StepRecords
from .step_sums import StepCounts

LAG = 2
"""Steps between issuing a step and reading its metrics on the host."""

Reread = Callable[[Position], StepBatch]
"""The position before a batch -> this rank's share of it."""


@dataclass
class AgreedActions:
    """What the ranks agreed on, from the sums of the steps collected since the last actions."""

    stop: bool = False
    save: bool = False
    profile: bool = False
    steer: bool = False
    saved: int = 0
    overdue: bool = False
    rollback: RollbackRequest | None = None

    def add(self, counts: StepCounts) -> None:
        """What the sums of one more step say."""
        for name in ("stop", "save", "profile", "steer", "overdue"):
            setattr(self, name, getattr(self, name) or getattr(counts, name) > 0)
        self.saved = max(self.saved, counts.saved)


class Trainer:
    """Runs steps until the run is complete or asked to stop.

    Args:
        run: shared context of the start.
        model, optimizer: sharded, with their values.
        scaler: loss scaler, for fp16.
        data: this rank's batches, from `state` on.
        saves: makes checkpoints.
        state: counters to continue from.
        health: judges the steps.
        provenance: names the documents of a batch, for the journal.
        reread: rebuilds a batch, while `data` may be prefetching others.
        heldout: measures the held-out loss.
        guard: raises UserError if this job may not write into the run directory any more.
        on_set: called on every rank with the configuration after `control set`.

    Attributes:
        context: as given.
        rollback: the requested rollback, if the run ended for one.
    """

    def __init__(
        self,
        run: RunContext,
        *,
        model: Decoder,
        optimizer: optim.AdamW,
        scaler: optim.LossScaler | None,
        data: DataStream,
        saves: Checkpointing,
        state: TrainState,
        health: Health,
        provenance: Provenance | None = None,
        reread: Reread | None = None,
        heldout: HeldOutLoss | None = None,
        guard: Callable[[], None] = lambda: None,
        on_set: Callable[[Config], None] = lambda config: None,
    ) -> None:
        config, world = run.config, run.world
        self.context, self.config, self.schedule, self.world = run, config, config.schedule, world
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.batches = BatchReader(data, config, world, run.recorder)
        self.saves, self.state, self.recorder, self._heartbeat = saves, state, run.recorder, run.heartbeat
        self._statistics = GroupStatistics(model, optimizer, config, world)
        parameters, scaled = model.count_parameters(), scaler is not None
        self._records = StepRecords(config, world, parameters, self._statistics, scaled=scaled)
        compiled = fsdp.compiles(config, world.device)
        self._clock = StepClock(model, world.device, run.heartbeat, compiled=compiled)
        self._profiler = StepProfiler(run)
        self._health, self._provenance, self._reread, self._heldout = health, provenance, reread, heldout
        self._control, self._on_set = LiveControl(run, guard), on_set
        self.rollback: RollbackRequest | None = None
        self._first = state.step
        self._issued: deque[IssuedStep] = deque()
        self._agreed = AgreedActions()
        self._passes = Passes(config, world, model, scaler, run.heartbeat, compiled=compiled)

    # ------------------------------------------------------------------ the loop

    def run(self) -> Exit:
        """Train to the end of the schedule, or until asked to stop; the reason to exit with.

        Raises:
            UserError: training cannot continue; the same on every rank if it concerns all.
        """
        try:
            with collection_at_steps():
                return self._run()
        except UserError as error:
            if error.shared:
                self.saves.abandon()
            raise
        finally:
            self._profiler.close()

    def _run(self) -> Exit:
        self.model.train()
        if self._heldout is not None:
            self._heldout.compile(self.model)
        outcome = Exit.COMPLETE
        while self.state.consumed < self.schedule.total:
            self._profiler.begin_step(self.state.step + 1)
            self.step()
            self._profiler.end_step(self.state.step)
            self.collect(keep=LAG)
            collect_garbage(self.state.step)
            agreed, self._agreed = self._agreed, AgreedActions()
            if agreed.rollback is not None:
                return self._end_for(agreed.rollback)
            if agreed.profile:
                self._profiler.agree(self.state.step)
            if agreed.overdue:
                self.saves.refuse_to_go_on()
            if self.saves.all_ended(agreed.saved):
                self._heartbeat.beat(Phase.SAVE)
                self.saves.finish()
            if agreed.save or agreed.stop:
                self._control.acknowledge(self.state.step)
            if self._save_due() or agreed.save:
                self.checkpoint()
            if agreed.stop or (agreed.steer and self._steer()):
                outcome = Exit.RESUME
                break
        self._profiler.finish(self.state.step)
        self.collect(keep=0)
        if self._agreed.rollback is not None:
            return self._end_for(self._agreed.rollback)
        self._control.acknowledge(self.state.step)
        if self.state.consumed >= self.schedule.total:
            outcome = Exit.COMPLETE
        self._heartbeat.beat(Phase.SAVE)
        self.saves.finish()
        if self.saves.saved_step != self.state.step:
            self.checkpoint(final=outcome is Exit.COMPLETE, must_succeed=True)
        return outcome

    def _steer(self) -> bool:
        """Do what operators asked for, before the next step; whether to stop."""
        pause = self._decide().pause
        if pause is None:
            return False
        start = time.perf_counter()
        self.collect(keep=0)
        if self._agreed.rollback is not None:
            self._control.refuse(pause, self.state.step, "the run goes back to an earlier step")
            return False
        self._heartbeat.beat(Phase.SAVE)
        self.saves.finish()
        stop = self._control.hold(pause, self.state.step, self._look_while_held, self._act_while_held)
        seconds = time.perf_counter() - start
        self.saves.exclude_pause(seconds)
        self._clock.go_on(seconds)
        return stop

    def _decide(self, *, held: bool = False) -> Decided:
        """Decide on what operators asked for, and go on with what was set."""
        decided = self._control.decide(self.state, held=held)
        if decided.entries:
            self.config = config = self._control.config
            self.schedule = config.schedule
            self._health.steer(config)
            self._on_set(config)
        return decided

    def _look_while_held(self) -> Requests:
        asked, (_, retry, _) = self.context.inbox.take(), self.saves.signals()
        self._profiler.ask(asked.profile)
        return replace(asked, save=asked.save or retry)

    def _act_while_held(self, asked: Requests) -> Request | None:
        if asked.save:
            self._control.acknowledge(self.state.step)
            if self.saves.saved_step != self.state.step:
                self.checkpoint()
                self.saves.finish()
        return self._decide(held=True).resume if asked.steer else None

    def _end_for(self, rollback: RollbackRequest) -> Exit:
        """End without saving: the steps since the incident are discarded."""
        self.saves.abandon()
        self.rollback = replace(rollback, repeats=self._is_reproducible(rollback))
        return Exit.RESUME

    def _is_reproducible(self, rollback: RollbackRequest) -> bool | None:
        """Whether the last non-finite step is so again when repeated from its batch; None if that cannot be determined.

        Collective; changes no parameter. The parameters are the same except for steps that were in flight, so a cause
        in the data or the state shows again; a device fault does not.
        """
        before, reread = rollback.before, self._reread
        if before is None or reread is None:
            return None
        try:
            batch = self.world.together(lambda: reread(before))
        except DataError:
            return None
        counts = StepCounts.of(batch).sum_over(self.world)
        sums = self._passes.run(batch, counts, self.schedule.values_at(batch.position.consumed))
        self._heartbeat.beat(Phase.REDUCE)
        sums.sum_over(self.world, optim.local_norm(self.model))
        return bool(sums.not_finite().item())

    def step(self) -> None:
        """Issue one optimiser step: read a batch, run its micro-batches, reduce, clip, decide, apply."""
        with self._clock.reading(self.state.step + 1):
            batch = self.batches.read(self.state)
        state = TrainState.at(batch.position)
        values = self.schedule.values_at(state.consumed)
        counts = self._sum_counts(batch)
        measures = self._statistics.due(state)
        self._clock.begin_forward()
        sums = self._passes.run(batch, counts, values)
        self._clock.begin_update()
        norm = optim.local_norm(self.model)
        self._heartbeat.beat(Phase.REDUCE)
        sums.sum_over(self.world, norm)
        scale = None if self.scaler is None else self.scaler.scale
        too_large = None if scale is None else scale * len(batch.micro)
        norm, divisor = optim.clip(sums.total_norm(self.world), values.grad_clip, too_large)
        skip = sums.not_finite()
        sums.add_update(norm, scale, skip)
        gradients = self._statistics.of_gradients(too_large) if measures else None
        self.optimizer.step(
            lr=values.lr, weight_decay=values.weight_decay, betas=values.betas, divisor=divisor, skip=skip
        )
        groups = None if gradients is None else self._statistics.after_update(gradients)
        if self.scaler is not None:
            self.scaler.advance(skip)
        self._clock.end_update()
        heldout = self._measure_heldout(state)
        times = self._clock.end_step(self.saves.take_stalled(), measured=heldout is not None)
        measured = to_host(self.world.device, counts, sums.packed, heldout, groups)
        self._issued.append(IssuedStep(state, values, times, self._facts(batch, values), *measured))
        self.state = state

    def _measure_heldout(self, state: TrainState) -> Tensor | None:
        """See `HeldOutLoss.measure`; None unless it is due after the step that led to `state`."""
        if self._heldout is None or not self._heldout.due(state):
            return None
        return self._heldout.measure(self.model, lambda: self._heartbeat.beat(Phase.COMPUTE))

    def _sum_counts(self, batch: StepBatch) -> Tensor:
        """Packed `StepCounts` of all ranks, on the device; periodically with checksums of the parameters."""
        asked = self.context.inbox.take()
        saved, retry, overdue = self.saves.signals()
        counts = replace(
            StepCounts.of(batch),
            stop=asked.stop,
            save=asked.save or retry,
            profile=self._profiler.ask(asked.profile),
            steer=asked.steer,
            without_data=self.batches.failed,
            saved=saved,
            overdue=overdue,
        )
        # Two steps apart, so that parameters that do not change are noticed too.
        due = (self.state.step - self._first) % limits.COMPARE_EVERY in (0, 2)
        return counts.sum_over(self.world, replica_check.checksums(self.model, self.world) if due else None)

    def _facts(self, batch: StepBatch, values: StepValues) -> dict[str, Any]:
        """Facts about a batch, its steered values and what runs beside it that need no sum."""
        profiled = self._profiler.beside(batch.position.step)
        beside = [*(["save"] if self.saves.in_flight else []), *profiled, *self.context.beside()]
        facts = {"data_read": asdict(batch.reads), "data_distance": batch.distance, "beside": beside}
        ramps = {"shares": batch.shares, **self.schedule.steered(values)}
        return {"ramps": ramps, "epochs": batch.epochs, **facts}

    # ------------------------------------------------------------------ what steps measured

    def collect(self, *, keep: int) -> None:
        """Read the metrics of issued steps until `keep` are outstanding; record them, update the agreed actions.

        Raises:
            NumericError: loss or gradients were not finite, on every rank.
            DataError: a rank could not read its data, or too many documents failed the packer's checks, on every rank.
        """
        while len(self._issued) > keep:
            issued = self._issued.popleft()
            if issued.ready is not None:
                issued.ready.synchronize()
            counts = StepCounts.read(issued.counts)
            if counts.without_data:
                self.batches.refuse_to_go_on()
            self._agreed.add(counts)
            self._clock.finish(issued.times)
            record = self._records.of(issued)
            judgement = self._health.step(record)
            self.recorder.step(record.model_copy(update={"health": judgement.findings}), target=self._target_step())
            record_findings(self.recorder, record, judgement, self._provenance)
            self._agreed.rollback = self._agreed.rollback or judgement.rollback
            if judgement.error is not None:
                raise judgement.error
            self.batches.check(record)

    def _target_step(self) -> int:
        """Number of the last step, as planned from here."""
        return (
            self.state.step
            + self.schedule.batch.step_at(self.schedule.total)
            - self.schedule.batch.step_at(self.state.consumed)
        )

    # ------------------------------------------------------------------ checkpoints

    def _save_due(self) -> bool:
        state = self.state
        due = self.schedule.due(
            self.schedule.save_every(state.consumed),
            step=state.step,
            before=state.consumed - state.batch,
            after=state.consumed,
        )
        return due and state.consumed < self.schedule.total  # the last step is saved after the loop

    def checkpoint(self, *, final: bool = False, must_succeed: bool = False) -> None:
        """Save the current state. Raises StorageError on every rank after too many failures."""
        self.collect(keep=0)  # so that a bad state is never saved
        if self._agreed.rollback is not None:
            return
        self._heartbeat.beat(Phase.SAVE)
        self._agreed.save = False
        scale = None if self.scaler is None else self.scaler.state()
        state = replace(self.state, loss_scale=scale)
        self.saves.save(state, final=final, must_succeed=must_succeed)
