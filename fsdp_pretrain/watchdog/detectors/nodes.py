"""Watches the other nodes of a job: enters the alarms that they report, and notices their silence."""

from __future__ import annotations

from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.hang.peers import PeerNodes
from fsdp_pretrain.watchdog.notify.alarms import Alarms, AlarmSink

from .base import Detector


class NodeDetector(Detector):
    """Alarms `node/HOST`, and the alarms that the other nodes report."""

    def __init__(self, alarms: Alarms, nodes: PeerNodes) -> None:
        super().__init__(alarms)
        self._nodes, self._reported = nodes, alarms.reported_by_nodes

    def tick(self, now: float) -> None:
        """Judge the reports, which `PeerNodes` reads."""
        reported = set[str]()
        for other in self._nodes.others:
            for key, finding in other.report.findings.items():
                reported.add(finding.enter(self.alarms, key, other.report.host))
            if other.silent:
                effect = "its node or agent failed, or it cannot reach the run directory"
                open_silence(self.alarms, other.report.host, other.silence, effect, step=self.at)
            elif not other.report.ended:
                for name in {other.report.host, f"node-{other.number}"}:  # by its number before its first report
                    self.alarms.resolve(f"node/{name}", f"{other.report.host} sends heartbeats again")
        if any(not other.report.segment and not other.silent for other in self._nodes.others):
            reported |= self._reported  # a node that has only begun may report it again
        for key in self._reported - reported:
            self.alarms.resolve(key)
        self._reported = reported


def open_silence(alarms: AlarmSink, host: str, seconds: float, effect: str, step: int | None = None) -> None:
    """Open the alarm for a node that gives no sign of life."""
    alarms.open(
        f"node/{host}",
        Severity.CRIT,
        f"no heartbeat from {host} for {human_time(seconds)}",
        effect=effect,
        remedy="check whether the host responds; if the run hangs it is ended, and can start without it",
        step=step,
        facts={"host": host, "seconds": round(seconds, 1)},
    )
