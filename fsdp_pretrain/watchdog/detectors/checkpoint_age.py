"""Checkpoints as seen from outside: the age of the newest verified one, and how saving goes.

The trainer retries, prunes and gives up by itself. This watches the storage, whatever the trainer believes: a run whose
saves fail silently, or whose writer hangs, is reported and made to save or stop.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fsdp_pretrain.checkpoint import upcoming
from fsdp_pretrain.checkpoint.disk_space import SpaceNeeded
from fsdp_pretrain.checkpoint.upcoming import Late, UnsavedTraining
from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import Progress, human_bytes, human_count, human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from . import looks
from .base import Detector
from .periodic import AUDIT_DEADLINE, AUDIT_SECONDS, PeriodicProbe

_LEAST_HISTORY = 5
_SLOW_TIMES = 3.0
_MIN_SLOW_SECONDS = 1.0
"""Seconds: shorter saves are never reported as slow."""
_STILL_FIRST = 5
"""Before any save was timed, a writer may stall this many times longer."""
_STILL_SECONDS = 60.0
"""A save that has not grown for so long, and for as long as saves usually take, has a writer that hangs. Longer before
the first save was timed."""


@dataclass(frozen=True)
class TrainedCounts:
    """Steps, samples and tokens that were trained."""

    step: int
    consumed: int
    tokens: int


class CheckpointDetector(Detector):
    """Alarms `checkpoint-age`, `checkpoint-failed`, `checkpoint-missing`, `checkpoint-writer`, `checkpoint-speed`
    and `checkpoint-damaged/NAME`.

    Args:
        store: the directory of checkpoints.
        every: gives `checkpoint.every` at a number of samples consumed.
        act: a save or a stop may be requested (`watchdog.act`).
        pids: returns the process ids of the ranks on this node.
        reached: returns the newest step that a rank of this node has started, even if the record cannot be written.

    Attributes:
        need: what the next checkpoint takes; None before anything is known.
        prunable: what may be deleted to make room for it.
        completed: how often a newer verified checkpoint was seen.
        failures: failed saves of this start.
        speed: bytes per second of the last save.
        age: seconds that training has continued without a newer one.
    """

    def __init__(
        self,
        alarms: AlarmSink,
        *,
        run: Path,
        segment: int,
        store: Path,
        every: Callable[[int], Progress],
        act: bool = True,
        pids: Callable[[], list[int]] = list,
        reached: Callable[[], int] = int,
    ) -> None:
        super().__init__(alarms)
        self._pids, self._reached = pids, reached
        self._act, self._run, self._segment = act, run, segment
        self._every = every
        journal: dict[str, Any] = {"chronicle": str(run / "journal.jsonl"), "offset": 0}
        self._probe = PeriodicProbe(looks.checkpoints, directory=str(store), **journal)
        self._audit = PeriodicProbe(looks.checksum, AUDIT_SECONDS, AUDIT_DEADLINE, directory=str(store))
        self.need: SpaceNeeded | None = None
        self.prunable: SpaceNeeded | None = None
        self.completed = self.failures = 0
        self._saved: TrainedCounts | None = None
        self.speed: float | None = None
        self.age = 0.0
        self._since, self._world = math.inf, 1
        self._steps: deque[float] = deque(maxlen=64)
        self._saves: deque[float] = deque(maxlen=upcoming.SAVES)
        self._grown: dict[str, tuple[int, float]] = {}  # bytes of a save in flight, and since when it has them
        self._bad: dict[str, str] = {}
        self._asked: set[str] = set()
        self._requests: dict[str, PeriodicProbe] = {}

    def step(self, record: StepRecord) -> None:
        self._steps.append(record.seconds.iteration)
        if self._saved is None:  # a start continues from a saved step, or from 0
            self._saved = TrainedCounts(record.step - 1, record.consumed - record.batch, record.tokens - record.trained)
        super().step(record)

    def tick(self, now: float) -> None:
        """Start due probes, and judge the answers of earlier ones."""
        answer = self._probe.tick(now)
        if answer is not None and answer.error is None:
            self._update(answer.value, now)
            self._judge_age(now)  # only after an answer: nothing is known in between
        self._poll_requests(now)
        audit = self._audit.tick(now)
        if audit is not None and audit.value.get("wrong"):
            self._bad[audit.value["name"]] = "; ".join(audit.value["wrong"])
            self._probe.due = 0.0

    def _update(self, found: dict[str, Any], now: float) -> None:
        self._probe.arguments["offset"] = found["offset"]
        for entry in found["entries"]:
            self._read(entry, mine=entry.get("segment") == self._segment)
        if found["newest"] is not None:
            self.need = upcoming.need_after(found["newest"]["bytes"], found["newest"]["files"])
        self.prunable = SpaceNeeded(**found["prunable"])
        newest = found["verified"]
        if newest is not None and self.last and (self.protected is None or newest["step"] > self.protected):
            self._saved = TrainedCounts(newest["step"], newest["consumed"], newest["tokens"])
            self.completed, self._since = self.completed + 1, now
        self._judge_damage(found)
        self._judge_writers(found["writing"], now)
        self._probe.every = upcoming.CHECK_SECONDS / (4 if found["writing"] else 1)

    def figures(self) -> dict[str, Any]:
        """The newest verified checkpoint, and what saves are like."""
        return {
            "verified_step": self.protected,
            "verified_age": self.age,
            "checkpoint_failures": self.failures,
            "checkpoint_bytes_per_second": self.speed,
            "unprotected_tokens": None if (risk := self.unprotected) is None else risk.tokens,
        }

    # ------------------------------------------------------------------ age of the newest checkpoint

    @property
    def protected(self) -> int | None:
        """Step of the newest verified checkpoint, or of the one this start continued from."""
        return None if self._saved is None else self._saved.step

    @property
    def unprotected(self) -> TrainedCounts | None:
        """What would be lost now: steps in no verified checkpoint, also those whose records cannot be written."""
        record, saved = self.last, self._saved
        if record is None or saved is None:
            return None
        ahead = max(0, self._reached() - record.step)
        samples = max(0, record.consumed - saved.consumed) + ahead * record.batch
        tokens = max(0, record.tokens - saved.tokens) + ahead * record.batch * record.sequence_length
        return TrainedCounts(max(0, record.step - saved.step) + ahead, samples, tokens)

    def _judge_age(self, now: float) -> None:
        """The age counts from the first step that is in no verified checkpoint."""
        record, saved, risk = self.last, self._saved, self.unprotected
        if record is None or saved is None or risk is None:
            return
        if record.step <= saved.step:
            self._since = now
        self._since = min(self._since, now)
        self.age = now - self._since
        made = UnsavedTraining(
            self._every(record.consumed),
            steps=risk.step,
            samples=risk.consumed,
            tokens=risk.tokens,
            age=self.age,
            step_seconds=median(self._steps),
            save_seconds=upcoming.longest_save(self._saves),
        )
        late = made.late()
        if late is Late.NO:
            self._asked.clear()
            self.resolve("checkpoint-age", f"step {saved.step} is verified")
            return
        verb = {Late.VERY_LATE: "save", Late.TOO_LATE: "stop"}.get(late)
        causes = {
            key
            for key in self.alarms.open_keys()
            if key.startswith(("disk/", "checkpoint-failed", "checkpoint-writer"))
        }
        self.open(
            "checkpoint-age",
            Severity.CRIT if verb else Severity.WARN,
            f"{made}" + (f" (see {', '.join(sorted(causes))})" if causes else ""),
            f"{risk.step} steps, {human_count(risk.tokens)} tokens and "
            f"{self.age * self._world / 3600:.3g} GPU-hours would be lost now",
            "repair the storage",
            action=self._ask(verb) if verb else "",
            facts={"age_seconds": self.age, "verified_step": saved.step, "tokens": risk.tokens},
        )

    def _ask(self, verb: str) -> str:
        """Leave a request in the run's inbox, once per incident; returns the alarm's action text."""
        if not self._act:
            return ""
        if verb not in self._asked:
            self._asked.add(verb)
            self._requests[verb] = PeriodicProbe(looks.request, math.inf, run=str(self._run), verb=verb)
        return f"asked the run to {verb}"

    def _poll_requests(self, now: float) -> None:
        """A full disk takes no request: then send a stop as a signal to a rank, and retry a save later."""
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

    # ------------------------------------------------------------------ what the journal says

    def _read(self, entry: dict[str, Any], *, mine: bool) -> None:
        """An entry of the journal; `mine`: of this start."""
        kind, step = entry["kind"], entry.get("step")
        if kind == "start" and mine:
            self._world = entry.get("world") or 1
            if self.need is None and entry.get("parameters"):
                self.need = upcoming.first_need(entry["parameters"], self._world)
        elif kind == "checkpoint" and entry["seconds"]:
            self.speed = entry["bytes"] / entry["seconds"]
            self._judge_speed(entry["seconds"], step if mine else None)
            if mine:
                for key in ("checkpoint-failed", "checkpoint-missing"):
                    self.resolve(key, f"step {step} was saved", step=step)
        elif kind == "checkpoint-missing" and mine:
            self.open(
                kind,
                Severity.CRIT,
                entry["text"],
                "steps after the older one are trained again",
                "check whether a mount is missing, or checkpoints were deleted",
                step=step,
            )
        elif kind == "control" and mine and (every := entry.get("entry", {}).get("checkpoint", {}).get("every")):
            before, asked, place = self._every, Progress.parse(every), entry["consumed"]
            self._every = lambda consumed: asked if consumed > place else before(consumed)
        elif kind == "checkpoint-failed" and mine:
            self.failures += 1
            self.open(
                kind,
                Severity.CRIT,
                f"step {step} could not be saved, {entry['text']}",
                "training goes on; its steps are in no checkpoint",
                "repair the storage; the save is retried automatically",
                step=step,
                facts={"failures": entry.get("failures")},
            )

    def _judge_speed(self, seconds: float, step: int | None) -> None:
        """`step`: None for saves of earlier starts, which only serve as history."""
        typical = self._typical_save()
        if step is not None and typical is not None:
            text = f"the save of step {step} took {human_time(seconds)}"
            if seconds > max(_MIN_SLOW_SECONDS, _SLOW_TIMES * typical):
                self.open(
                    "checkpoint-speed",
                    Severity.WARN,
                    f"{text}; {human_time(typical)} is typical",
                    "checkpoints come late; a save that is not done delays the next",
                    "check whether something else uses the storage",
                    step=step,
                )
                return  # keep slow saves out of the history, or slowness would become normal
            self.resolve("checkpoint-speed", text, step=step)
        self._saves.append(seconds)

    def _typical_save(self) -> float | None:
        """Median seconds of a save; None before there were enough."""
        return median(self._saves) if len(self._saves) >= _LEAST_HISTORY else None

    # ------------------------------------------------------------------ what is on storage

    def _judge_damage(self, found: dict[str, Any]) -> None:
        self._bad = {name: why for name, why in self._bad.items() if name in found["names"]}
        damaged = {f"checkpoint-damaged/{name}": (name, why) for name, why in (found["problems"] | self._bad).items()}
        for key, (name, why) in damaged.items():
            self.open(
                key,
                Severity.CRIT,
                f"{name} is damaged: {why}",
                "it cannot be used; a start continues from an older one",
                f"see `fsdp-pretrain checkpoints {self._run} list`; keep the older ones until there is a newer",
            )
        self.resolve_others("checkpoint-damaged", damaged, "it is gone, or intact")

    def _judge_writers(self, writing: dict[str, int], now: float) -> None:
        """Whether the save in flight grows."""
        known = {name: self._grown.get(name, (size, now)) for name, size in writing.items()}
        self._grown = {name: known[name] if size == known[name][0] else (size, now) for name, size in writing.items()}
        typical, least = self._typical_save(), _STILL_SECONDS
        allowed = _STILL_FIRST * least if typical is None else max(least, typical)
        seconds, name = max(((now - since, name) for name, (_, since) in self._grown.items()), default=(0.0, ""))
        if seconds > allowed:
            self.open(
                "checkpoint-writer",
                Severity.CRIT,
                f"{name} has not grown for {human_time(seconds)}, at {human_bytes(writing[name])}",
                "its writer hangs, and the next save waits for it",
                "check whether the storage responds; training is not affected yet",
            )
        else:
            self.resolve("checkpoint-writer", "the writer makes progress, or has ended")
