"""What the agents of a job's nodes tell each other, by a file each in the run directory. No torch.

Agents see one another only there: it is what all nodes share. A file that does not change for a while means that its
agent, its node or its mount is gone. Silence is measured on the reader's own clock, so clocks need not agree.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from ..record import state_files
from ..record.files import now, replace_file
from ..severity import Severity
from .alarms import Alarm, Alarms
from .ranks import Standing

_QUIET = 3
"""Beats without a sign after which a node that should say something is not waited for."""


class Relay:
    """Takes the place of `Alarms` on nodes that do not lead: what is open travels to the leader with the next beat."""

    def __init__(self) -> None:
        self.open_: dict[str, dict[str, Any]] = {}

    def open_keys(self) -> list[str]:
        """Of what is open."""
        return list(self.open_)

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
        beat, silent: seconds between two signs of life; without any, after which an agent counts as gone.

    Attributes:
        reports: what the others said last, by node.
    """

    def __init__(self, directory: Path, node: int, count: int, attempt: str, *, beat: float, silent: float) -> None:
        self._directory, self.node, self.count, self._attempt = directory / "nodes", node, count, attempt
        self.beat, self._silent = beat, silent
        self._written = self._read = -math.inf
        self._news: Any = None
        self._seen: dict[int, tuple[Any, float]] = {}
        self._since = time.monotonic()
        self.reports: dict[int, dict[str, Any]] = {}

    @property
    def others(self) -> list[int]:
        """All nodes but this."""
        return [node for node in range(self.count) if node != self.node]

    def write(self, content: dict[str, Any], *, news: Any = None) -> None:
        """This node's beat: when one is due, or when `news` is not what it was at the last."""
        if self.count == 1 or (news == self._news and time.monotonic() - self._written < self.beat):
            return
        self._written, self._news = time.monotonic(), news
        beat = {"time": now(), "attempt": self._attempt, "host": socket.gethostname(), "pid": os.getpid(), **content}
        with contextlib.suppress(OSError):
            replace_file(self._directory / f"{self.node}.json", json.dumps(beat))

    def read(self, *, all_: bool, at_once: bool = False) -> bool:
        """Look at the other nodes' files, once a beat unless `at_once`; whether it was done.

        Args:
            all_: at those of all; else only at those of lower number, up to one that is not silent: with many nodes,
                only few need to know all.
            at_once: although they were read a moment ago.
        """
        if self.count == 1 or (not at_once and time.monotonic() - self._read < self.beat):
            return False
        self._read = time.monotonic()
        for node in self.others:
            if not all_ and node > self.node:
                break
            self._read_one(node)
            if not all_ and not self.is_silent(node):
                break
        return True

    def _read_one(self, node: int) -> None:
        report = state_files.view(self._directory / f"{node}.json", dict[str, Any])
        if report is None or report.get("attempt") != self._attempt:
            return
        self.reports[node] = report
        sign = (report["time"], report["pid"])
        if node not in self._seen or self._seen[node][0] != sign:
            self._seen[node] = (sign, time.monotonic())

    def silence(self, node: int) -> float:
        """Seconds since another node's agent gave a sign, or since this one began if it never did."""
        return time.monotonic() - (self._seen[node][1] if node in self._seen else self._since)

    def is_silent(self, node: int) -> bool:
        """Whether another node's agent counts as gone."""
        return self.silence(node) > self._silent

    def name(self, node: int) -> str:
        """Host of another node, or its number if it was never heard."""
        return str(self.reports[node]["host"]) if node in self.reports else f"node-{node}"

    @property
    def leads(self) -> bool:
        """Whether this node speaks for the job: the first whose agent is not silent."""
        return all(self.is_silent(node) for node in range(self.node))

    # ------------------------------------------------------------------ a stall, an end

    @property
    def leader_stalls(self) -> bool:
        """Whether the node that speaks for the job says that its ranks make no progress."""
        leader = next((node for node in range(self.node) if not self.is_silent(node)), None)
        return leader is not None and self._says(leader, "stalled")

    def standings(self, since: float) -> list[Standing]:
        """Where the ranks of the other nodes stand that make no progress, as far as they have said so.

        Args:
            since: of `time.monotonic()`, when the stall began: an older report is of an earlier one.
        """
        told = [self.reports[node] for node in self.others if self._has_told(node, since)]
        return [Standing.from_json(content) for report in told for content in report["stalled"]]

    def untold(self, since: float) -> list[str]:
        """Hosts that are heard, and have not said since then where their ranks stand, or that they have ended."""
        waited_for = [node for node in self.others if self.silence(node) <= _QUIET * self.beat]
        return [self.name(node) for node in waited_for if not self._has_told(node, since) and not self.has_ended(node)]

    def _has_told(self, node: int, since: float) -> bool:
        return self._says(node, "stalled") and self._seen[node][1] >= since

    @property
    def patience(self) -> float:
        """Seconds after which it is known of every other node whether it still gives signs."""
        return (_QUIET + 1) * self.beat

    def quiet(self) -> dict[str, float]:
        """Hosts that have given no sign for some beats, and for how many seconds. One that has ended is none."""
        silences = {node: self.silence(node) for node in self.others if not self._says(node, "ended")}
        return {self.name(node): silence for node, silence in silences.items() if silence > _QUIET * self.beat}

    def _says(self, node: int, what: str) -> bool:
        return bool(self.reports.get(node, {}).get(what))

    def has_ended(self, node: int) -> bool:
        """Whether another node has said that its ranks have ended."""
        return self._says(node, "ended")

    @property
    def all_ended(self) -> bool:
        """Whether every other node has said that its ranks have ended."""
        return all(self._says(node, "ended") for node in self.others)
