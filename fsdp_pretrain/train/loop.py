"""The training loop: a step, then the duties between two steps, in their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing.loader import StepBatch
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import DataError, Exit, UserError
from fsdp_pretrain.health.journal import Provenance, record_findings
from fsdp_pretrain.health.monitor import Health, RollbackRequest
from fsdp_pretrain.heartbeat import Phase
from fsdp_pretrain.job.live_control import Decided, LiveControl
from fsdp_pretrain.job.profiling import StepProfiler
from fsdp_pretrain.job.run_context import RunContext
from fsdp_pretrain.run.requests import Request, Requests

from .checkpointing import Checkpointing
from .garbage import collect_garbage, collection_at_steps
from .observer import Observer
from .step_sums import StepCounts
from .trainer import LAG, Trainer

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


Duty = Callable[[AgreedActions], Exit | None]
"""What is done between two steps, by all ranks together; returns the reason to end, if there is one."""


class Loop(Observer):
    """Trains until the run is complete or asked to stop.

    Args:
        run: shared context of the start.
        trainer: runs the steps.
        saves: makes checkpoints.
        health: judges the steps.
        provenance: names the documents of a batch, for the journal.
        reread: rebuilds a batch, while the data may be prefetching others.
        guard: raises UserError if this job may not write into the run directory any more.
        on_set: called on every rank with the configuration after `control set`.

    Attributes:
        duties: between two steps, in this order; the first that returns a reason to end is the last.
        rollback: the requested rollback, if the run ended for one.
    """

    def __init__(
        self,
        run: RunContext,
        trainer: Trainer,
        *,
        saves: Checkpointing,
        health: Health,
        provenance: Provenance,
        reread: Reread,
        guard: Callable[[], None],
        on_set: Callable[[Config], None],
    ) -> None:
        self.context, self.trainer, self._saves, self._health = run, trainer, saves, health
        self._provenance, self._reread, self._on_set = provenance, reread, on_set
        self._profiler, self._control = StepProfiler(run), LiveControl(run, guard)
        self._agreed = AgreedActions()
        self.rollback: RollbackRequest | None = None
        self.duties: tuple[Duty, ...] = (
            self._roll_back,
            self._profile,
            self._refuse_without_checkpoints,
            self._finish_save,
            self._acknowledge,
            self._save,
            self._stop_or_steer,
        )
        trainer.observers = (saves, self)

    @property
    def step(self) -> int:
        """Number of the last step that was issued."""
        return self.trainer.state.step

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
                self._saves.abandon()
            raise
        finally:
            self._profiler.close()

    def _run(self) -> Exit:
        self.trainer.start()
        while not self._complete():
            self._profiler.begin_step(self.step + 1)
            self.trainer.step()
            self._profiler.end_step(self.step)
            self.collect(keep=LAG)
            collect_garbage(self.step)
            agreed, self._agreed = self._agreed, AgreedActions()
            for duty in self.duties:
                if (outcome := duty(agreed)) is not None:
                    return self._end(outcome)
        return self._end(Exit.COMPLETE)

    def _complete(self) -> bool:
        return self.trainer.state.consumed >= self.trainer.config.schedule.total

    def _end(self, outcome: Exit) -> Exit:
        """Read what is in flight and save, unless the run goes back to an earlier step."""
        if self.rollback is not None:
            return outcome
        self._profiler.finish(self.step)
        self.collect(keep=0)
        if self._agreed.rollback is not None:
            return self._abort_for_rollback(self._agreed.rollback)
        self._control.acknowledge(self.step)
        outcome = Exit.COMPLETE if self._complete() else outcome
        self.context.heartbeat.beat(Phase.SAVE)
        self._saves.finish()
        if self._saves.saved_step != self.step:
            self.checkpoint(final=outcome is Exit.COMPLETE, must_succeed=True)
        return outcome

    # ------------------------------------------------------------------ what steps measured, and what they carry

    def collect(self, *, keep: int) -> None:
        """Judge and record issued steps until `keep` are outstanding; update the agreed actions.

        Raises:
            NumericError: loss or gradients were not finite, on every rank.
            DataError: see `Trainer.read`.
        """
        for counts, record in self.trainer.read(keep=keep):
            self._agreed.add(counts)
            judgement, recorder = self._health.step(record), self.context.recorder
            judged = record.model_copy(update={"health": judgement.findings})
            recorder.step(judged, target=self.trainer.last_step())
            record_findings(recorder, record, judgement, self._provenance)
            self._agreed.rollback = self._agreed.rollback or judgement.rollback
            if judgement.error is not None:
                raise judgement.error

    def requests(self) -> Mapping[str, int]:
        asked = self.context.inbox.take()
        return {
            "stop": asked.stop,
            "save": asked.save,
            "profile": self._profiler.ask(asked.profile),
            "steer": asked.steer,
        }

    def beside(self, step: int) -> list[str]:
        return [*self._profiler.beside(step), *self.context.beside()]

    # ------------------------------------------------------------------ duties

    def _roll_back(self, agreed: AgreedActions) -> Exit | None:
        return None if agreed.rollback is None else self._abort_for_rollback(agreed.rollback)

    def _profile(self, agreed: AgreedActions) -> None:
        if agreed.profile:
            self._profiler.agree(self.step)

    def _refuse_without_checkpoints(self, agreed: AgreedActions) -> None:
        if agreed.overdue:
            self._saves.refuse_to_go_on()

    def _finish_save(self, agreed: AgreedActions) -> None:
        if self._saves.all_ended(agreed.saved):
            self.context.heartbeat.beat(Phase.SAVE)
            self._saves.finish()

    def _acknowledge(self, agreed: AgreedActions) -> None:
        if agreed.save or agreed.stop:
            self._control.acknowledge(self.step)

    def _save(self, agreed: AgreedActions) -> None:
        state, schedule = self.trainer.state, self.trainer.config.schedule
        every, before = schedule.save_every(state.consumed), state.consumed - state.batch
        due = schedule.due(every, step=state.step, before=before, after=state.consumed)
        if agreed.save or (due and not self._complete()):  # the last step is saved after the loop
            self.checkpoint()

    def _stop_or_steer(self, agreed: AgreedActions) -> Exit | None:
        return Exit.RESUME if agreed.stop or (agreed.steer and self._steer()) else None

    # ------------------------------------------------------------------ steering

    def _steer(self) -> bool:
        """Do what operators asked for, before the next step; whether to stop."""
        pause = self._decide().pause
        if pause is None:
            return False
        start = time.perf_counter()
        self.collect(keep=0)
        if self._agreed.rollback is not None:
            self._control.refuse(pause, self.step, "the run goes back to an earlier step")
            return False
        self.context.heartbeat.beat(Phase.SAVE)
        self._saves.finish()
        stop = self._control.hold(pause, self.step, self._look_while_held, self._act_while_held)
        seconds = time.perf_counter() - start
        self._saves.exclude_pause(seconds)
        self.trainer.clock.resume_after(seconds)
        return stop

    def _decide(self, *, held: bool = False) -> Decided:
        """Decide on what operators asked for, and go on with what was set."""
        decided = self._control.decide(self.trainer.state, held=held)
        if decided.entries:
            self.trainer.config = config = self._control.config
            self._health.steer(config)
            self._on_set(config)
        return decided

    def _look_while_held(self) -> Requests:
        asked, (_, retry, _) = self.context.inbox.take(), self._saves.signals()
        self._profiler.ask(asked.profile)
        return replace(asked, save=asked.save or retry)

    def _act_while_held(self, asked: Requests) -> Request | None:
        if asked.save:
            self._control.acknowledge(self.step)
            if self._saves.saved_step != self.step:
                self.checkpoint()
                self._saves.finish()
        return self._decide(held=True).resume if asked.steer else None

    # ------------------------------------------------------------------ checkpoints, and going back to one

    def checkpoint(self, *, final: bool = False, must_succeed: bool = False) -> None:
        """Save the current state. Raises StorageError on every rank after too many failures."""
        self.collect(keep=0)  # so that a bad state is never saved
        if self._agreed.rollback is not None:
            return
        self.context.heartbeat.beat(Phase.SAVE)
        self._agreed.save = False
        scaler = self.trainer.scaler
        state = replace(self.trainer.state, loss_scale=None if scaler is None else scaler.state())
        self._saves.save(state, final=final, must_succeed=must_succeed)

    def _abort_for_rollback(self, rollback: RollbackRequest) -> Exit:
        """End without saving: the steps since the incident are discarded."""
        self._saves.abandon()
        self.rollback = replace(rollback, repeats=self._is_reproducible(rollback))
        return Exit.RESUME

    def _is_reproducible(self, rollback: RollbackRequest) -> bool | None:
        """Whether the last non-finite step is so again when repeated from its batch; None if that cannot be determined.

        Collective; changes no parameter. The parameters are the same except for steps that were in flight, so a cause
        in the data or the state shows again; a device fault does not.
        """
        before, world = rollback.before, self.context.world
        if before is None:
            return None
        try:
            batch = world.together(lambda: self._reread(before))
        except DataError:
            return None
        return not self.trainer.is_finite(batch)
