"""Looks that may hang, asked for from a process that must not. No torch.

A file system that went away blocks whoever touches it. So the watchdog touches none: a helper process forks a child for
every probe (see `worker`), and one that does not come back in time is killed, counted and, if even that has no effect,
left where it is. Asking and taking answers never waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fsdp_pretrain.deadline import Helper

_PATIENCE = 5.0
"""Seconds for the helper itself to answer that it kills a look; then it is replaced."""
_DEAR, _COST = 0.2, 100.0
"""A look that takes more CPU seconds than the first comes back at most after a hundred times what it took."""


@dataclass(frozen=True)
class ProbeAnswer:
    """What became of a look.

    Attributes:
        value: what it found; empty if it failed or did not come back.
        error: why it failed; None if it did not.
        errno: of the error, where the system gave one.
        late: how many looks in a row did not come back in time; 0 if this one did.
        seconds, cpu: how long it took, and what of a processor.
    """

    value: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    errno: int | None = None
    late: int = 0
    seconds: float = 0.0
    cpu: float = 0.0


class ProbeServer:
    """The helper that forks a child for every look. One for a whole watchdog."""

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
        """Looks that are under way, or whose answers were not taken yet."""
        return len(self._answers)

    def ask(self, look: str, arguments: dict[str, Any]) -> int:
        """Begin a look; the ticket for its answer."""
        self._tickets += 1
        if self._helper.send({"ticket": self._tickets, "look": look, "arguments": arguments}):
            self._answers[self._tickets] = None
        return self._tickets

    def take(self, ticket: int, now: float) -> ProbeAnswer | None:
        """The answer for a ticket, once; None while there is none."""
        for answer in self._helper.receive():
            self._kill_at = None
            found = answer.pop("ticket")
            if found in self._answers and answer:  # empty: the helper answers that it kills it
                self._answers[found] = ProbeAnswer(**answer)
        if self._helper.ended or (self._kill_at is not None and now - self._kill_at > _PATIENCE):
            self.replace()
        if ticket not in self._answers:
            return ProbeAnswer(error="its helper was replaced")
        if self._answers[ticket] is None:
            return None
        return self._answers.pop(ticket)

    def kill(self, ticket: int, now: float) -> None:
        """End a look. Its answer comes when it has ended, which may be never."""
        self._helper.send({"ticket": ticket, "kill": True})
        self._kill_at = self._kill_at or now

    def replace(self) -> None:
        """End the helper; what was being looked at is given up."""
        self._helper.replace()
        self._answers.clear()
        self._kill_at = None


class PeriodicProbe:
    """One look, repeated.

    Attributes:
        every: seconds from one to the next; it must come back in `deadline`.
        arguments: of the function of this name in `worker.LOOKS`; may be changed between two looks.
        due: when to look next, of `time.monotonic()`; at once at first.
    """

    def __init__(self, looks: ProbeServer, name: str, *, every: float, deadline: float, **arguments: Any) -> None:
        self._looks, self._name, self.every, self._deadline, self.arguments = looks, name, every, deadline, arguments
        self._ticket: int | None = None
        self._asked = self.due = 0.0
        self._late, self._is_late = 0, False

    def soon(self) -> None:
        self.due = 0.0

    def tick(self, now: float) -> ProbeAnswer | None:
        """Ask if it is time to; what became of it, once that is known. A look that goes on hanging is said again."""
        if self._ticket is None:
            if now >= self.due:
                self._ticket, self._asked, self._is_late = self._looks.ask(self._name, self.arguments), now, False
                self.due = now + self.every
            return None
        answer = self._looks.take(self._ticket, now)
        if answer is not None:
            self._ticket = None
            if self._is_late:  # it was said already
                return None
            self._late = 0
            if answer.cpu > _DEAR:
                self.due = max(self.due, now + _COST * answer.cpu)
            return answer
        if now < (self.due if self._is_late else self._asked + self._deadline):
            return None
        if not self._is_late:
            self._looks.kill(self._ticket, now)
        self.due = max(self.due, now) + (self.every if self._is_late else 0)
        self._is_late, self._late = True, self._late + 1
        return ProbeAnswer(error=f"no answer within {self._deadline:g} s", late=self._late, seconds=now - self._asked)
