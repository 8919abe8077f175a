"""Looks that may hang, each in a thread of its own.

A file system that is gone blocks whoever touches it, and a driver whoever asks it. So the watchdog does neither in its
passes: a thread looks, and one that is late is left behind. Starting a look and taking its answer never blocks.
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
"""How long a look may take; if a mount misses it twice in a row, an alarm is raised."""
AUDIT_SECONDS, AUDIT_DEADLINE = 3600.0, 3600.0
"""Between two audits: every shard of every corpus exists with the right size, one file of the newest verified
checkpoint still has the bytes that were written; and how long one may take."""
THREADS = "look"
"""Name of the threads."""


@dataclass(frozen=True)
class ProbeAnswer(Generic[T]):
    """The outcome of a look.

    Attributes:
        value: what it found; None if it failed or was late.
        error: why it failed; None if it did not.
        errno: of the error, if there is one.
        late: consecutive looks that were late; 0 if this one was not.
    """

    value: T | None = None
    error: str | None = None
    errno: int | None = None
    late: int = 0


class PeriodicProbe(Generic[T]):
    """One look, repeated.

    Attributes:
        look: called in a thread; may be replaced between two looks.
        every: seconds from one to the next; it must answer within `deadline`. 0: those of most looks.
        due: when to look next, of `time.monotonic()`; at once at first.
    """

    def __init__(self, look: Callable[[], T], every: float = 0.0, deadline: float = 0.0) -> None:
        self.look = look
        self.every, self._deadline = every or upcoming.CHECK_SECONDS, deadline or DEADLINE_SECONDS
        self._answers: SimpleQueue[ProbeAnswer[T]] = SimpleQueue()
        self._asked: float | None = None
        self.due, self._late = 0.0, 0

    def tick(self, now: float) -> ProbeAnswer[T] | None:
        """Start a look when due; returns the outcome of one once known. Also one that was left behind may answer."""
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
        self.due = max(self.due, now + self.every * (self._late - 1))  # rarer: each may leave another thread behind
        return ProbeAnswer(error=f"no answer within {self._deadline:g} s", late=self._late)

    def found(self, now: float) -> T | None:
        """The same for who needs no reason: what a look has found, once known. `MountDetector` reports what fails."""
        answer = self.tick(now)
        return None if answer is None else answer.value

    def _run(self, look: Callable[[], T]) -> None:
        try:
            answer = ProbeAnswer(look())
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else None
            answer = ProbeAnswer(error=f"{type(error).__name__}: {error}", errno=number)
        self._answers.put(answer)
