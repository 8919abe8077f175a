"""Looks that may hang, each in a thread of its own.

A file system that is gone blocks whoever touches it, and a driver whoever asks it. So the watchdog does neither in its
passes: a thread looks, and one that is late is left behind. Starting a look and taking its answer never blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from fsdp_pretrain.checkpoint import upcoming

DEADLINE_SECONDS = 15.0
"""How long a look may take; if a mount misses it twice in a row, an alarm is raised."""
AUDIT_SECONDS, AUDIT_DEADLINE = 3600.0, 3600.0
"""Between two audits: every shard of every corpus exists with the right size, one file of the newest verified
checkpoint still has the bytes that were written; and how long one may take."""
THREADS = "look at "
"""Beginning of the names of the threads."""


@dataclass(frozen=True)
class ProbeAnswer:
    """The outcome of a look.

    Attributes:
        value: what it found; empty if it failed or was late.
        error: why it failed; None if it did not.
        errno: of the error, if there is one.
        late: consecutive looks that were late; 0 if this one was not.
    """

    value: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    errno: int | None = None
    late: int = 0


class PeriodicProbe:
    """One look, repeated.

    Args:
        look: called in a thread, with `arguments`.

    Attributes:
        every: seconds from one to the next; it must answer within `deadline`. 0: those of most looks.
        arguments: may be changed between two looks.
        due: when to look next, of `time.monotonic()`; at once at first.
    """

    def __init__(
        self, look: Callable[..., dict[str, Any]], every: float = 0.0, deadline: float = 0.0, **arguments: Any
    ) -> None:
        self._look, self.arguments = look, arguments
        self.every, self._deadline = every or upcoming.CHECK_SECONDS, deadline or DEADLINE_SECONDS
        self._answers: SimpleQueue[ProbeAnswer] = SimpleQueue()
        self._asked: float | None = None
        self.due, self._late = 0.0, 0

    def tick(self, now: float) -> ProbeAnswer | None:
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
                name = f"{THREADS}{getattr(self._look, '__name__', self._look)}"
                threading.Thread(target=self._run, args=({**self.arguments},), name=name, daemon=True).start()
            return None
        if now - self._asked < self._deadline:
            return None
        self._asked, self._late = None, self._late + 1
        self.due = max(self.due, now + self.every * (self._late - 1))  # rarer: each may leave another thread behind
        return ProbeAnswer(error=f"no answer within {self._deadline:g} s", late=self._late)

    def _run(self, arguments: dict[str, Any]) -> None:
        try:
            answer = ProbeAnswer(self._look(**arguments))
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else None
            answer = ProbeAnswer(error=f"{type(error).__name__}: {error}", errno=number)
        self._answers.put(answer)
