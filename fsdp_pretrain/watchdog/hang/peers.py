"""Reports of the agents of a job's nodes to the agent of node 0, which leads: one file per node in the run directory.

The run directory is all that nodes share. A file that stops changing means that its agent, its node or its mount has
failed. Silence is measured on the reader's own clock, so clocks need not agree.
"""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fsdp_pretrain.run import state_files
from fsdp_pretrain.severity import Severity, SeverityName
from fsdp_pretrain.watchdog.notify.alarms import REPORTED_BY, AlarmSink

from .rank_monitor import RankSnapshot

BEAT_SECONDS = 5.0
"""Seconds between two reports of a node."""
SILENT_SECONDS = 60.0
"""Seconds without a report after which an agent counts as failed and an alarm is raised."""
_QUIET = 3
"""Beats without a report after which a node is no longer waited for."""


class NodeFinding(BaseModel):
    """An open alarm of a node that does not lead: the arguments of `AlarmSink.open` that were given."""

    model_config = ConfigDict(frozen=True)

    severity: SeverityName
    summary: str
    effect: str = ""
    remedy: str = ""
    action: str = ""
    step: int | None = None
    facts: dict[str, Any] = {}

    def enter(self, alarms: AlarmSink, key: str, host: str = "") -> str:
        """Open it in `alarms`, as one of another `host`, whose key and summary name it: here the same may be in order.
        Returns the key."""
        more = self.model_dump(exclude_unset=True, exclude={"severity", "summary"})
        if host:
            key = key if host in key.split("/") else f"{key}/{host}"
            more["facts"] = {**self.facts, REPORTED_BY: host}
        alarms.open(key, self.severity, self.summary if host in self.summary else f"{host}: {self.summary}", **more)
        return key


class NodeFindings(AlarmSink):
    """Collects the open alarms of a node that does not lead; they are reported with the next beat."""

    def __init__(self) -> None:
        self.by_key: dict[str, NodeFinding] = {}

    def open_keys(self, least: Severity = Severity.INFO) -> list[str]:
        return [key for key, finding in self.by_key.items() if finding.severity >= least]

    def open(self, key: str, severity: Severity, summary: str, *, revised: bool = False, **more: Any) -> None:
        del revised  # every report replaces the last
        self.by_key[key] = NodeFinding(severity=severity, summary=summary, **more)

    def resolve(self, key: str, summary: str = "", *, step: int | None = None) -> None:
        del summary, step
        self.by_key.pop(key, None)


class NodeReport(BaseModel):
    """`RUN/watchdog/nodes/N.json`: what the agent of a node reports with every beat."""

    model_config = ConfigDict(frozen=True)

    time: str = ""  # this and the next three: identify the agent and the report; all nodes of a start share the attempt
    attempt: str = ""
    host: str
    pid: int = 0
    segment: int = 0  # segment of the start; 0 until it is known
    stalled: list[RankSnapshot] = []  # positions of the node's ranks if they make no progress; else empty
    findings: dict[str, NodeFinding] = {}  # open alarms by key, if it does not lead
    windows: dict[int, tuple[int, float]] = {}  # see `RankMonitor.windows`
    ended: bool = False  # whether its ranks have ended, which makes this the last report


class PeerNode:
    """Another node, known by its reports; `report` is the last one, empty before the first."""

    def __init__(self, number: int, directory: Path) -> None:
        self.number = number
        self._path, self._heard = directory / f"{number}.json", time.monotonic()
        self.report = NodeReport(host=f"node-{number}")

    def read(self, attempt: str) -> None:
        """Read the node's report, ignoring one of another attempt."""
        report, before = state_files.view(self._path, NodeReport), self.report
        if report is None or report.attempt != attempt:
            return
        if (report.time, report.pid) != (before.time, before.pid):
            self._heard = time.monotonic()
        self.report = report

    def begin(self) -> None:
        """Count its silence from here, unless it has reported."""
        if not self.report.time:
            self._heard = time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds since the last sign of life of the node's agent; since `begin` if there was none."""
        return time.monotonic() - self._heard

    @property
    def silent(self) -> bool:
        """Whether the node's agent counts as failed."""
        return self.silence > SILENT_SECONDS and not self.report.ended

    @property
    def quiet(self) -> bool:
        """Whether the node has not ended but missed some beats, so that nobody waits for it any longer."""
        return self.silence > _QUIET * BEAT_SECONDS and not self.report.ended

    def snapshots(self, since: float = -math.inf) -> list[RankSnapshot]:
        """Positions of the node's stalled ranks, if reported after `since` (`time.monotonic()`); else empty."""
        return self.report.stalled if self._heard >= since else []


class PeerNodes:
    """All nodes of a job as seen by the agent of node `node` of `count`."""

    def __init__(self, directory: Path, node: int, count: int, attempt: str) -> None:
        self._directory = directory / "nodes"
        self.node, self.attempt = node, attempt
        self._written = self._read = -math.inf
        self._reported: Any = None
        self.others = [PeerNode(number, self._directory) for number in range(count) if number != node]
        self.leader = self.others[0] if node else None
        """The first node; None if this is it."""

    def write(self, report: NodeReport) -> None:
        """Write this node's report when a beat is due or something changed."""
        content = (report.segment, bool(report.stalled), set(report.findings), report.ended)
        if not self.others or (content == self._reported and time.monotonic() - self._written < BEAT_SECONDS):
            return
        self._written, self._reported = time.monotonic(), content
        with contextlib.suppress(OSError):
            values = report.model_dump(mode="json", exclude_unset=True)
            state_files.write(self._directory / f"{self.node}.json", values)

    def begin(self) -> None:
        """The segment is known, so that the others may report from now on."""
        for other in self.others:
            other.begin()

    def read(self, *, all_: bool, at_once: bool = False) -> bool:
        """Read other nodes' reports, once per beat. Returns whether a beat was due.

        Args:
            all_: whether to read all reports; else only the leader's, which keeps the load low with many nodes.
            at_once: whether to read even if a beat is not due.
        """
        if not at_once and time.monotonic() - self._read < BEAT_SECONDS:
            return False
        self._read = time.monotonic()
        for other in self.others if all_ else self.others[:1]:
            other.read(self.attempt)
        return True

    @property
    def windows(self) -> dict[int, tuple[str, int, float]]:
        """By rank of the other nodes: its host, then as in `RankMonitor.windows`."""
        return {
            rank: (other.report.host, *window) for other in self.others for rank, window in other.report.windows.items()
        }

    # ------------------------------------------------------------------ a stall, an end

    @property
    def leader_stalls(self) -> bool:
        """Whether the leading node reports that its ranks make no progress."""
        return self.leader is not None and not self.leader.silent and bool(self.leader.snapshots())

    def snapshots(self, since: float = -math.inf) -> list[RankSnapshot]:
        """Positions of the other nodes' stalled ranks, as reported after `since`."""
        return [snapshot for other in self.others for snapshot in other.snapshots(since)]

    def unreported(self, since: float) -> list[str]:
        """Hosts that are alive but have reported neither positions after `since` nor their end."""
        heard = [other for other in self.others if not other.quiet and not other.report.ended]
        return [other.report.host for other in heard if not other.snapshots(since)]

    @property
    def patience(self) -> float:
        """Seconds after which it is known of every other node whether it is alive or silent."""
        return (_QUIET + 1) * BEAT_SECONDS

    def quiet(self) -> dict[str, float]:
        """Hosts that have not ended but missed some beats, with their seconds of silence."""
        return {other.report.host: other.silence for other in self.others if other.quiet}

    @property
    def all_ended(self) -> bool:
        return all(other.report.ended for other in self.others)
