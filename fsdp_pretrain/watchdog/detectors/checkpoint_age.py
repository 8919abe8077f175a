"""The age of the newest verified checkpoint: a run whose saves fail silently is reported and made to save or stop.

The trainer retries, prunes and gives up by itself. This detector watches the storage, independently of the trainer.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from fsdp_pretrain.checkpoint.upcoming import Late, unsaved_training
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.requests import send
from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import Progress, human_count
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .checkpoint_store import StoreDetector, StoreState
from .periodic import PeriodicProbe


@dataclass(frozen=True)
class TrainedCounts:
    """Numbers of steps, samples and tokens trained."""

    step: int
    consumed: int
    tokens: int


class CheckpointAgeDetector(StoreDetector):
    """Alarm `checkpoint-age`.

    Args:
        every: returns `checkpoint.every` at a number of samples consumed.
        longest_save: returns the seconds that a long save takes.
        act: whether a save or a stop may be requested (`watchdog.act`).
        pids: returns the process ids of the ranks on this node.
        reached: returns the newest step that a rank of this node has started, even if the record cannot be written.

    Attributes:
        age: seconds that training has continued without a newer verified checkpoint.
    """

    def __init__(
        self,
        alarms: AlarmSink,
        segment: int,
        run: RunDir,
        *,
        every: Callable[[int], Progress],
        longest_save: Callable[[], float],
        act: bool = True,
        pids: Callable[[], list[int]] = list,
        reached: Callable[[], int] = int,
    ) -> None:
        super().__init__(alarms, segment)
        self._run, self._every, self._longest_save = run, every, longest_save
        self._act, self._pids, self._reached = act, pids, reached
        self._saved: TrainedCounts | None = None
        self.age = 0.0
        self._since = math.inf
        self._world = 1
        self._steps: deque[float] = deque(maxlen=64)
        self._asked: set[str] = set()
        self._requests: dict[str, PeriodicProbe[Path]] = {}

    def step(self, record: StepRecord) -> None:
        self._steps.append(record.seconds.iteration)
        if self._saved is None:  # a start continues from a saved step, or from 0
            self._saved = TrainedCounts(record.step - 1, record.consumed - record.batch, record.tokens - record.trained)
        super().step(record)

    def figures(self) -> dict[str, Any]:
        """The newest verified checkpoint, its age, and the tokens since it."""
        risk = self.unprotected
        return {
            "verified_step": self.protected,
            "verified_age": self.age,
            "unprotected_tokens": None if risk is None else risk.tokens,
        }

    def judge(self, state: StoreState, now: float) -> None:
        """Update the age from the state of the store."""
        for entry in filter(self.is_mine, state.entries):
            self._read(entry)
        newest = state.verified
        if newest is not None and self.last and (self.protected is None or newest.step > self.protected):
            self._saved = TrainedCounts(newest.step, newest.consumed, newest.tokens)
            self._since = now
        self._judge_age(now)

    def _read(self, entry: dict[str, Any]) -> None:
        """Take the world size, or a changed `checkpoint.every`, from a journal entry."""
        if entry["kind"] == "start":
            self._world = entry.get("world") or 1
        elif entry["kind"] == "control" and (every := entry.get("entry", {}).get("checkpoint", {}).get("every")):
            before, asked, place = self._every, Progress.parse(every), entry["consumed"]
            self._every = lambda consumed: asked if consumed > place else before(consumed)

    @property
    def protected(self) -> int | None:
        """Step of the newest verified checkpoint, or of the one this start continued from."""
        return None if self._saved is None else self._saved.step

    @property
    def unprotected(self) -> TrainedCounts | None:
        """Training that would be lost now: steps in no verified checkpoint, including steps without a record."""
        record, saved = self.last, self._saved
        if record is None or saved is None:
            return None
        ahead = max(0, self._reached() - record.step)
        samples = max(0, record.consumed - saved.consumed) + ahead * record.batch
        tokens = max(0, record.tokens - saved.tokens) + ahead * record.batch * record.sequence_length
        return TrainedCounts(max(0, record.step - saved.step) + ahead, samples, tokens)

    def _judge_age(self, now: float) -> None:
        """Update the age, which counts from the first step in no verified checkpoint, and open or resolve the alarm."""
        record, saved, risk = self.last, self._saved, self.unprotected
        if record is None or saved is None or risk is None:
            return
        if record.step <= saved.step:
            self._since = now
        self._since = min(self._since, now)
        self.age = now - self._since
        unsaved = unsaved_training(
            (self._every(saved.consumed + 1), self._every(record.consumed)),
            steps=risk.step,
            samples=risk.consumed,
            tokens=risk.tokens,
            age=self.age,
            step_seconds=median(self._steps),
            save_seconds=self._longest_save(),
        )
        late = unsaved.late()
        if late is Late.NO:
            self._asked.clear()
            self.resolve("checkpoint-age", f"step {saved.step} is verified")
            return
        verb = {Late.VERY_LATE: "save", Late.TOO_LATE: "stop"}.get(late)
        causes = {
            key
            for key in self.alarms.open_keys(Severity.CRIT)
            if key.startswith(("disk/checkpoints", "disk/run", "checkpoint-failed", "checkpoint-writer"))
        }
        self.open(
            "checkpoint-age",
            Severity.CRIT if verb == "stop" or (verb and not causes) else Severity.WARN,  # a cause has paged already
            f"{unsaved}" + (f" (see {', '.join(sorted(causes))})" if causes else ""),
            f"{risk.step} steps, {human_count(risk.tokens)} tokens and "
            f"{self.age * self._world / 3600:.3g} GPU-hours would be lost now",
            "repair the storage",
            action=self._ask(verb) if verb else "",
            facts={"age_seconds": self.age, "verified_step": saved.step, "tokens": risk.tokens},
        )

    # ------------------------------------------------------------------ requests

    def _ask(self, verb: str) -> str:
        """Leave a request in the run's inbox, once per incident; returns the alarm's action text."""
        if not self._act:
            return ""
        if verb not in self._asked:
            self._asked.add(verb)
            why = {"by": "the watchdog", "reason": "no new verified checkpoint"}
            # A probe, as the storage may hang.
            self._requests[verb] = PeriodicProbe(partial(send, self._run, verb, **why), math.inf)
        return f"asked the run to {verb}"

    def tick(self, now: float) -> None:
        """Check sent requests. If one cannot be written (full disk), signal a stop to a rank, or retry a save later."""
        for verb, request in list(self._requests.items()):
            answer = request.tick(now)
            if answer is None:
                continue
            del self._requests[verb]
            if answer.error is None:
                continue
            self._asked.discard(verb)
            for pid in self._pids()[:1] if verb == "stop" else []:
                self._asked.add(verb)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
