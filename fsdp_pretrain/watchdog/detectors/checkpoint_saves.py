"""Watches saves from outside the trainer: failed and slow saves, hanging writers, damaged checkpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from fsdp_pretrain.checkpoint import upcoming
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_bytes, human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .checkpoint_store import StoreDetector, StoreState

_LEAST_HISTORY = 5
_SLOW_TIMES = 3.0
_MIN_SLOW_SECONDS = 3.0
"""Seconds: shorter saves are never reported as slow."""
_STILL_FIRST = 5
"""Factor by which a writer may stall longer before any save was timed."""
_STILL_SECONDS = 60.0
"""A writer hangs if its save has not grown for so long, and for as long as a typical save (`_STILL_FIRST` times longer
before that is known)."""


class SaveDetector(StoreDetector):
    """Alarms `checkpoint-failed`, `checkpoint-missing`, `checkpoint-writer`, `checkpoint-speed` and
    `checkpoint-damaged/NAME`."""

    def __init__(self, alarms: AlarmSink, segment: int, run: RunDir) -> None:
        super().__init__(alarms, segment)
        self._run = run
        self._saves: deque[float] = deque(maxlen=upcoming.SAVES)
        self._failures = 0
        self._speed: float | None = None
        self._grown: dict[str, tuple[int, float]] = {}  # bytes of a save in flight, and when it last grew

    def figures(self) -> dict[str, Any]:
        """Failed saves of this start, and bytes per second of the last save."""
        return {"checkpoint_failures": self._failures, "checkpoint_bytes_per_second": self._speed}

    def judge(self, state: StoreState, now: float) -> None:
        """Judge new journal entries, damaged checkpoints, and saves in flight."""
        with self.learning():
            self._judge_entries(state.entries[: state.known])
        self._judge_entries(state.entries[state.known :])
        self._judge_damage(state.damaged)
        self._judge_writers(state.writing, now)

    # ------------------------------------------------------------------ journal entries

    def _judge_entries(self, entries: Sequence[dict[str, Any]]) -> None:
        for entry in entries:
            if entry["kind"] == "checkpoint":
                self._judge_save(entry)
            elif self.is_mine(entry):
                self._judge_failure(entry)

    def _judge_failure(self, entry: dict[str, Any]) -> None:
        if entry["kind"] == "checkpoint-missing":
            self.open(
                "checkpoint-missing",
                Severity.CRIT,
                entry["text"],
                "steps after the older one are trained again",
                "check whether a mount is missing, or checkpoints were deleted",
                step=entry.get("step"),
            )
        elif entry["kind"] == "checkpoint-failed":
            self._failures += 1
            self.open(
                "checkpoint-failed",
                Severity.CRIT,
                f"step {entry.get('step')} could not be saved, {entry['text']}",
                "training continues; its steps are in no checkpoint",
                "repair the storage; the save is retried automatically",
                step=entry.get("step"),
                facts={"failures": entry.get("failures")},
            )

    def _judge_save(self, entry: dict[str, Any]) -> None:
        """Judge the duration of a save; saves of earlier starts serve only as history."""
        seconds, step = entry["seconds"], entry["step"]
        if not seconds:
            return
        self._speed = entry["bytes"] / seconds
        slow = self.is_mine(entry) and self._is_slow(seconds, step)
        if not slow:  # else slowness would become normal
            self._saves.append(seconds)
        if self.is_mine(entry):
            for key in ("checkpoint-failed", "checkpoint-missing"):
                self.resolve(key, f"step {step} was saved", step=step)

    def _is_slow(self, seconds: float, step: int) -> bool:
        """Whether a save was slow, which opens or resolves the alarm."""
        typical = self._typical_save()
        if typical is None:
            return False
        text = f"the save of step {step} took {human_time(seconds)}"
        if seconds <= max(_MIN_SLOW_SECONDS, _SLOW_TIMES * typical):
            self.resolve("checkpoint-speed", text, step=step)
            return False
        self.open(
            "checkpoint-speed",
            Severity.WARN,
            f"{text}; {human_time(typical)} is typical",
            "checkpoints come late; a save that is not done delays the next",
            "check whether something else uses the storage",
            step=step,
        )
        return True

    def _typical_save(self) -> float | None:
        """Median seconds of a save; None until enough were timed."""
        return median(self._saves) if len(self._saves) >= _LEAST_HISTORY else None

    def longest_save(self) -> float:
        """Seconds of nearly the longest of the last saves, without slow ones; 0 before the first."""
        return upcoming.longest_save(self._saves)

    # ------------------------------------------------------------------ the storage

    def _judge_damage(self, damaged: dict[str, str]) -> None:
        for name, why in damaged.items():
            self.open(
                f"checkpoint-damaged/{name}",
                Severity.CRIT,
                f"{name} is damaged: {why}",
                "it cannot be used; a start continues from an older one",
                f"see `fsdp-pretrain checkpoints {self._run.path} list`; keep the older ones until there is a newer",
            )
        keys = [f"checkpoint-damaged/{name}" for name in damaged]
        self.resolve_others("checkpoint-damaged", keys, "it is gone, or intact")

    def _judge_writers(self, writing: dict[str, int], now: float) -> None:
        """Open or resolve the alarm by whether the saves in flight grow."""
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
