"""Saves checkpoints during training, and handles failed saves.

A save starts when it is due. Every rank reports that its writer has finished in the counts that each step sums, so all
ranks act on it after the same step. A failure raises an alarm. Training waits for retries, which back off
exponentially, until too many failed in a row or the newest verified checkpoint is too old.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress

from fsdp_pretrain.checkpoint.dcp import SaveResult
from fsdp_pretrain.checkpoint.manager import CheckpointManager
from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import StorageError, UserError
from fsdp_pretrain.heartbeat import Heartbeat, Phase
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.units import human_bytes, human_time

from .observer import Observer

_LONGEST_PAUSE = 300.0
"""Seconds: upper bound of the pause before a failed save is retried."""
_LATE_SECONDS = 1.0
"""A longer wait for the save before is recorded in the journal."""


class Checkpointing(Observer):
    """Saves the checkpoints of one start. All ranks call its methods together.

    Args:
        saver: writes them, and applies the retention policy.
        heartbeat: receives the phases.
        step: step of the checkpoint that this start continues from.
        observers: their `saved` is called after every save.

    Attributes:
        saved_step: step of the newest verified checkpoint.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        saver: CheckpointManager,
        recorder: Recorder,
        heartbeat: Heartbeat,
        step: int,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._config, self._world, self._saver = config.checkpoint, world, saver
        self._recorder, self._heartbeat, self._observers = recorder, heartbeat, observers
        self._timeout = config.parallel.timeout.value
        self.saved_step = step
        self._pending: Future[SaveResult] | None = None  # the save in flight
        self._pending_step = step
        self._number = 0  # of the save in flight, counted from 1
        self._reported = False  # whether its failure has raised the alarm
        self._failures = 0  # in a row
        self._retry_at = math.inf
        self._safe_at = time.monotonic()  # when the newest checkpoint was verified

    def reconfigured(self, config: Config) -> None:
        self._saver.reconfigure(config)

    def exclude_pause(self, seconds: float) -> None:
        """Do not count a pause of training in the age of the newest checkpoint."""
        self._safe_at = min(self._safe_at + seconds, time.monotonic())  # one may have been saved in the pause

    def beside(self, step: int) -> list[str]:
        del step
        return ["save"] if self._pending is not None else []

    # ------------------------------------------------------------------ agreed on by all ranks with every step

    def requests(self) -> Mapping[str, int]:
        done, retry, overdue = self.signals()
        return {"saved": done, "save": retry, "overdue": overdue}

    def signals(self) -> tuple[int, bool, bool]:
        """This rank's part of the counts that a step sums, see `requests`.

        Returns:
            The number of the save that this rank's writer has finished, or 0: its sum over the ranks is the argument of
            `all_ended`. Whether to retry a failed save now. Whether the newest checkpoint is too old. The last two
            follow rank 0's clock and are False on the other ranks.
        """
        pending, done = self._pending, 0
        if pending is not None and pending.done():
            done = self._number
            if (error := pending.exception()) and not self._reported:  # the alarm does not wait for the other ranks
                self._reported = True
                self._report_failure(self._failures + 1, _cause(error))
        now, limit = time.monotonic(), self._config.max_age
        retry = self._world.is_main and now >= self._retry_at
        overdue = self._world.is_main and limit is not None and now - self._safe_at > limit.value
        return done, retry, overdue

    def all_ended(self, total: int) -> bool:
        """Whether the writers of all ranks have finished the save in flight. `total`: see `signals`."""
        return self._pending is not None and total == self._world.size * self._number

    def raise_overdue(self) -> None:
        """Raise StorageError, on every rank: the newest verified checkpoint is older than `checkpoint.max_age`."""
        raise StorageError(
            f"no checkpoint was verified for longer than checkpoint.max_age = {self._config.max_age}",
            effect=f"steps after {self.saved_step} are in no checkpoint",
            remedy="repair the storage, then start again; training continues from the last checkpoint",
        ).on_all_ranks()

    # ------------------------------------------------------------------ saving

    def save(self, state: TrainState, *, final: bool = False, must_succeed: bool = False) -> float:
        """Start a background save, or save synchronously: the final save, and retries after a failure.

        Returns the seconds for which training waited. Raises StorageError on every rank after too many failures in a
        row.
        """
        start = time.perf_counter()
        waited = self.finish()
        if waited > _LATE_SECONDS:
            self._recorder.event(
                "checkpoint-late",
                f"training waited {human_time(waited)} for the save of step {self._pending_step}, which was under way",
                step=state.step,
                seconds=waited,
            )
        self._recorder.status(force=True, state="saving")
        self._pending_step, self._reported = state.step, False
        if self._config.background and not (final or must_succeed or self._failures):
            self._heartbeat.beat(Phase.SAVE)
            self._number += 1
            self._pending = self._saver.begin(state)
        else:
            self._heartbeat.beat(Phase.WRITE)
            self._save_now(state, final, must_succeed)
        seconds = time.perf_counter() - start
        self._recorder.status(force=True, state="running")
        return seconds

    def _save_now(self, state: TrainState, final: bool, must_succeed: bool) -> None:
        while True:
            try:
                saved = self._saver.save(state, final=final)
            except StorageError as error:
                self._report_failure(self._failures + 1, error.cause)
                self._fail(error.cause)
                if not must_succeed:
                    return
                time.sleep(min(1.0, self._config.retry.value))
            else:
                self._succeed(state.step, saved)
                return

    def finish(self) -> float:
        """Wait for the save in flight, if any, and handle its outcome; returns the seconds that this took. Raises
        StorageError on every rank after too many failures in a row."""
        pending, self._pending = self._pending, None
        if pending is None:
            return 0.0
        self._heartbeat.beat(Phase.WRITE)
        start = time.perf_counter()
        ended = pending in wait([pending], self._timeout).done
        error = pending.exception() if ended else None
        failure = None if error is None else _cause(error)
        if not ended:
            failure = "its writer timed out"
        expected = ended and (error is None or isinstance(error, StorageError))
        outcomes = self._world.gather((failure, expected))
        if not all(fine for _, fine in outcomes):
            self._saver.replace_writers()
        if isinstance(error, UserError) and not expected:
            raise error  # on every rank, e.g. another job took over the run
        causes = [
            text if fine else f"rank {rank}: {text}" for rank, (text, fine) in enumerate(outcomes) if text is not None
        ]
        if causes:
            if not self._reported:
                self._report_failure(self._failures + 1, causes[0])
            self._fail(causes[0])
        else:
            self._succeed(self._pending_step, pending.result())
        return time.perf_counter() - start

    def abandon(self) -> None:
        """Wait for the save in flight and ignore its outcome, since the run ends for another reason."""
        with suppress(UserError):
            self.finish()

    def _report_failure(self, failures: int, cause: str) -> None:
        step, limit = self._pending_step, self._config.max_failures
        self._recorder.event(
            "checkpoint-failed", f"attempt {failures} of {limit}: {cause}", step=step, failures=failures
        )

    def _fail(self, cause: str) -> None:
        self._failures += 1
        pause = self._config.retry.value * 2.0 ** (self._failures - 1)
        self._retry_at = time.monotonic() + min(_LONGEST_PAUSE, pause)
        if self._failures >= self._config.max_failures:
            raise StorageError(
                f"{self._failures} saves in a row failed, the last because: {cause}",
                effect=f"steps after {self.saved_step} are in no checkpoint",
                remedy="repair the storage, then start again; training continues from the last checkpoint",
            ).on_all_ranks()

    def _succeed(self, step: int, saved: SaveResult) -> None:
        self._failures, self._retry_at, self.saved_step = 0, math.inf, step
        self._safe_at = time.monotonic()
        manifest = saved.manifest
        consumed = manifest.consumed if manifest is not None else None
        self._recorder.event(
            "checkpoint",
            f"{saved.checkpoint.path.name}: {human_bytes(saved.bytes)} in {saved.seconds:.2f}s"
            + (", verified" if saved.checkpoint.verified else ""),
            step=step,
            consumed=consumed,
            bytes=saved.bytes,
            seconds=saved.seconds,
            verified=saved.checkpoint.verified,
            final=manifest.final if manifest is not None else None,
        )
        for kind, text in saved.notes:
            self._recorder.event(kind, text, step=step)
        if saved.deleted:
            names = ", ".join(map(str, saved.deleted))
            self._recorder.event("checkpoint-deleted", f"by the retention policy: step {names}")
        tokens = manifest.tokens if manifest is not None else None
        state = {"step": step, "consumed": consumed, "tokens": tokens, "verified": saved.checkpoint.verified}
        self._recorder.status(force=True, checkpoint=state)
        for observer in self._observers:
            observer.saved(saved)


def _cause(error: BaseException) -> str:
    return error.cause if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
