"""Periodic probes that may hang, each run in a thread of its own.

A lost file system blocks every access, and a broken driver every query. So the watchdog's passes do neither: a thread
runs the probe, and a late thread is abandoned. Starting a probe and taking its answer never blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from fsdp_pretrain.checkpoint import upcoming

T = TypeVar("T")
DEADLINE_SECONDS = 15.0
"""How long a probe may take; if a mount misses it twice in a row, an alarm is raised."""
AUDIT_SECONDS, AUDIT_DEADLINE = 3600.0, 3600.0
"""Seconds between two audits (every shard of every corpus exists with the right size; one file of the newest verified
checkpoint still has the bytes that were written), and how long one may take."""
THREADS = "look"
"""Name of the threads."""


@dataclass(frozen=True)
class ProbeAnswer(Generic[T]):
    """The outcome of a probe."""

    value: T | None = None  # its result; None if it failed or was late
    error: str | None = None  # why it failed; None if it succeeded
    errno: int | None = None  # number of the error, if it has one
    late: int = 0  # number of consecutive late probes; 0 if this one was in time


class PeriodicProbe(Generic[T]):
    """A function `look`, called regularly in a thread.

    Attributes:
        look: the function; may be replaced between two calls.
        every: seconds from one call to the next, which must return within `deadline`. 0: the default for either.
        due: when to call it next, in seconds of `time.monotonic()`; at first, at once.
    """

    def __init__(self, look: Callable[[], T], every: float = 0.0, deadline: float = 0.0) -> None:
        self.look = look
        self.every, self._deadline = every or upcoming.CHECK_SECONDS, deadline or DEADLINE_SECONDS
        self._answers: SimpleQueue[ProbeAnswer[T]] = SimpleQueue()
        self._asked: float | None = None
        self.due = 0.0
        self._late = 0

    def tick(self, now: float) -> ProbeAnswer[T] | None:
        """Start a call when due. Returns the outcome of a call once known, also of one that was abandoned as late."""
        try:
            answer = self._answers.get_nowait()
        except Empty:
            pass
        else:
            self._asked, self._late = None, 0
            return answer
        if self._asked is None:
            if now >= self.due:
                self._asked, self.due = now, now + self.every
                threading.Thread(target=self._run, args=(self.look,), name=THREADS, daemon=True).start()
            return None
        if now - self._asked < self._deadline:
            return None
        self._asked, self._late = None, self._late + 1
        self.due = max(self.due, now + self.every * (self._late - 1))  # rarer, as each may abandon another thread
        return ProbeAnswer(error=f"no answer within {self._deadline:g} s", late=self._late)

    def result(self, now: float) -> T | None:
        """Like `tick`, but return only the result of a call that succeeded: `MountDetector` reports failures."""
        answer = self.tick(now)
        return None if answer is None else answer.value

    def _run(self, look: Callable[[], T]) -> None:
        try:
            answer = ProbeAnswer(look())
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else None
            answer = ProbeAnswer(error=f"{type(error).__name__}: {error}", errno=number)
        self._answers.put(answer)
