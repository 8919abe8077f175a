"""What the agents of a job's nodes tell each other, by a file each in the run directory. No torch.

Agents see one another only there: it is what all nodes share. A file that does not change for a while means that its
agent, its node or its mount is gone. Silence is measured on the reader's own clock, so clocks need not agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from ..record.files import now, read_json
from .alarms import Alarm, Alarms, Severity

BEAT = 5.0
"""Seconds between two beats of an agent."""
SILENT = 60.0
"""Seconds without a beat after which an agent counts as gone."""


class Relay:
    """Takes the place of `Alarms` on nodes that do not lead: what is open travels to the leader with the next beat."""

    def __init__(self) -> None:
        self.open_: dict[str, dict[str, Any]] = {}

    def open(self, key: str, severity: Severity, summary: str, **more: Any) -> None:
        """An incident is there."""
        self.open_[key] = {"severity": severity.name, "summary": summary, **more}

    def resolve(self, key: str, summary: str = "", *, step: int | None = None) -> None:
        """An incident has ended."""
        del summary, step
        self.open_.pop(key, None)

    def forward(self, alarms: Alarms) -> None:
        """Hand all that is open to another keeper: this node leads now."""
        for key, finding in self.open_.items():
            enter(alarms, key, finding)


def enter(alarms: Alarms, key: str, finding: dict[str, Any]) -> Alarm:
    """Open what another node found."""
    more = {name: value for name, value in finding.items() if name not in ("severity", "summary")}
    return alarms.open(key, Severity[finding["severity"]], finding["summary"], **more)


class Nodes:
    """The files of all nodes.

    Args:
        directory: `RUN/watchdog`.
        node, count: this node, and how many there are.
        attempt: what tells this attempt from others: files of others are of no interest.
    """

    def __init__(self, directory: Path, node: int, count: int, attempt: str) -> None:
        self._directory, self.node, self.count, self._attempt = directory / "nodes", node, count, attempt
        self._written = -BEAT
        self._seen: dict[int, tuple[Any, float]] = {}
        self._since = time.monotonic()
        self.reports: dict[int, dict[str, Any]] = {}

    def write(self, content: dict[str, Any], *, at_once: bool = False) -> None:
        """This node's beat, every five seconds unless `at_once`."""
        if self.count == 1 or (not at_once and time.monotonic() - self._written < BEAT):
            return
        self._written = time.monotonic()
        beat = {"time": now(), "attempt": self._attempt, "host": socket.gethostname(), "pid": os.getpid(), **content}
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            partial = self._directory / f".{self.node}.{os.getpid()}"
            partial.write_text(json.dumps(beat))
            partial.replace(self._directory / f"{self.node}.json")

    def read(self) -> None:
        """Look at the other nodes' files."""
        if self.count == 1:
            return
        for node in range(self.count):
            if node == self.node:
                continue
            report = read_json(self._directory / f"{node}.json")
            if report is None or report.get("attempt") != self._attempt:
                continue
            self.reports[node] = report
            if node not in self._seen or self._seen[node][0] != report["time"]:
                self._seen[node] = (report["time"], time.monotonic())

    def silence(self, node: int) -> float:
        """Seconds since another node's agent gave a sign, or since this one began if it never did."""
        return time.monotonic() - (self._seen[node][1] if node in self._seen else self._since)

    @property
    def leads(self) -> bool:
        """Whether this node speaks for the job: the first whose agent is not silent."""
        return all(self.silence(node) > SILENT for node in range(self.node))
