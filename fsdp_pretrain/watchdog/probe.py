"""Looks that may hang, asked for from a process that must not. No torch.

A file system that went away blocks whoever touches it, for hours and without a signal getting through. So the watchdog
touches none: a helper process forks a child for every look (see `looks`), and a look that does not come back in time is
killed, counted and, if even that has no effect, left where it is. Asking and taking answers never waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from dataclasses import dataclass
from typing import Any

from ..child_process import start_module

_PATIENCE = 5.0
"""Seconds for the helper itself to say that it heard of a kill; then it is replaced."""
_DEAR, _COST = 0.2, 100.0
"""A look that takes more CPU seconds than the first comes back at most every so many times what it took."""


class Helper:
    """A child process that answers lines of JSON with lines of JSON. Started when it is first asked, or has ended.

    Args:
        module: run as `python -m`.
        arguments: of it.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = (module, *arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._left: list[subprocess.Popen[bytes]] = []
        self._partial = b""

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it was started and is gone."""
        return self._process is not None and self._process.poll() is not None

    def send(self, request: dict[str, Any]) -> bool:
        """Ask; whether the helper is there to take it. Never blocks."""
        try:
            if self._process is None or self.ended:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            line = json.dumps(request).encode() + b"\n"
            return os.write(self._process.stdin.fileno(), line) == len(line)
        except OSError:  # it ended, or takes nothing more; or there is no memory for another process
            return False

    def receive(self) -> list[dict[str, Any]]:
        """The answers that are there. Never blocks."""
        self._left = [process for process in self._left if process.poll() is None]
        if self._process is None or self._process.stdout is None:
            return []
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._process.stdout.fileno(), 1 << 16):
                self._partial += chunk
        *lines, self._partial = self._partial.split(b"\n")
        return [json.loads(line) for line in lines]

    def replace(self) -> None:
        """Kill it, without waiting for its end; the next request starts another."""
        if self._process is not None:
            self._process.kill()
            self._left.append(self._process)
            self._process, self._partial = None, b""

    def _start(self) -> None:
        self._process, self._partial = None, b""
        self._process = start_module(
            *self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            bufsize=0,
        )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)


@dataclass(frozen=True)
class Answer:
    """What became of a look.

    Attributes:
        value: what it found; empty if it failed or did not come back.
        error: why it failed; None if it did not.
        errno: of the error, where the system gave one.
        late: how many looks in a row did not come back in time; 0 if this one did.
        seconds: how long it took.
    """

    value: dict[str, Any]
    error: str | None = None
    errno: int | None = None
    late: int = 0
    seconds: float = 0.0


class Looks:
    """The helper that forks a child for every look. One for a whole watchdog."""

    def __init__(self) -> None:
        self._helper = Helper("fsdp_pretrain.watchdog.looks")
        self._tickets = 0
        self._open: set[int] = set()
        self._answers: dict[int, dict[str, Any]] = {}
        self._kill_at: float | None = None

    @property
    def pid(self) -> int | None:
        """Of the helper."""
        return self._helper.pid

    @property
    def waiting(self) -> int:
        """Looks that are under way, or whose answers were not taken yet."""
        return len(self._open)

    def ask(self, look: str, arguments: dict[str, Any]) -> int:
        """Begin a look; the ticket for its answer."""
        self._tickets += 1
        if self._helper.send({"ticket": self._tickets, "look": look, "arguments": arguments}):
            self._open.add(self._tickets)
        return self._tickets

    def take(self, ticket: int, now: float) -> dict[str, Any] | None:
        """The answer for a ticket, once; None while there is none."""
        for answer in self._helper.receive():
            self._kill_at = None
            if answer["ticket"] in self._open and not answer.get("heard"):
                self._answers[answer["ticket"]] = answer
        if self._helper.ended or (self._kill_at is not None and now - self._kill_at > _PATIENCE):
            self.replace()
        if ticket not in self._open:
            return {"ticket": ticket, "error": "its helper was replaced"}
        if ticket not in self._answers:
            return None
        self._open.discard(ticket)
        return self._answers.pop(ticket)

    def kill(self, ticket: int, now: float) -> None:
        """End a look. Its answer comes when it has ended, which may be never."""
        self._helper.send({"ticket": ticket, "kill": True})
        self._kill_at = self._kill_at or now

    def replace(self) -> None:
        """End the helper; what was being looked at is given up."""
        self._helper.replace()
        self._open.clear()
        self._answers.clear()
        self._kill_at = None


class Look:
    """One look, repeated.

    Args:
        looks: who makes it.
        name: one of `looks.LOOKS`.
        every: seconds from one to the next.
        deadline: seconds in which it must come back.
        arguments: of it; may be changed between two looks.
    """

    def __init__(self, looks: Looks, name: str, *, every: float, deadline: float, **arguments: Any) -> None:
        self._looks, self._name, self.every, self._deadline, self.arguments = looks, name, every, deadline, arguments
        self._ticket: int | None = None
        self._asked = self._due = 0.0
        self._late, self._is_late = 0, False

    def soon(self) -> None:
        """Look again at the next opportunity."""
        self._due = 0.0

    def tick(self, now: float) -> Answer | None:
        """Ask if it is time to; what became of it, once that is known. A look that goes on hanging is told again."""
        if self._ticket is None:
            if now >= self._due:
                self._ticket, self._asked, self._is_late = self._looks.ask(self._name, self.arguments), now, False
                self._due = now + self.every
            return None
        found = self._looks.take(self._ticket, now)
        if found is not None:
            self._ticket = None
            if self._is_late:  # it was told already
                return None
            self._late = 0
            if found.get("cpu", 0.0) > _DEAR:
                self._due = max(self._due, now + _COST * found["cpu"])
            return Answer(found.get("value", {}), found.get("error"), found.get("errno"), 0, found.get("seconds", 0.0))
        if now < (self._due if self._is_late else self._asked + self._deadline):
            return None
        if not self._is_late:
            self._looks.kill(self._ticket, now)
        self._due = max(self._due, now) + (self.every if self._is_late else 0)
        self._is_late, self._late = True, self._late + 1
        return Answer({}, f"no answer within {self._deadline:g} s", None, self._late, now - self._asked)
