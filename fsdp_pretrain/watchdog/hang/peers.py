"""What the agents of a job's nodes report to that of node 0, which leads, through one file each in the run directory.

The run directory is all that nodes share. A file that stops changing means that its agent, its node or its mount is
gone. Silence is measured on the reader's own clock, so clocks need not agree.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import replace_file
from fsdp_pretrain.severity import Severity, SeverityName
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .rank_monitor import RankSnapshot

BEAT_SECONDS = 5.0
"""Between two reports of a node."""
SILENT_SECONDS = 60.0
"""Without a report, until an agent counts as gone, and an alarm is raised."""
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

    def enter(self, alarms: AlarmSink, key: str) -> None:
        """Open it among the alarms of the run."""
        more = self.model_dump(exclude_unset=True, exclude={"severity", "summary"})
        alarms.open(key, self.severity, self.summary, **more)


class NodeFindings(AlarmSink):
    """Takes the findings of a node that does not lead: its open alarms, reported with the next beat."""

    def __init__(self) -> None:
        self.by_key: dict[str, NodeFinding] = {}

    def open_keys(self) -> list[str]:
        return list(self.by_key)

    def open(self, key: str, severity: Severity, summary: str, *, revised: bool = False, **more: Any) -> None:
        del revised  # every report replaces the last
        self.by_key[key] = NodeFinding(severity=severity, summary=summary, **more)

    def resolve(self, key: str, summary: str = "", *, step: int | None = None) -> None:
        del summary, step
        self.by_key.pop(key, None)


class NodeReport(BaseModel):
    """`RUN/watchdog/nodes/N.json`: what the agent of a node reports with every beat.

    Attributes:
        time, attempt, host, pid: of the agent; the attempt is shared by all nodes of a start.
        segment: number of the start; 0 until it is known.
        stalled: positions of its ranks if they make no progress; else empty.
        findings: open alarms by key, if it does not lead.
        windows: by rank, the number of the last window of steps and the rank's own seconds of a typical step.
        ended: its ranks have ended; this is the last report.
    """

    model_config = ConfigDict(frozen=True)

    time: str
    attempt: str
    host: str
    pid: int
    segment: int
    stalled: list[RankSnapshot]
    findings: dict[str, NodeFinding]
    windows: dict[int, tuple[int, float]]
    ended: bool


class PeerNode:
    """Another node, as its reports show it; `report` is the last one, empty before the first."""

    def __init__(self, number: int, directory: Path) -> None:
        self.number = number
        self._path, self._heard = directory / f"{number}.json", time.monotonic()
        self.report = NodeReport(
            time="",
            attempt="",
            host=f"node-{number}",
            pid=0,
            segment=0,
            stalled=[],
            findings={},
            windows={},
            ended=False,
        )

    def read(self, attempt: str) -> None:
        """Read its file; ignore a report of another attempt."""
        report, before = state_files.view(self._path, NodeReport), self.report
        if report is None or report.attempt != attempt:
            return
        if (report.time, report.pid) != (before.time, before.pid):
            self._heard = time.monotonic()
        self.report = report

    @property
    def silence(self) -> float:
        """Seconds since its agent's last sign of life, or since this agent started if there was none."""
        return time.monotonic() - self._heard

    @property
    def silent(self) -> bool:
        """Whether its agent counts as gone."""
        return self.silence > SILENT_SECONDS and not self.report.ended

    @property
    def quiet(self) -> bool:
        """Whether it has not ended, but is silent for some beats: it is no longer waited for."""
        return self.silence > _QUIET * BEAT_SECONDS and not self.report.ended

    def snapshots(self, since: float = -math.inf) -> list[RankSnapshot]:
        """Positions of its stalled ranks; empty unless reported since then (`time.monotonic()`)."""
        return self.report.stalled if self._heard >= since else []


class PeerNodes:
    """All nodes of a job as seen by the agent of node `node` of `count`."""

    def __init__(self, directory: Path, node: int, count: int, attempt: str) -> None:
        self._directory, self.node, self.attempt = directory / "nodes", node, attempt
        self._written = self._read = -math.inf
        self._news: Any = None
        self.others = [PeerNode(number, self._directory) for number in range(count) if number != node]
        self.leader = self.others[0] if node else None
        """The first node; None if this is it."""

    def write(self, report: NodeReport) -> None:
        """Write this node's report when a beat is due or something changed."""
        news = (report.segment, bool(report.stalled), set(report.findings), report.ended)
        if not self.others or (news == self._news and time.monotonic() - self._written < BEAT_SECONDS):
            return
        self._written, self._news = time.monotonic(), news
        with contextlib.suppress(OSError):
            text = json.dumps(report.model_dump(mode="json", exclude_unset=True))
            replace_file(self._directory / f"{self.node}.json", text)

    def read(self, *, all_: bool, at_once: bool = False) -> bool:
        """Read other nodes' reports, once per beat; returns whether a beat was due.

        Args:
            all_: of all; else only that of the leader, which keeps the load low with many nodes.
            at_once: even if they were read a moment ago.
        """
        if not at_once and time.monotonic() - self._read < BEAT_SECONDS:
            return False
        self._read = time.monotonic()
        for other in self.others if all_ else self.others[:1]:
            other.read(self.attempt)
        return True

    @property
    def windows(self) -> dict[int, tuple[str, int, float]]:
        """By rank of the other nodes, its host, its last window of steps, and its own seconds of a typical step."""
        return {
            rank: (other.report.host, *window) for other in self.others for rank, window in other.report.windows.items()
        }

    # ------------------------------------------------------------------ a stall, an end

    @property
    def leader_stalls(self) -> bool:
        """Whether the leading node reports that its ranks make no progress."""
        return self.leader is not None and not self.leader.silent and bool(self.leader.snapshots())

    def snapshots(self, since: float = -math.inf) -> list[RankSnapshot]:
        """Positions of the other nodes' stalled ranks, as reported since then."""
        return [snapshot for other in self.others for snapshot in other.snapshots(since)]

    def unreported(self, since: float) -> list[str]:
        """Hosts that are alive but have reported neither positions since then nor their end."""
        heard = [other for other in self.others if not other.quiet and not other.report.ended]
        return [other.report.host for other in heard if not other.snapshots(since)]

    @property
    def patience(self) -> float:
        """Seconds after which every other node is known to be alive or silent."""
        return (_QUIET + 1) * BEAT_SECONDS

    def quiet(self) -> dict[str, float]:
        """Hosts that have not ended but are silent for some beats, with the seconds of silence."""
        return {other.report.host: other.silence for other in self.others if other.quiet}

    @property
    def all_ended(self) -> bool:
        return all(other.report.ended for other in self.others)
