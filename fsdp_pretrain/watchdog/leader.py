"""What the agent of node 0 does besides: run the job-wide detectors, keep the alarms, and notify people."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from collections import Counter

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import ConfigError, Exit
from fsdp_pretrain.run import environment, exit_intent, status
from fsdp_pretrain.run.files import RunDir, now, replace_file
from fsdp_pretrain.run.journal import Journal
from fsdp_pretrain.run.metrics import METRICS, records
from fsdp_pretrain.run.requests import send
from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.detectors.base import Detector
from fsdp_pretrain.watchdog.detectors.slowdown import SlowdownDetector, StragglerDetector
from fsdp_pretrain.watchdog.hang.peers import PeerNodes
from fsdp_pretrain.watchdog.hang.rank_monitor import RankMonitor
from fsdp_pretrain.watchdog.notify.alarms import Alarm, Alarms
from fsdp_pretrain.watchdog.notify.message import MessageSender
from fsdp_pretrain.watchdog.notify.notifier import Notifier, Ping
from fsdp_pretrain.watchdog.notify.operator import alarms_file, journal_alarm, serve, snapshot_file
from fsdp_pretrain.watchdog.notify.prometheus import Exporter
from fsdp_pretrain.watchdog.notify.snapshot import Snapshot

from .pass_runner import INTERVAL
from .registry import build_detectors

_PER_START = frozenset("hang rank-died ended pace straggler node gpu run-directory corpus-storage mirror".split())
"""Detectors whose alarms end when the ranks are restarted."""
_SNAPSHOT_SECONDS = 10.0
_SERVE_PASSES = 5
"""Passes between two checks for requests and two exports, unless an alarm changes."""
_HEALTH_DETECTORS = frozenset(("loss", "gradient", "scale", "learning", "replicas", "replay"))


class HealthAlarms(Detector):
    """Turns the health findings in the trainer's record into alarms."""

    def step(self, record: StepRecord) -> None:
        """Open and resolve alarms by the record. The first record of a start repeats the open incidents."""
        first = self.last is None
        super().step(record)
        if first:
            going_on = {finding.key for finding in record.health}
            for detector in _HEALTH_DETECTORS:
                self.resolve_others(detector, going_on, "ended with a restart of the run")
        for finding in record.health:
            if finding.resolved:
                self.resolve(finding.key, finding.summary)
            else:
                self.open(finding.key, finding.severity, finding.summary)

    def is_written_by_trainer(self, alarm: Alarm) -> bool:
        """Whether the trainer has written this transition into the journal, as kind `health`."""
        findings = self.last.health if self.last is not None else []
        written = any(finding.key == alarm.key and finding.severity > Severity.INFO for finding in findings)
        return written and alarm.state != "acknowledged"


