"""Further duties of the agent of node 0: read the record, keep the alarms, notify people, export metrics."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice, takewhile

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import ConfigError, Exit
from fsdp_pretrain.run import environment, exit_intent, status
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.journal import Journal
from fsdp_pretrain.run.metrics import METRICS, records
from fsdp_pretrain.run.requests import send
from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.detectors.base import Detector
from fsdp_pretrain.watchdog.detectors.evaluations import evaluates
from fsdp_pretrain.watchdog.detectors.health import is_written_by_trainer
from fsdp_pretrain.watchdog.detectors.judged import Judged
from fsdp_pretrain.watchdog.hang.rank_monitor import RankMonitor
from fsdp_pretrain.watchdog.notify.alarms import Alarm, Alarms, alarms_file
from fsdp_pretrain.watchdog.notify.channels import Channel, make_channels
from fsdp_pretrain.watchdog.notify.message import MessageSender
from fsdp_pretrain.watchdog.notify.metrics import Exporter, Snapshot, write_snapshot
from fsdp_pretrain.watchdog.notify.notifier import Notifier, Ping

from .pass_runner import INTERVAL

_PER_START = frozenset(
    "hang rank-died ended pace straggler node gpu gpu-odd gpu-blind memory oom-kill mount run-directory corpus-storage "
    "mirror".split()
)
"""Detectors whose alarms end when the ranks are restarted, perhaps on other hosts: what persists is found again."""
_OF_SOURCES = ("data-shard", "data-share")
"""Detectors whose alarms are of one source each, as `data-shard/SOURCE`."""
_SNAPSHOT_SECONDS = 10.0
_LEARNED = 8 << 20
"""Bytes of the record, some thousand steps, that a restarted agent learns from: all would take minutes."""
_SERVE_PASSES = 5
"""Passes between two checks for requests and two exports, unless an alarm changes."""


class Leader:
    """Keeps and sends the alarms of a job, on node 0, once the segment is known.

    Attributes:
        last: the last record read.
        judged: how far this agent, and those before it in this start, have judged the record and the journal.
    """

    def __init__(self, config: Config, ranks: RankMonitor, segment: int) -> None:
        self._config, self._run, self._segment, self._ranks = config, RunDir(config.run.dir), segment, ranks
        self._metrics = self._run.segment(segment) / METRICS
        self.judged = Judged.of(self._run, segment)
        self.last: StepRecord | None = None
        self._skipped = 0
        self._avoided = set[str]()
        self._written = self._served = -math.inf
        self._changed = False
        self._journal = Journal(self._run)  # kept open: it buffers entries while the disk is full
        self._notifier: Notifier | None = None
        self._ping: Ping | None = None
        self.alarms = Alarms(alarms_file(self._run), self._on_change)
        section = config.watchdog.notify
        try:
            self._resolve_notify(make_channels(section))
            self._notifier = Notifier(section, self._run, MessageSender(config.run.name, str(self._run.path), segment))
            self._ping = Ping() if section.ping else None
        except ConfigError as error:  # the trainer checked it, but secrets may be missing now
            self.alarms.open("notify", Severity.WARN, error.cause, effect="no alarm is sent")
        self._exporter = Exporter(section.metrics)
        start = environment.view(self._run, segment)
        self._hosts, begun = frozenset(start.hosts), start.time or "9"
        for alarm in list(self.alarms):  # an earlier agent may have opened some in this start
            if alarm.detector in _PER_START and alarm.opened < begun:
                self.alarms.resolve(alarm.key, "the ranks were started again")
        self._resolve_unjudged()

    def _resolve_notify(self, channels: Sequence[Channel]) -> None:
        """Resolve what an earlier start reported: that no channel worked, and channels that are not used any more.
        Before there is a notifier, which would send it."""
        used = {channel.key for channel in channels}
        for key in self.alarms.open_keys():
            if key == "notify" or (key.startswith("notify/") and key not in used):
                self.alarms.resolve(key, "the channels of this start can be used")

    def _resolve_unjudged(self) -> None:
        """Resolve the alarms of sources and evaluations that this start lacks: no detector would."""
        sources = {source.name for source in self._config.data.sources}
        for alarm in list(self.alarms):
            if alarm.detector in _OF_SOURCES and f"{alarm.key}/".split("/")[1] not in sources:
                self.alarms.resolve(alarm.key, "that source is not used any more")
            elif alarm.detector.startswith("evaluation-") and not evaluates(self._config):
                self.alarms.resolve(alarm.key, "evaluations are off")

    def teach(self, detectors: Sequence[Detector]) -> None:
        """Let new detectors learn from the first and the last records that an agent before this one has judged."""
        end = self.judged.metrics
        tail = max(0, end - _LEARNED)
        first = islice(records(self._metrics), 1 if tail else 0)
        for record, _ in chain(first, takewhile(lambda item: item[1] <= end, records(self._metrics, tail))):
            self._read(record)
            for detector in detectors:
                detector.learn(record)

    def new_records(self) -> Iterator[StepRecord]:
        """The records that the trainer wrote since the last call, or since an agent before this one read them."""
        for record, offset in records(self._metrics, self.judged.metrics):
            self.judged.metrics = offset
            self._read(record)
            yield record

    def _read(self, record: StepRecord) -> None:
        self.last = record
        self._skipped += record.skipped

    @property
    def at(self) -> int | None:
        """The last recorded step of this start."""
        return None if self.last is None else self.last.step

    def end_pass(self, detectors: Sequence[Detector]) -> None:
        """Serve requests, notify and export, every few passes and when an alarm has changed."""
        now = time.monotonic()
        if now - self._served < _SERVE_PASSES * INTERVAL and not self._changed:
            return
        self._served, self._changed = now, False
        self.judged.save(self._run)
        self.alarms.serve(self._run)
        self._avoid_hosts()
        if self._notifier is not None:
            self._notifier.tick(self.alarms)
        self._export(self._snapshot(detectors), now)
        if self._ping is not None:
            self._ping.on_pass(bool(self._ranks.beats), now)

    def _avoid_hosts(self) -> None:
        """If a device is broken for good, ask the run to save, stop and restart elsewhere (exit 76)."""
        broken = self.broken_hosts()
        if not broken or broken <= self._avoided or not self._config.watchdog.act:
            return
        names = ", ".join(sorted(broken))
        with contextlib.suppress(OSError):  # the disk is full: retried in the next pass
            why, hosts = f"broken hardware on {names}", sorted(broken)
            send(self._run, "stop", segment=self._segment, reason=why, avoid_hosts=hosts)
            self._avoided |= broken

    def broken_hosts(self) -> set[str]:
        """Hosts of this start with hardware that is broken for good; alarms of earlier ones may name others."""
        named = {
            host
            for alarm in self.alarms
            if alarm.severity is Severity.CRIT
            for host in alarm.facts.get("avoid_hosts", ())
        }
        return named & self._hosts if self._hosts else named

    # ------------------------------------------------------------------ export and notification

    def _export(self, snapshot: Snapshot, now: float) -> None:
        self._exporter.update(snapshot)
        if now - self._written >= _SNAPSHOT_SECONDS:
            self._written = now
            with contextlib.suppress(OSError):
                write_snapshot(self._run, snapshot)
        if self._exporter.problem:
            self.alarms.open("metrics", Severity.INFO, self._exporter.problem, effect="no metrics for Prometheus")
        else:
            self.alarms.resolve("metrics")

    def _snapshot(self, detectors: Sequence[Detector]) -> Snapshot:
        at, severities = time.monotonic_ns(), Counter(alarm.severity for alarm in self.alarms)
        snapshot: Snapshot = {
            "run": self._config.run.name,
            "segment": self._segment,
            "total_steps": self._config.schedule.steps,
            "heartbeat_ages": {beat.rank: (at - beat.phase_at) / 1e9 for beat in self._ranks.beats},
            "open": {severity.name: severities[severity] for severity in Severity},
        }
        if (record := self.last) is not None:
            snapshot |= {
                "step_seconds": record.seconds.iteration,
                "step": record.step,
                "total_steps": self._config.schedule.last_step(record.step, record.consumed),
                "tokens": record.tokens,
                "world": record.world,
                "skipped_steps": self._skipped,
                "grad_norm": record.grad_norm,
                "loss": record.loss.mean,
            }
        for detector in detectors:
            snapshot |= detector.figures()
        return snapshot

    def _on_change(self, alarm: Alarm) -> None:
        self._changed = True
        self.send(alarm)
        if not is_written_by_trainer(alarm, self.last):
            severity, step = alarm.severity.name, {"step": alarm.step} if alarm.step is not None else {}
            text = f"{severity} {alarm.key} {alarm.state}: {alarm.summary}"
            facts = {"key": alarm.key, "severity": severity, "state": alarm.state, "facts": alarm.facts}
            self._journal.write("alarm", text, **step, **facts)

    def send(self, alarm: Alarm) -> None:
        """Send an alarm to people without recording it: the run directory may not answer."""
        if self._notifier is not None:
            self._notifier.on_change(alarm)

    def report_end(self) -> None:
        """Once all ranks have ended: resolve the alarms of the start if the run is complete; else open one, unless they
        ended in order."""
        intent = exit_intent.read(self._metrics.parent)
        if status.read(self._run).was_complete or (intent is not None and intent.code == Exit.COMPLETE):
            for alarm in [alarm for alarm in self.alarms if alarm.detector in _PER_START]:
                self.alarms.resolve(alarm.key, "the run is complete")
            return
        if intent is None or intent.code in (Exit.RESUME, Exit.RESUME_AVOIDING_HOSTS):
            return
        who = f"rank {intent.rank}: " if intent.own else ""
        self.alarms.open(
            "ended",
            Severity.CRIT,
            f"the run has ended with exit {intent.code}: {who}{intent.reason}",
            effect="nothing is trained",
            remedy="see the journal; `fsdp-pretrain launch` does not start it again by itself after 78 and 93",
            step=self.at,
        )

    def close(self) -> None:
        """Close channels and files."""
        self.judged.save(self._run)
        self._exporter.close()
        if self._notifier is not None:
            self._notifier.close()
        self.alarms.close()
        self._journal.close()
