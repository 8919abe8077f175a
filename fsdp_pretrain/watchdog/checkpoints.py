"""Checkpoints as they are seen from outside: how old the newest proved one is, and how saving goes. No torch.

The trainer retries, prunes and gives up by itself. This looks at what is on storage, whatever the trainer believes:
a run whose saves fail silently, or whose writer hangs, is told of and made to save or stop.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from ..checkpoint.space import BYTES_PER_PARAMETER, Need
from ..record.step_record import StepRecord
from ..severity import Severity
from ..statistics import score
from ..units import Progress, human_bytes, human_count, human_time
from ..watchdog_sections import StorageSection
from .alarms import Alarms
from .detector import Detector
from .probe import Look, Looks

_LATE, _VERY_LATE, _TOO_LATE = 1.5, 2.5, 4.0
"""Ages of the newest verified checkpoint, in intervals."""
_FIRST_STATE = 1.03
"""What a checkpoint takes beyond parameters and optimiser state, before there was one."""
_HISTORY, _LEAST_HISTORY = 20, 5
_SLOW_SCORE, _SLOW_TIMES, _SLOWEST_NOISE = -4.0, 3.0, 0.15
_NO_MATTER = 1.0
"""Seconds: shorter saves are never called slow."""
_STILL_FIRST = 5
"""Before any save was timed, a writer may stand still so many times longer."""
_AUDIT_DEADLINE = 3600.0


@dataclass(frozen=True)
class Attempt:
    """A save in flight.

    Attributes:
        begun: when it was first seen, monotonic seconds.
        bytes: so far.
        grown: when it was first seen to have so many.
    """

    begun: float
    bytes: int
    grown: float


class Checkpoints(Detector):
    """Alarms `checkpoint-age`, `checkpoint-failed`, `checkpoint-missing`, `checkpoint-writer`, `checkpoint-speed`,
    `checkpoint-fallback` and `checkpoint-damaged/NAME`.

    Args:
        alarms: where incidents are told.
        section: `[watchdog.storage]`.
        looks: makes the looks.
        run: the run directory.
        segment: number of this start.
        stores: directories with checkpoints, the run's own first.
        every: `checkpoint.every`.
        verify: checkpoints are verified after they were written (`checkpoint.verify`); else whole ones count.
        pids: processes of the ranks on this node, now.
        reached: the newest step that a rank of this node has begun; known also when the record cannot be written.
    """

    def __init__(
        self,
        alarms: Alarms,
        section: StorageSection,
        looks: Looks,
        *,
        run: Path,
        segment: int,
        stores: list[Path],
        every: Progress,
        verify: bool = True,
        pids: Callable[[], list[int]] = list,
        reached: Callable[[], int] = int,
    ) -> None:
        super().__init__(alarms)
        self._pids, self._reached = pids, reached
        self._section, self._looks, self._run, self._segment = section, looks, run, segment
        self._stores, self._every, self._which = stores, every, "verified" if verify else "newest"
        deadline = section.deadline.value
        directories = [str(path) for path in stores]
        journal = str(run / "journal.jsonl")
        self._look = Look(
            looks,
            "checkpoints",
            every=section.interval.value,
            deadline=deadline,
            directories=directories,
            chronicle=journal,
            offset=0,
        )
        self._audit = Look(
            looks,
            "checksum",
            every=section.audit.value,
            deadline=max(_AUDIT_DEADLINE, deadline),
            directories=directories,
        )
        self.need: Need | None = None
        """What the next checkpoint takes; None before anything is known."""
        self.completed = 0
        """How often a newer proved checkpoint was seen."""
        self.protected: int | None = None
        """Step of the newest proved checkpoint, or at which this start began."""
        self.failures = 0
        """Saves of this start that failed."""
        self.speed: float | None = None
        """Bytes per second of the last save."""
        self.age = 0.0
        """Seconds for which training has gone on without a newer one."""
        self._protected_tokens, self._since = 0, math.inf
        self._world = 1
        self._steps: deque[float] = deque(maxlen=64)
        self._saves: deque[tuple[float, float]] = deque(maxlen=_HISTORY)
        self._attempts: dict[str, Attempt] = {}
        self._bad: dict[str, str] = {}
        self._named: set[str] = set()
        self._asked: set[str] = set()
        self._requests: dict[str, int] = {}

    def step(self, record: StepRecord) -> None:
        """Look at a record."""
        self._steps.append(record.seconds.iteration)
        if self.protected is None:  # what this start continues from is protected, or nothing
            self.protected = record.step - 1
            self._protected_tokens = record.tokens - record.batch * record.sequence_length
        super().step(record)

    def tick(self, now: float) -> None:
        """Look, and take what earlier looks found."""
        answer = self._look.tick(now)
        if answer is not None and answer.error is None:
            self._see(answer.value, now)
            self._judge_age(now)  # only after a look: what is between two looks is not known
        self._see_to_requests(now)
        audit = self._audit.tick(now)
        if audit is not None and audit.value.get("wrong"):
            self._bad[audit.value["name"]] = "; ".join(audit.value["wrong"])
            self._look.soon()

    def _see(self, found: dict[str, Any], now: float) -> None:
        self._look.arguments["offset"] = found["offset"]
        self._read_journal(found["entries"])
        newest = found[self._which]
        if newest is not None:
            self.need = Need(newest["bytes"], newest["files"] + 2)
            if self.last and (self.protected is None or newest["step"] > self.protected):
                self.protected, self._protected_tokens = newest["step"], newest["tokens"] or 0
                self.completed, self._since = self.completed + 1, now
                self._judge_place(newest)
        self._judge_damage(found)
        self._judge_writers(found["writing"], now)
        self._look.every = self._section.interval.value / (4 if found["writing"] else 1)

    # ------------------------------------------------------------------ how old the newest is

    def _judge_age(self, now: float) -> None:
        """From the first step that no proved checkpoint holds; a run that makes few steps loses few, however long."""
        record = self.last
        if record is None or self.protected is None:
            return
        if record.step <= self.protected:
            self._since, self.age = now, 0.0
        self._since = min(self._since, now)
        self.age = now - self._since
        between = self._steps_between(record)
        interval = between * median(self._steps)
        made = max(record.step, self._reached()) - self.protected
        intervals = min(self.age / interval, made / between)
        late = max(_LATE * interval + self._longest_save(), self._section.interval.value)
        if self.age <= late or intervals <= _LATE:
            self._asked.clear()
            self.alarms.resolve("checkpoint-age", f"step {self.protected} is verified", step=record.step)
            return
        over = self.age > max(self._section.max_unprotected.value, late)
        action = ""
        if over or intervals > _TOO_LATE:
            action = self._ask("stop")
        elif intervals > _VERY_LATE:
            action = self._ask("save")
        tokens = record.tokens - self._protected_tokens
        causes = sorted(
            {a.key for a in self.alarms if a.detector in ("disk", "checkpoint-failed", "checkpoint-writer")}
        )
        self.alarms.open(
            "checkpoint-age",
            Severity.CRIT if over or intervals > _VERY_LATE else Severity.WARN,
            f"no checkpoint was verified for {human_time(self.age)}, {intervals:.1f} intervals"
            + (f" (see {', '.join(causes)})" if causes else ""),
            effect=f"{made} steps, {human_count(tokens)} tokens and "
            f"{self.age * self._world / 3600:.3g} GPU-hours would be lost now",
            remedy="mend the storage, or name another (checkpoint.fallback_dir)",
            step=record.step,
            action=action,
            facts={"age_seconds": self.age, "verified_step": self.protected, "tokens": tokens},
        )

    def _steps_between(self, record: StepRecord) -> float:
        """Steps between two checkpoints at the present batch."""
        samples = {"step": record.batch, "sample": 1, "token": 1 / record.sequence_length}
        return float(self._every.value * samples[self._every.unit] / record.batch)

    def _ask(self, verb: str) -> str:
        """Leave a request in the run's inbox, once per incident; what to say of it."""
        if not self._section.act:
            return ""
        if verb not in self._asked:
            self._asked.add(verb)
            self._requests[verb] = self._looks.ask("request", {"run": str(self._run), "verb": verb})
        return f"asked the run to {verb}"

    def _see_to_requests(self, now: float) -> None:
        """A full disk takes no request: a stop goes to a rank as a signal then, a save is asked for again."""
        for verb, ticket in list(self._requests.items()):
            answer = self._looks.take(ticket, now)
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

    def _longest_save(self) -> float:
        """The 99% quantile of the seconds that saves took; the longest of a few."""
        seconds = [duration for _, duration in self._saves]
        if len(seconds) < 2:
            return sum(seconds)
        return min(max(seconds), quantiles(seconds, n=100, method="inclusive")[98])

    # ------------------------------------------------------------------ what the journal says

    def _read_journal(self, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            mine = entry.get("segment") == self._segment
            if entry["kind"] == "start" and mine:
                self._world = entry.get("world") or 1
                if self.need is None and entry.get("parameters"):
                    self.need = Need(int(_FIRST_STATE * BYTES_PER_PARAMETER * entry["parameters"]), 1 + self._world)
            elif entry["kind"] == "checkpoint" and entry["seconds"]:
                self.speed = entry["bytes"] / entry["seconds"]
                self._judge_speed(entry["bytes"], entry["seconds"], entry["step"] if mine else None)
                if mine:
                    for key in ("checkpoint-failed", "checkpoint-missing"):
                        self.alarms.resolve(key, f"step {entry['step']} was saved", step=entry["step"])
            elif entry["kind"] == "checkpoint-missing" and mine:
                self.alarms.open(
                    "checkpoint-missing",
                    Severity.CRIT,
                    entry["text"],
                    effect="what was trained after the older one is trained again",
                    remedy="see whether a mount is missing (checkpoint.fallback_dir?), or somebody deleted checkpoints",
                    step=entry["step"],
                )
            elif entry["kind"] == "checkpoint-failed" and mine:
                self.failures += 1
                self.alarms.open(
                    "checkpoint-failed",
                    Severity.CRIT,
                    f"step {entry.get('step')} could not be saved, {entry['text']}",
                    effect="training goes on; what it does now is in no checkpoint",
                    remedy="mend the storage; the save is tried again by itself",
                    step=entry.get("step"),
                    facts={"failures": entry.get("failures")},
                )

    def _judge_speed(self, size: float, seconds: float, step: int | None) -> None:
        """`step`: None for saves of earlier starts, which are only learned from."""
        speed = math.log(max(1.0, size) / seconds)
        typical = self._typical_save()
        if step is not None and typical is not None:
            away = score(speed, [known for known, _ in self._saves], _SLOWEST_NOISE)
            if seconds > _NO_MATTER and (away < _SLOW_SCORE or seconds > _SLOW_TIMES * typical):
                self._tell_slow(f"the save of step {step} took {human_time(seconds)}", typical, step)
                return  # a slow one is not learned from, or slowness would become the rule
            self.alarms.resolve("checkpoint-speed", f"the save of step {step} took {human_time(seconds)}", step=step)
        self._saves.append((speed, seconds))

    def _typical_save(self) -> float | None:
        """Median seconds of a save; None before there were a few."""
        return median(seconds for _, seconds in self._saves) if len(self._saves) >= _LEAST_HISTORY else None

    def _tell_slow(self, what: str, typical: float, step: int | None) -> None:
        self.alarms.open(
            "checkpoint-speed",
            Severity.WARN,
            f"{what}; {human_time(typical)} is typical",
            effect="checkpoints come late; a save that is not done delays the next",
            remedy="see whether something else uses the storage",
            step=step,
        )

    # ------------------------------------------------------------------ what is on storage

    def _judge_place(self, newest: dict[str, Any]) -> None:
        path = Path(newest["path"])
        if path.parent == self._stores[0]:
            self.alarms.resolve("checkpoint-fallback", f"{path} is in the run directory", step=newest["step"])
            return
        self.alarms.open(
            "checkpoint-fallback",
            Severity.WARN,
            f"{path} was written to the fallback: the run directory did not take it",
            effect="the run goes on from there when it is started again",
            remedy="mend the storage of the run directory",
            step=newest["step"],
        )

    def _judge_damage(self, found: dict[str, Any]) -> None:
        self._bad = {name: why for name, why in self._bad.items() if name in found["names"]}
        damaged = {**found["problems"], **self._bad}
        for name, why in damaged.items():
            self.alarms.open(
                f"checkpoint-damaged/{name}",
                Severity.CRIT,
                f"{name} is damaged: {why}",
                effect="it cannot be used; a start goes on from an older one",
                remedy=f"see `fsdp-pretrain checkpoints {self._run} list`; keep the older ones until there is a newer",
                step=self.at,
            )
        for name in self._named - damaged.keys():
            self.alarms.resolve(f"checkpoint-damaged/{name}", f"{name} is gone, or whole", step=self.at)
        self._named = set(damaged)

    def _judge_writers(self, writing: dict[str, int], now: float) -> None:
        """Whether the save in flight grows, and how long it takes."""
        typical, step = self._typical_save(), self.at
        seen = {}
        for name, size in writing.items():
            attempt = self._attempts.get(name, Attempt(now, size, now))
            seen[name] = attempt if size == attempt.bytes else replace(attempt, bytes=size, grown=now)
        self._attempts = seen
        still_for = self._section.still.value
        allowed = _STILL_FIRST * still_for if typical is None else max(still_for, typical)
        still = [(now - attempt.grown, name) for name, attempt in seen.items() if now - attempt.grown > allowed]
        if still:
            seconds, name = max(still)
            self.alarms.open(
                "checkpoint-writer",
                Severity.CRIT,
                f"{name} has not grown for {human_time(seconds)}, at {human_bytes(seen[name].bytes)}",
                effect="its writer hangs, and the next save waits for it",
                remedy="see whether the storage answers; training is not affected yet",
                step=step,
            )
            return
        self.alarms.resolve("checkpoint-writer", "the writer writes, or has ended", step=step)
        for name, attempt in seen.items():
            lasted = now - attempt.begun
            if typical is not None and lasted > max(_NO_MATTER, _SLOW_TIMES * typical):
                self._tell_slow(f"{name} is being written for {human_time(lasted)}", typical, step)
