"""Saves checkpoints during training, and handles failed saves.

A save is started when it is due; its end is noticed through the counts summed in every step, so all ranks act after the
same step. A failure raises an alarm. Retries block training, with exponential backoff, until too many failed in a row
or the newest verified checkpoint is too old.
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
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.units import human_bytes, human_time

from .observer import Observer

_LONGEST_PAUSE = 300.0
_PATIENCE = 1.0
"""Seconds of waiting for an earlier save that are worth a journal entry."""


class Checkpointing(Observer):
    """The checkpoints of one start. All ranks call its methods together.

    Args:
        config: the run's configuration.
        world: all ranks.
        saver: makes them.
        recorder: writes the record.
        step: of the checkpoint that this start continues from.
        observers: told of every checkpoint.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        saver: CheckpointManager,
        recorder: Recorder,
        step: int,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._config, self._world, self._saver = config.checkpoint, world, saver
        self._patience = config.parallel.timeout.value
        self._recorder, self._observers = recorder, observers
        self.saved_step = step
        self._pending: Future[SaveResult] | None = None
        self._pending_step, self._number, self._reported = step, 0, False
        self._failures, self._retry_at = 0, math.inf
        self._safe_at = time.monotonic()

    def reconfigured(self, config: Config) -> None:
        self._saver.reconfigure(config)

    def exclude_pause(self, seconds: float) -> None:
        """A pause of training does not age the newest checkpoint."""
        self._safe_at += seconds

    def beside(self, step: int) -> list[str]:
        del step
        return ["save"] if self._pending is not None else []

    # ------------------------------------------------------------------ agreed on by all ranks with every step

    def requests(self) -> Mapping[str, int]:
        done, retry, overdue = self.signals()
        return {"saved": done, "save": retry, "overdue": overdue}

    def signals(self) -> tuple[int, bool, bool]:
        """This rank's part: the number of the save its writer has finished (or 0), retry now, overdue.

        The first is summed over the ranks and passed to `all_ended`; the others follow rank 0's clock.
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
        """Whether the writers of all ranks have finished the save in flight, from the sum of their `signals`."""
        return self._pending is not None and total == self._world.size * self._number

    def refuse_to_go_on(self) -> None:
        """Raise StorageError: the newest verified checkpoint is older than `checkpoint.max_age`."""
        raise StorageError(
            f"no checkpoint was verified for longer than checkpoint.max_age = {self._config.max_age}",
            effect=f"steps after {self.saved_step} are in no checkpoint",
            remedy="repair the storage, then start again; training continues from the last checkpoint",
        ).on_all_ranks()

    # ------------------------------------------------------------------ saving

    def save(self, state: TrainState, *, final: bool = False, must_succeed: bool = False) -> float:
        """Start a background save, or save synchronously: the final save, and retries after a failure.

        Returns the seconds for which training waited.

        Raises:
            StorageError: on every rank, after too many failures in a row.
        """
        start = time.perf_counter()
        waited = self.finish()
        if waited > _PATIENCE:
            self._recorder.event(
                "checkpoint-late",
                f"training waited {human_time(waited)} for the save of step {self._pending_step}: "
                "saves are due faster than storage takes them",
                step=state.step,
                seconds=waited,
            )
        self._recorder.status(force=True, state="saving")
        self._pending_step, self._reported = state.step, False
        if self._config.background and not must_succeed and not self._failures:
            self._number += 1
            self._pending = self._saver.begin(state)
        else:
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
        """Wait for the save in flight, if any, and handle its outcome; the seconds that took.

        Raises:
            StorageError: on every rank, after too many failures in a row.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return 0.0
        start = time.perf_counter()
        ended = pending in wait([pending], self._patience).done
        error = pending.exception() if ended else None
        failure = _cause(error) if error is not None else None if ended else "its writer timed out"
        expected = ended and (error is None or isinstance(error, StorageError))
        outcomes = self._world.gather((failure, expected))
        if not all(fine for _, fine in outcomes):
            self._saver.renew()
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
        """Let the save in flight end, ignoring its outcome: the run ends for another reason."""
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
