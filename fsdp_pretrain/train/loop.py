"""The training loop: a step, then the duties between two steps, in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fsdp_pretrain.data.packing.loader import StepBatch
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import DataError, Exit, UserError
from fsdp_pretrain.run.step_record import LAG

from .checkpointing import Checkpointing
from .garbage import collect_garbage, collection_at_steps
from .observer import AgreedActions, RollbackRequest, Verdict
from .trainer import Trainer

RebuildBatch = Callable[[Position], StepBatch]
"""The position before a batch -> this rank's share of the batch."""

Duty = Callable[[AgreedActions], Exit | None]
"""Something that all ranks do together between two steps; returns the reason to end, if there is one."""


class Loop:
    """Trains until the run is complete or asked to stop.

    Args:
        trainer: runs the steps, with the observers.
        saves: makes checkpoints.
        rebuild_batch: builds a batch once more, beside the loader that prefetches others.

    Attributes:
        duties: called between two steps in this order, until one returns a reason to end.
        rollback: the requested rollback, if the run ended for one.
    """

    def __init__(self, trainer: Trainer, saves: Checkpointing, rebuild_batch: RebuildBatch) -> None:
        self.trainer, self.saves, self._rebuild_batch = trainer, saves, rebuild_batch
        self._agreed = AgreedActions()
        self.rollback: RollbackRequest | None = None
        self.duties: tuple[Duty, ...] = (
            self._roll_back,
            self._refuse_without_checkpoints,
            self._finish_save,
            self._save,
            *(observer.between_steps for observer in trainer.observers),
        )

    @property
    def step(self) -> int:
        """Number of the last step that was issued."""
        return self.trainer.state.step

    def run(self) -> Exit:
        """Train to the end of the schedule, or until asked to stop; returns the reason to exit with. Raises UserError
        if training cannot continue; the same on every rank if it concerns all."""
        try:
            with collection_at_steps():
                return self._run()
        except UserError as error:
            if error.shared:
                self.saves.abandon()
            raise
        finally:
            for observer in self.trainer.observers:
                observer.close()

    def _run(self) -> Exit:
        self.trainer.start()
        while not self._complete():
            self.trainer.step()
            self.collect(keep=LAG)
            collect_garbage(self.step)
            agreed, self._agreed = replace(self._agreed, step=self.step), AgreedActions()
            for duty in self.duties:
                if (outcome := duty(agreed)) is not None:
                    return self._end(outcome)
        return self._end(Exit.COMPLETE)

    def _complete(self) -> bool:
        return self.trainer.state.consumed >= self.trainer.config.schedule.end

    def _end(self, outcome: Exit) -> Exit:
        """Read the steps in flight and save, unless the run goes back to an earlier step."""
        if self.rollback is not None:
            return outcome
        self.collect(keep=0)
        if self._agreed.rollback is not None:
            return self._abort_for_rollback(self._agreed.rollback)
        for observer in self.trainer.observers:
            observer.end(self.step)
        outcome = Exit.COMPLETE if self._complete() else outcome
        self.finish_save()
        if self.saves.saved_step != self.step:
            self.checkpoint(must_succeed=True)
        return outcome

    def collect(self, *, keep: int) -> None:
        """Judge and record issued steps, oldest first, until only `keep` are in flight; update the agreed actions.

        Raises:
            UserError: an observer ends the run, on every rank.
            DataError: see `Trainer.read`.
        """
        for counts, record in self.trainer.read(keep=keep):
            self._agreed.add(counts)
            verdicts = [(observer, observer.judge(record) or Verdict()) for observer in self.trainer.observers]
            findings = [finding for _, verdict in verdicts for finding in verdict.findings]
            judged = record.model_copy(update={"health": findings})
            self.trainer.recorder.step(judged, target=self.trainer.last_step())
            for observer, verdict in verdicts:
                observer.recorded(judged, verdict)
                self._agreed.rollback = self._agreed.rollback or verdict.rollback
            for _, verdict in verdicts:
                if verdict.error is not None:
                    raise verdict.error

    @property
    def rolls_back(self) -> bool:
        """Whether the steps collected last ask to go back to an earlier one."""
        return self._agreed.rollback is not None

    def take_save_request(self) -> bool:
        """Whether the steps collected last ask for a save; asked again, they do not. False if the run goes back."""
        asked = self._agreed.save and not self.rolls_back
        self._agreed.save = self._agreed.save and not asked
        return asked

    # ------------------------------------------------------------------ duties

    def _roll_back(self, agreed: AgreedActions) -> Exit | None:
        return None if agreed.rollback is None else self._abort_for_rollback(agreed.rollback)

    def _refuse_without_checkpoints(self, agreed: AgreedActions) -> None:
        if agreed.overdue:
            self.saves.raise_overdue()

    def _finish_save(self, agreed: AgreedActions) -> None:
        if self.saves.all_ended(agreed.saved):
            self.finish_save()

    def _save(self, agreed: AgreedActions) -> None:
        state, config = self.trainer.state, self.trainer.config
        due = config.save_due(step=state.step, before=state.consumed - state.batch, after=state.consumed)
        if (agreed.save or due) and not self._complete():  # the last step is saved after the loop
            self.checkpoint()
            agreed.save = self.take_save_request() or agreed.save  # of a step that was collected for this save

    # ------------------------------------------------------------------ checkpoints, and going back to one

    def checkpoint(self, *, must_succeed: bool = False) -> None:
        """Save the current state. Raises StorageError on every rank after too many failures."""
        self.collect(keep=0)  # so that a bad state is never saved
        if self._agreed.rollback is not None:
            return
        scaler = self.trainer.scaler
        state = replace(self.trainer.state, loss_scale=None if scaler is None else scaler.state())
        seconds = self.saves.save(state, final=self._complete(), must_succeed=must_succeed)
        self.trainer.clock.stalled(seconds)
        if self.saves.saved_step == self.step:
            self._agreed.overdue = False  # if a step that was collected for this save had found it so

    def finish_save(self) -> None:
        """Wait for the save in flight, if any. Raises StorageError on every rank after too many failures."""
        self.saves.finish()

    def _abort_for_rollback(self, rollback: RollbackRequest) -> Exit:
        """End without saving: the steps since the incident are discarded."""
        self.saves.abandon()
        self.rollback = replace(rollback, repeats=self._is_reproducible(rollback))
        return Exit.RESUME

    def _is_reproducible(self, rollback: RollbackRequest) -> bool | None:
        """Whether the last non-finite step is non-finite again when repeated; None if that cannot be determined.

        Collective; changes no parameter. The parameters are the same except for steps that were in flight, so the step
        is non-finite again if data or state are the cause, and finite if a device is.
        """
        before, world = rollback.before, self.trainer.world
        if before is None:
            return None
        try:
            batch = world.together(lambda: self._rebuild_batch(before))
        except DataError:
            return None
        return not self.trainer.is_finite(batch)