class Leader:
    """Leads a job. Create it on node 0, once the segment is known."""

    def __init__(self, config: Config, ranks: RankMonitor, nodes: PeerNodes, segment: int) -> None:
        self._config, self._run = config, RunDir(config.run.dir)
        self._ranks, self._nodes = ranks, nodes
        self._metrics, self._offset = self._run.segment(segment) / METRICS, 0
        self._segment = segment
        self._snapshot: Snapshot = {"run": config.run.name, "segment": segment, "total_steps": config.schedule.steps}
        self._peer_alarms, self._avoided = set[str](), set[str]()
        self._written = self._served = -math.inf
        self._changed = False
        self._journal = Journal(self._run)  # kept open: it buffers what a full disk does not take
        self._notifier: Notifier | None = None
        self._ping: Ping | None = None
        self.alarms = Alarms(alarms_file(self._run), self._on_change)
        self._health = HealthAlarms(self.alarms)
        section = config.watchdog.notify
        try:
            self._notifier = Notifier(section, self._run, MessageSender(config.run.name, str(self._run.path), segment))
            self._ping = Ping() if section.ping else None
        except ConfigError as error:  # the trainer checked it, but secrets may be gone since
            self.alarms.open("notify", Severity.WARN, error.cause, effect="no alarm is sent")
        self._exporter = Exporter(section.metrics)
        begun = environment.view(self._run, segment)
        for alarm in list(self.alarms):  # an earlier agent may have opened some in this start
            if alarm.detector in _PER_START and alarm.opened < (begun.time or "9"):
                self.alarms.resolve(alarm.key, "the ranks were started again")
        hosts = list(begun.hosts or [socket.gethostname()])
        self._drift = SlowdownDetector(self.alarms, self._run.path / "watchdog/pace.json", hosts)
        self._stragglers = StragglerDetector(self.alarms)
        self._detectors = [self._health, *([self._drift] if config.watchdog.pace else [])]
        self._detectors += build_detectors(
            config,
            self.alarms,
            ranks,
            segment=segment,
            devices=len(ranks.all) if "cpu" not in (begun.device or "cpu") else 0,
        )

    # ------------------------------------------------------------------ a pass

    def run_pass(self) -> None:
        """A pass: read the record, check the nodes, run the detectors; every few passes, serve requests and export."""
        for record, offset in records(self._metrics, self._offset):
            self._offset = offset
            self._update_snapshot(record)
            for detector in self._detectors:
                detector.step(record)
        self._check_nodes()
        now = time.monotonic()
        for detector in self._detectors:
            detector.tick(now)
        if now - self._served >= _SERVE_PASSES * INTERVAL or self._changed:
            self._served, self._changed = now, False
            serve(self._run, self.alarms)
            self._avoid_hosts()
            self._publish()

    def _update_snapshot(self, record: StepRecord) -> None:
        self._snapshot |= {
            "step_seconds": record.seconds.iteration,
            "step": record.step,
            "tokens": record.tokens,
            "world": record.world,
            "skipped_steps": self._snapshot.get("skipped_steps", 0) + record.skipped,
            "grad_norm": record.grad_norm,
            "loss": record.loss.mean,
        }

    def _check_nodes(self) -> None:
        windows = {
            beat.rank: (socket.gethostname(), beat.window, beat.own) for beat in self._ranks.beats if beat.window
        }
        found = set[str]()
        for other in self._nodes.others:
            if other.report is not None:
                for key, finding in other.report.findings.items():
                    finding.enter(self.alarms, key)
                    found.add(key)
                windows |= {rank: (other.name, *window) for rank, window in other.report.windows.items() if window[0]}
            if other.silent:
                effect = "its node or agent failed, or it cannot reach the run directory"
                self.open_silence(other.name, other.silence, effect)
            elif not other.ended:
                self.alarms.resolve(f"node/{other.name}", f"{other.name} sends heartbeats again")
        for key in self._peer_alarms - found:
            self.alarms.resolve(key)
        self._peer_alarms = found
        if self._config.watchdog.pace:
            self._stragglers.check(windows)

    def open_silence(self, host: str, seconds: float, effect: str) -> None:
        """Open the alarm for a node that gives no sign of life."""
        self.alarms.open(
            f"node/{host}",
            Severity.CRIT,
            f"no heartbeat from {host} for {human_time(seconds)}",
            effect=effect,
            remedy="check whether the host responds; if the run hangs it is ended, and can start without it",
            step=self._health.at,
            facts={"host": host, "seconds": round(seconds, 1)},
        )

    @property
    def step_seconds(self) -> float | None:
        """Seconds that the last recorded step took; None before the first."""
        return self._snapshot.get("step_seconds")

    def _avoid_hosts(self) -> None:
        """If a device is broken for good: save, stop, and restart elsewhere (exit 76)."""
        broken = self.broken_hosts()
        if not broken or broken <= self._avoided or not self._config.watchdog.act:
            return
        names = ", ".join(sorted(broken))
        with contextlib.suppress(OSError):  # a full disk takes no request: retried in the next pass
            why, hosts = f"broken hardware on {names}", sorted(broken)
            send(self._run, "stop", segment=self._segment, reason=why, avoid_hosts=hosts)
            self._avoided |= broken

    def broken_hosts(self) -> set[str]:
        return {
            host
            for alarm in self.alarms
            if alarm.severity is Severity.CRIT
            for host in alarm.facts.get("avoid_hosts", ())
        }

    # ------------------------------------------------------------------ export and notification

    def _publish(self) -> None:
        snapshot = self._build_snapshot()
        if self._notifier is not None:
            self._notifier.tick(self.alarms)
        self._exporter.update(snapshot)
        if time.monotonic() - self._written >= _SNAPSHOT_SECONDS:
            self._written = time.monotonic()
            known = {key: value for key, value in snapshot.items() if value is not None and value != {}}
            numbers = {
                key: value for key, value in known.items() if not isinstance(value, float) or math.isfinite(value)
            }
            content = {"time": now(), "host": socket.gethostname(), **numbers}
            with contextlib.suppress(OSError):  # for `fsdp-pretrain status`, which may run on any machine
                replace_file(snapshot_file(self._run), json.dumps(content))
        if self._exporter.problem:
            self.alarms.open("metrics", Severity.INFO, self._exporter.problem, effect="no metrics for Prometheus")
        else:
            self.alarms.resolve("metrics")
        if self._ping is not None:
            self._ping.on_pass(bool(self._ranks.beats), time.monotonic())

    def _build_snapshot(self) -> Snapshot:
        at = time.monotonic_ns()
        severities = Counter(alarm.severity for alarm in self.alarms)
        shown = {
            **self._snapshot,
            "heartbeat_ages": {beat.rank: (at - beat.phase_at) / 1e9 for beat in self._ranks.beats},
            "open": {severity.name: severities[severity] for severity in Severity},
        }
        for detector in self._detectors:
            shown |= detector.figures()
        return shown

    def _on_change(self, alarm: Alarm) -> None:
        self._changed = True
        self.send(alarm)
        if not self._health.is_written_by_trainer(alarm):
            journal_alarm(self._journal, alarm)

    def send(self, alarm: Alarm) -> None:
        """Send an alarm to people without recording it: the run directory may not answer."""
        if self._notifier is not None:
            self._notifier.on_change(alarm)

    def report_end(self) -> None:
        """All ranks are gone: open an alarm unless they ended in order, or the run was complete before they started."""
        if status.read(self._run).was_complete:
            for alarm in [alarm for alarm in self.alarms if alarm.detector in _PER_START]:
                self.alarms.resolve(alarm.key, "the run is complete")
            return
        intent = exit_intent.read(self._metrics.parent)
        if intent is None or intent.code in (Exit.COMPLETE, Exit.RESUME, Exit.RESUME_AVOIDING_HOSTS):
            return
        self.alarms.open(
            "ended",
            Severity.CRIT,
            f"the run has ended with exit {intent.code}: {intent.reason}",
            effect="nothing is trained",
            remedy="see the journal; `fsdp-pretrain launch` does not start it again by itself after 78 and 93",
            step=self._health.at,
        )

    def close(self) -> None:
        """The watch ends."""
        self._exporter.close()
        if self._notifier is not None:
            self._notifier.close()
        self.alarms.close()
        self._journal.close()
