"""What the agent of one node does for the whole job: the detectors of the record, the alarms, who is told. No torch."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

from ..config import Config
from ..control import send
from ..errors import ConfigError
from ..record import environment, exit_intent, run_id
from ..record.claim import BEAT_SECONDS, Claim, Holder
from ..record.files import RunDir, now, replace_file
from ..record.journal import Journal
from ..record.metrics import METRICS, records
from ..record.step_record import StepRecord
from ..severity import Severity
from ..statistics import score
from ..units import human_time
from .accounts import Accounts
from .alarms import Alarm, Alarms
from .checkpoints import Checkpoints
from .desk import alarms_file, journal_alarm, keep_alarms, serve, snapshot_file
from .detector import Detector
from .drift import Drift, Stragglers
from .exporter import Exporter
from .message import Identity
from .nodes import Nodes, enter
from .notify import Notifier, Ping
from .ranks import Ranks
from .sensors import sensors
from .snapshot import Histogram, Snapshot
from .storage import Space

_OF_A_START = frozenset(("hang", "rank-died", "ended", "pace", "straggler", "node", "gpu", "run-directory"))
"""Detectors whose alarms end when the ranks are started again."""
_SNAPSHOT_SECONDS, _LOSS_NOISE = 10.0, 0.02
_ATTEND = 5
"""Passes between two looks at requests and two snapshots for others, unless an alarm changes."""
_NUMBERS = frozenset(("loss", "gradient", "scale", "learning", "replicas", "replay"))


class Numbers(Detector):
    """Turns the findings that the trainer writes into its record into alarms (`health`)."""

    def step(self, record: StepRecord) -> None:
        """Open and resolve what the record says. The first record of a start repeats what goes on."""
        first = self.last is None
        super().step(record)
        if first:
            going_on = {finding.key for finding in record.health}
            for detector in _NUMBERS:
                self.resolve_others(detector, going_on, "over since the run was started again")
        for finding in record.health:
            if finding.resolved:
                self.resolve(finding.key, finding.summary)
            else:
                self.open(finding.key, finding.severity, finding.summary)

    def is_told_by_trainer(self, alarm: Alarm) -> bool:
        """Whether the trainer has written this transition into the journal, as kind `health`."""
        findings = self.last.health if self.last is not None else []
        told = any(finding.key == alarm.key and finding.severity > Severity.INFO for finding in findings)
        return told and alarm.state != "acknowledged"


class Leader:
    """Speaks for a job. To be made once the number of the start is known.

    Args:
        config: the run.
        claim: the right to write its alarms, see `take_the_lead`.
        ranks: of this node.
        nodes: of the job.
        segment: number of the start.

    Attributes:
        alarms: of the run.
        holds: no other node's agent took the right to write the alarms over, when it was last looked at.
    """

    def __init__(self, config: Config, claim: Claim, ranks: Ranks, nodes: Nodes, segment: int) -> None:
        self._config, self._run, self._claim = config, RunDir(config.run.dir), claim
        self._ranks, self._nodes = ranks, nodes
        self._fixed = {"run": config.run.name, "segment": segment, "total_steps": config.schedule.steps}
        self._fixed |= {"pass_due": 10 * config.watchdog.interval.value}
        self._steps, self._skipped = Histogram(), 0
        self._losses = deque[float](maxlen=128)
        self._metrics, self._offset = self._run.segment(segment) / METRICS, 0
        self._notifier: Notifier | None = None
        self.holds, self._news = True, False
        self._journal = Journal(self._run)  # kept open: it holds what a full disk does not take
        self.alarms = Alarms(alarms_file(self._run), self._told)
        self._numbers = Numbers(self.alarms)
        identity = Identity(run=config.run.name, path=str(self._run.path), segment=segment)
        section = config.watchdog.notify
        try:
            self._notifier = Notifier(section, self._run, identity)
            self._ping = Ping(section.ping) if section.ping is not None else None
        except ConfigError as error:  # the trainer checks it before; secrets may have gone since
            self._ping = None
            self.alarms.open("notify", Severity.WARN, error.cause, effect="nobody is told of alarms")
        self._exporter = Exporter(section.prometheus)
        shown = section.prometheus.port is not None or section.prometheus.textfile is not None
        self._accounts = Accounts(self._run.path) if shown else None
        begun = environment.view(self._run, segment)
        for alarm in list(self.alarms):  # another agent may have opened some in this start
            if alarm.detector in _OF_A_START and alarm.opened < (begun.time or "9"):
                self.alarms.resolve(alarm.key, "the ranks were started again")
        hosts = list(begun.hosts or [socket.gethostname()])
        self._drift = Drift(self.alarms, config.watchdog.pace, self._run.path / "watchdog/pace.json", hosts)
        self._stragglers = Stragglers(self.alarms, config.watchdog.pace)
        self._detectors = [self._numbers, *([self._drift] if config.watchdog.pace.enabled else [])]
        self._detectors += sensors(
            config,
            self._run,
            self.alarms,
            segment=segment,
            host=socket.gethostname(),
            devices=len(ranks.all) if "cpu" not in (begun.device or "cpu") else 0,
            pids=ranks.pids,
            reached=ranks.reached,
        )
        self._foreign, self._avoided = set[str](), set[str]()
        self._own: dict[int, float] = {}
        self._written = self._attended = -math.inf

    # ------------------------------------------------------------------ a pass

    def look(self) -> None:
        """One pass."""
        for record, offset in records(self._metrics, self._offset):
            self._offset = offset
            self._steps.observe(record.seconds.iteration)
            self._skipped += record.skipped
            self._losses.append(record.loss.mean)
            for detector in self._detectors:
                detector.step(record)
        self._look_at_nodes()
        now = time.monotonic()
        for detector in self._detectors:
            detector.tick(now)
        if now - self._attended >= _ATTEND * self._config.watchdog.interval.value or self._news:
            self._attended, self._news = now, False
            self.holds = self._claim.still_mine() or run_id.lost() is not None  # gone with the run directory: nobody's
            serve(self._run, self.alarms)
            self._avoid_hosts()
            self._show()

    def _look_at_nodes(self) -> None:
        found = set()
        windows = {
            rank.number: (socket.gethostname(), rank.beat.window, rank.beat.own)
            for rank in self._ranks.all
            if rank.beat is not None and rank.beat.window
        }
        for report in self._nodes.reports.values():
            for key, finding in report.get("findings", {}).items():
                enter(self.alarms, key, finding)
                found.add(key)
            for rank, (number, own) in report.get("windows", {}).items():
                if number:
                    windows[int(rank)] = (report["host"], number, own)
        for node in self._nodes.others:
            self._judge_silence(node)
        for key in self._foreign - found:
            self.alarms.resolve(key)
        self._foreign = found
        self._stragglers.look(windows)
        self._own = {rank: own for rank, (_, _, own) in windows.items()}

    def _judge_silence(self, node: int) -> None:
        host = self._nodes.name(node)
        if self._nodes.has_ended(node):
            return
        if self._nodes.is_silent(node):
            self.open_silence(
                host, self._nodes.silence(node), "its node, its agent or its view of the run directory is gone"
            )
        else:
            self.alarms.resolve(f"node/{host}", f"{host} is heard again")

    def open_silence(self, host: str, seconds: float, effect: str) -> None:
        """A node says nothing."""
        self.alarms.open(
            f"node/{host}",
            Severity.CRIT,
            f"nothing has been heard of {host} for {human_time(seconds)}",
            effect=effect,
            remedy="look whether the host answers; if the run hangs it is ended, and can start without it",
            step=self._numbers.at,
            facts={"host": host, "seconds": round(seconds, 1)},
        )

    @property
    def step_seconds(self) -> float | None:
        """Seconds that the last recorded step took; None before the first."""
        last = self._numbers.last
        return None if last is None else last.seconds.iteration

    def _avoid_hosts(self) -> None:
        """A device is broken for good: save, stop, and start again elsewhere (exit 76)."""
        broken = self.broken_hosts()
        if not broken or broken <= self._avoided or not self._config.watchdog.hardware.act:
            return
        names = ", ".join(sorted(broken))
        with contextlib.suppress(OSError):  # a full disk takes no request: asked again in the next pass
            send(self._run, "stop", reason=f"broken hardware on {names}", avoid_hosts=sorted(broken))
            self._avoided |= broken

    def broken_hosts(self) -> set[str]:
        """Hosts that no start should use."""
        return {host for alarm in self.alarms if alarm.severity is Severity.CRIT for host in _avoided(alarm)}

    # ------------------------------------------------------------------ who is told

    def _show(self) -> None:
        snapshot = self._fill()
        if self._notifier is not None:
            self._notifier.tick(self.alarms, snapshot)
        self._exporter.show(snapshot)
        self._write(snapshot)
        if self._exporter.problem:
            self.alarms.open("metrics", Severity.INFO, self._exporter.problem, effect="no metrics for Prometheus")
        else:
            self.alarms.resolve("metrics")
        if self._ping is not None:
            self._ping.passed(self._ranks.seen, time.monotonic())

    def _write(self, snapshot: Snapshot) -> None:
        """For `fsdp-pretrain status`, which may be asked on any machine."""
        if time.monotonic() - self._written < _SNAPSHOT_SECONDS:
            return
        self._written = time.monotonic()
        content = {"time": now(), "host": socket.gethostname(), **snapshot.to_json()}
        with contextlib.suppress(OSError):
            replace_file(snapshot_file(self._run), json.dumps(content))

    def _fill(self) -> Snapshot:
        record, now = self._numbers.last, time.monotonic_ns()
        open_ = [alarm.severity.name for alarm in self.alarms]
        values: dict[str, Any] = {
            **self._fixed,
            "step_seconds": self._steps,
            "step_drift": self._drift.ratio,
            "heartbeat_ages": {
                rank.number: (now - rank.beat.phase_at) / 1e9 for rank in self._ranks.all if rank.beat is not None
            },
            "own_ratios": _ratios(self._own),
            "open": {severity.name: open_.count(severity.name) for severity in Severity},
        }
        if record is not None:
            loss = record.loss.mean
            values |= {
                "step": record.step,
                "tokens": record.tokens,
                "world": record.world,
                "segment_steps": sum(self._steps.counts),
                "skipped_steps": self._skipped,
                "grad_norm": record.grad_norm,
                "loss": loss,
                "loss_z": score(loss, self._losses, _LOSS_NOISE) if len(self._losses) >= 16 else None,
            }
        for detector in self._detectors:
            if isinstance(detector, Checkpoints):
                values |= {"verified_step": detector.protected, "verified_age": detector.age}
                values |= {"checkpoint_failures": detector.failures, "checkpoint_bytes_per_second": detector.speed}
                if record is not None and detector.protected is not None:
                    behind = max(0, record.step - detector.protected)
                    values["unprotected_tokens"] = behind * record.batch * record.sequence_length
            elif isinstance(detector, Space):
                values["next_checkpoint_fits"] = detector.fit.get("checkpoints")
                values["disk_full_in"] = detector.seconds_to_full.get("checkpoints")
        return Snapshot(**values, **(self._accounts.look() if self._accounts is not None else {}))

    def _told(self, alarm: Alarm, before: Alarm | None) -> None:
        self._news = True
        if self._notifier is not None:
            self._notifier.told(alarm, before)
        if not self._numbers.is_told_by_trainer(alarm):
            journal_alarm(self._journal, alarm)

    def tell_at_once(self, alarm: Alarm) -> None:
        """Send an alarm without writing it down: the run directory does not answer."""
        if self._notifier is not None:
            self._notifier.told(alarm, None)

    def tell_the_end(self) -> None:
        """All ranks are gone: if that was no end in order, somebody must know."""
        intent = exit_intent.read(self._metrics.parent)
        if intent is None or intent.code in (0, 75, 76):
            return
        self.alarms.open(
            "ended",
            Severity.CRIT,
            f"the run has ended with exit {intent.code}: {intent.reason}",
            effect="nothing is trained",
            remedy="see the journal; `fsdp-pretrain launch` does not start it again by itself after 78 and 93",
            step=self._numbers.at,
        )

    def close(self) -> None:
        """The watch ends, or is another's: what was to be sent waits in the spool."""
        if self._accounts is not None:
            self._accounts.close()
        self._exporter.close()
        if self._notifier is not None:
            self._notifier.close()
        self.alarms.close()
        self._journal.close()
        self._claim.release()


def take_the_lead(config: Config, holder: Holder) -> Claim | None:
    """The right to write the alarms of a run; None while another process, which `holder` judges, has it."""
    try:
        run, beat = RunDir(config.run.dir), min(config.watchdog.beat.value, BEAT_SECONDS)
        return keep_alarms(run, "watchdog", beat=beat, holder=holder)
    except OSError:
        return None


def _avoided(alarm: Alarm) -> Iterable[str]:
    hosts = alarm.facts.get("avoid_hosts")
    return hosts if isinstance(hosts, list) else ()


def _ratios(own: dict[int, float]) -> dict[int, float]:
    """Own times over the median of all."""
    known = {rank: value for rank, value in own.items() if value > 0}
    typical = median(known.values()) if known else 0.0
    return {rank: value / typical for rank, value in known.items()}
