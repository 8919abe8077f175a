"""Probes that may hang, requested from a process that must not. No torch.

A file system that is gone blocks any process that touches it. So the watchdog touches none: a helper process forks a
child per probe (see `worker`); one that is late is killed, counted and, if even that has no effect, abandoned.
Requesting probes and taking answers never blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fsdp_pretrain.checkpoint import upcoming
from fsdp_pretrain.deadline import Helper

DEADLINE_SECONDS = 15.0
"""How long a probe may take; if a mount misses it twice in a row, an alarm is raised."""
AUDIT_SECONDS, AUDIT_DEADLINE = 3600.0, 3600.0
"""Between two audits: every shard of every corpus exists with the right size, one file of the newest verified
checkpoint still has the bytes that were written; and how long one may take."""
_PATIENCE = 5.0
"""Seconds for the helper to confirm that it kills a probe; then it is replaced."""
_COSTLY, _COST_FACTOR = 0.2, 100.0
"""A probe that takes more CPU seconds than the first repeats at most after a hundred times what it took."""


@dataclass(frozen=True)
class ProbeAnswer:
    """The outcome of a probe.

    Attributes:
        value: what it found; empty if it failed or was late.
        error: why it failed; None if it did not.
        errno: of the error, if there is one.
        late: consecutive probes that were late; 0 if this one was not.
        seconds, cpu: how long it took, and its CPU seconds.
    """

    value: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    errno: int | None = None
    late: int = 0
    seconds: float = 0.0
    cpu: float = 0.0


class ProbeServer:
    """The helper that forks a child for every probe. One for a whole watchdog."""

    def __init__(self) -> None:
        self._helper = Helper("fsdp_pretrain.watchdog.probes.worker")
        self._tickets = 0
        self._answers: dict[int, ProbeAnswer | None] = {}
        self._kill_at: float | None = None

    @property
    def pid(self) -> int | None:
        return self._helper.pid

    @property
    def waiting(self) -> int:
        """Probes that are running, or whose answers were not taken yet."""
        return len(self._answers)

    def ask(self, probe: str, arguments: dict[str, Any]) -> int:
        """Start a probe; the ticket for its answer."""
        self._tickets += 1
        if self._helper.send({"ticket": self._tickets, "look": probe, "arguments": arguments}):
            self._answers[self._tickets] = None
        return self._tickets

    def take(self, ticket: int, now: float) -> ProbeAnswer | None:
        """The answer for a ticket, once; None while there is none."""
        for answer in self._helper.receive():
            self._kill_at = None
            found = answer.pop("ticket")
            if found in self._answers and answer:  # empty: the helper confirms a kill
                self._answers[found] = ProbeAnswer(**answer)
        if self._helper.ended or (self._kill_at is not None and now - self._kill_at > _PATIENCE):
            self.replace()
        if ticket not in self._answers:
            return ProbeAnswer(error="its helper was replaced")
        if self._answers[ticket] is None:
            return None
        return self._answers.pop(ticket)

    def kill(self, ticket: int, now: float) -> None:
        """Kill a probe. Its answer comes when it has ended, which may be never."""
        self._helper.send({"ticket": ticket, "kill": True})
        self._kill_at = self._kill_at or now

    def replace(self) -> None:
        """Replace the helper; running probes are abandoned."""
        self._helper.replace()
        self._answers.clear()
        self._kill_at = None


class PeriodicProbe:
    """One probe, repeated.

    Attributes:
        every: seconds from one to the next; it must answer within `deadline`. 0: those of most probes.
        arguments: of the function of this name in `worker.PROBES`; may be changed between two probes.
        due: when to probe next, of `time.monotonic()`; at once at first.
    """

    def __init__(
        self, server: ProbeServer, name: str, every: float = 0.0, deadline: float = 0.0, **arguments: Any
    ) -> None:
        self._server, self._name, self.arguments = server, name, arguments
        self.every, self._deadline = every or upcoming.CHECK_SECONDS, deadline or DEADLINE_SECONDS
        self._ticket: int | None = None
        self._asked = self.due = 0.0
        self._late, self._is_late = 0, False

    def tick(self, now: float) -> ProbeAnswer | None:
        """Start the probe when due; returns its outcome once known. A hanging probe is reported repeatedly."""
        if self._ticket is None:
            if now >= self.due:
                self._ticket, self._asked, self._is_late = self._server.ask(self._name, self.arguments), now, False
                self.due = now + self.every
            return None
        answer = self._server.take(self._ticket, now)
        if answer is not None:
            self._ticket = None
            if self._is_late:  # already reported
                return None
            self._late = 0
            if answer.cpu > _COSTLY:
                self.due = max(self.due, now + _COST_FACTOR * answer.cpu)
            return answer
        if now < (self.due if self._is_late else self._asked + self._deadline):
            return None
        if not self._is_late:
            self._server.kill(self._ticket, now)
        self.due = max(self.due, now) + (self.every if self._is_late else 0)
        self._is_late, self._late = True, self._late + 1
        return ProbeAnswer(error=f"no answer within {self._deadline:g} s", late=self._late, seconds=now - self._asked)
