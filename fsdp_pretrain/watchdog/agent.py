"""The agent: one small process per node beside the ranks, which sees what they cannot see themselves.

A rank of the node starts it (`rank_client`). It outlives the rank, and ends with the process that started the ranks.
Every two seconds it checks pages, processes and the record. It acts through the control inbox, by stack dumps and, as
the last resort, by ending its own node's ranks. The agent of node 0 leads: it keeps the alarms, others report to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_pretrain.config.config import Config, parse
from fsdp_pretrain.errors import Exit, StorageError, UserError
from fsdp_pretrain.files import lock_file
from fsdp_pretrain.heartbeat import Phase
from fsdp_pretrain.helper_process import read_settings
from fsdp_pretrain.run import exit_intent, run_id
from fsdp_pretrain.run.exit_intent import ExitIntent
from fsdp_pretrain.run.files import RunDir, make_directory, now
from fsdp_pretrain.run.journal import Journal
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.detectors.base import Detector
from fsdp_pretrain.watchdog.detectors.nodes import open_silence
from fsdp_pretrain.watchdog.hang.monitor import HangMonitor
from fsdp_pretrain.watchdog.hang.page import Beat
from fsdp_pretrain.watchdog.hang.peers import BEAT_SECONDS, NodeFindings, NodeReport, PeerNodes
from fsdp_pretrain.watchdog.hang.rank_client import AgentSettings, root, sweep
from fsdp_pretrain.watchdog.hang.rank_monitor import Rank, RankMonitor, RankSnapshot
from fsdp_pretrain.watchdog.notify.alarms import Alarm, AlarmSink

from .leader import Leader
from .pass_runner import INTERVAL, PassRunner
from .registry import build_detectors

_STALLED = 0.5
"""Seconds between two passes while the ranks are stalled."""
_ABSENT = 10.0
"""Seconds for which a run directory may be missing, e.g. during a remount, before the ranks are asked to stop."""
_GIVE_UP = 60.0
"""Seconds to wait for the first rank, or for the end of an earlier attempt's agent."""


def main() -> int:
    """Run an agent to its end."""
    for number in (signal.SIGINT, signal.SIGUSR1):  # schedulers send them to every process of a job, to stop it
        signal.signal(number, signal.SIG_IGN)
    settings = read_settings(AgentSettings)
    try:
        config = parse(settings.config)
    except UserError as error:
        print(f"the watchdog cannot start: {error}", file=sys.stderr, flush=True)
        return int(error.exit)
    pages = Path(settings.pages)
    sweep(root(), pages)
    name = hashlib.sha256(f"{config.run.dir} {socket.gethostname()} {settings.node}".encode()).hexdigest()[:16]
    lock_file(pages.parent / f"{name}.lock", _GIVE_UP)  # one agent per run and node: an earlier attempt's ends soon
    Agent(config, settings, pages).run()
    return 0


class Agent:
    """One node's agent."""

    def __init__(self, config: Config, settings: AgentSettings, pages: Path) -> None:
        self._config, self._run = config, RunDir(config.run.dir)
        self._settings, self._pages = settings, pages
        self._directory = self._run.path / "watchdog"
        self._segment = 0
        self._ranks = RankMonitor(range(settings.first, settings.stop), pages, settings.launcher)
        self._nodes = PeerNodes(self._directory, settings.node, settings.nodes, settings.attempt)
        self._leader: Leader | None = None
        self._findings = NodeFindings()
        self._detectors: list[Detector] = []
        stacks = self._directory / "stacks"
        self._hang = HangMonitor(config.watchdog, self._ranks, self._nodes, stacks, end=self._end_ranks)
        self._died: list[Rank] = []
        self._stalled: list[RankSnapshot] = []
        self._ended = self._asked_to_end = self._stop_asked = self._leader_missed = False
        self._absent_since: float | None = None

    def run(self) -> None:
        """Make passes until the ranks have ended."""
        signal.signal(signal.SIGTERM, self._on_signal)
        begun = time.monotonic()
        runner = PassRunner(self._ranks, self._hang.hard_deadline, self._send)
        runner.run(self._begin)
        while True:
            start = time.monotonic()
            if (alarm := runner.run(self._run_pass)) is not None:  # it was sent, and can be recorded now
                runner.run(partial(self._record_alarm, alarm))
            if self._finished(begun):
                break
            pause = min(INTERVAL, _STALLED) if self._hang.is_stalled else INTERVAL
            self._died += self._ranks.wait(pause - (time.monotonic() - start))
        runner.run(self._finish, self._nodes.patience)
        shutil.rmtree(self._pages, ignore_errors=True)

    def _begin(self) -> None:
        self._bind()
        if self._settings.restarts:
            self._log(f"the agent exited and was restarted (restart {self._settings.restarts})")

    def _run_pass(self) -> None:
        """One pass; the order of the checks matters."""
        self._ranks.read_pages()
        self._update_segment()
        died = self._take_dead_ranks()
        self._check_launcher(died)
        self._check_nodes()
        self._report_dead_ranks(died)
        if not self._ended:
            self._hang.check()
        self._report()
        self._run_detectors()
        self._check_run_directory()

    def _run_detectors(self) -> None:
        if self._segment and not self._detectors and not self._ended:
            self._detectors = self._build_detectors()
        if self._leader is not None:
            for record in self._leader.new_records():
                for detector in self._detectors:
                    detector.step(record)
            if self._leader.last is not None:
                self._hang.history.assume(self._leader.last.seconds.iteration)
        for detector in self._detectors:
            detector.tick(time.monotonic())
        if self._leader is not None:
            self._leader.end_pass(self._detectors)

    def _build_detectors(self) -> list[Detector]:
        """The detectors, having learned from what an agent before this one in this start has judged."""
        judged = None if self._leader is None else self._leader.judged
        detectors = build_detectors(self._config, self._alarms, self._ranks, self._nodes, self._segment, judged)
        if self._leader is not None:
            self._leader.teach(detectors)
        return detectors

    def _finished(self, begun: float) -> bool:
        seen = bool(self._ranks.beats)
        if self._asked_to_end or (not seen and time.monotonic() - begun > _GIVE_UP):
            return True
        return seen and not self._ranks.alive and not self._died

    def _finish(self) -> None:
        """Write the last report, and wait for those of the other nodes, which may name the cause of the end."""
        self._hang.keep_recordings()
        self._report(ended=True)
        if self._leader is not None:
            self._run_detectors()
        if self._nodes.others and self._segment and not self._asked_to_end:
            self._wait_for_other_nodes()
        if self._leader is not None:
            self._leader.report_end()
            self._leader.close()

    # ------------------------------------------------------------------ this start, the run directory

    def _update_segment(self) -> None:
        if run_id.bound_to(self._run.path) is None:
            self._bind()
        if (segment := self._ranks.segment) and segment != self._segment:
            self._segment = segment
            run_id.bind(self._run.checkpoints, run_id.read(self._run.checkpoints))

    def _bind(self) -> None:
        """Take the id of the run directory from the ranks; until they know it, nothing is written there."""
        known = run_id.read(self._pages)
        run_id.bind(self._run.path, known)
        if known is None:
            return
        with contextlib.suppress(OSError):
            make_directory(self._directory)
            with (self._directory / "agent.log").open("ab") as log:
                for stream in (sys.stdout, sys.stderr):
                    os.dup2(log.fileno(), stream.fileno())

    def _check_run_directory(self) -> None:
        """No save can succeed without the run directory: if it stays away, open an alarm and ask the ranks to stop."""
        try:
            directory = run_id.lost()
        except StorageError:  # no answer: the mount detector reports it
            return
        if directory is None:
            self._absent_since = None
            self._alarms.resolve("run-directory", f"{self._run.path} is back")
            return
        if self._absent_since is None:
            self._absent_since = time.monotonic()
        if time.monotonic() - self._absent_since < _ABSENT:
            return
        act, error = self._config.watchdog.act, run_id.run_gone_error(directory)
        self._alarms.open(
            "run-directory",
            Severity.CRIT,
            error.cause,
            effect="nothing can be saved or recorded; a save that is due ends the run with exit 93",
            remedy=error.remedy,
            action="asked the ranks to stop" if act else "",
        )
        if act and not self._stop_asked and not self._ended and Phase.END not in self._ranks.phases:
            self._stop_asked = True
            for rank in self._ranks.alive[:1]:
                rank.signal(signal.SIGUSR1)

    # ------------------------------------------------------------------ other nodes

    def _check_nodes(self) -> None:
        """Read the other nodes' reports, and check whether a later start continued without this (then frozen) node."""
        leads, stalled = self._nodes.leader is None, bool(self._hang.stalled)
        if self._nodes.read(all_=leads or stalled, at_once=leads and stalled):
            self._end_if_superseded()
        if leads and self._leader is None and self._segment and not self._ended:
            self._nodes.begin()
            self._leader = Leader(self._config, self._ranks, self._segment)
            for key, finding in self._findings.by_key.items():  # opened before the segment was known
                finding.enter(self._leader.alarms, key)
            self._hang.alarms = self._leader.alarms
        if self._nodes.leader is not None and self._nodes.leader.silent != self._leader_missed:
            self._leader_missed = not self._leader_missed
            name = f"the watchdog of {self._nodes.leader.report.host}, which sends the alarms of this run,"
            self._log(f"{name} is silent: none is sent" if self._leader_missed else f"{name} is back")

    def _end_if_superseded(self) -> None:
        segments = self._run.segments
        newest = int(segments[-1].name) if segments else 0
        if not self._segment or newest <= self._segment or self._ended:
            return
        self._ended = True
        self._log(f"start {newest} continued without these ranks of start {self._segment}: they were ended")
        self._ranks.kill()
        if self._leader is not None:  # the later start's agent has the alarms now
            self._leader.close()
            self._leader, self._hang.alarms, self._detectors = None, None, []

    def _report(self, *, ended: bool = False) -> None:
        if not (ended or self._ended):  # for ended ranks, keep their last positions: the others may still need them
            self._stalled = self._hang.stalled
        report = NodeReport(
            time=now(),
            attempt=self._settings.attempt,
            host=socket.gethostname(),
            pid=os.getpid(),
            segment=self._segment,
            stalled=self._stalled,
            findings=self._findings.by_key,
            windows=self._ranks.windows,
            ended=ended,
        )
        self._nodes.write(report)

    def _wait_for_other_nodes(self) -> None:
        """Wait for the last reports of the other nodes. If ranks failed without a recorded cause, a node without such
        a report is it."""
        intent = self._intent()
        if intent is not None and intent.code == Exit.COMPLETE:
            return
        patience, begun = self._nodes.patience, time.monotonic()
        while not self._nodes.all_ended and time.monotonic() - begun < patience:
            time.sleep(BEAT_SECONDS / (4 if self._leader is not None else 1))
            self._nodes.read(all_=True, at_once=True)
        lost = self._nodes.quiet()
        if self._leader is not None:
            self._run_detectors()
        intent = self._intent()
        explained = intent is not None and not intent.is_effect and not intent.unexplained
        if (
            not lost
            or explained
            or any(other.number < self._nodes.node and other.report.host not in lost for other in self._nodes.others)
        ):
            return  # the first remaining node reports for all
        for host, seconds in lost.items():
            if self._leader is not None:
                effect = "the ranks of the other nodes lost their connection to it"
                open_silence(self._alarms, host, seconds, effect, step=self._leader.at)
            else:
                self._log(f"no heartbeat from {host} for {human_time(seconds)}: it is lost, and the ranks failed")
        text = f"{', '.join(lost)} is lost: no heartbeat from it since the ranks failed"
        self._write_intent(Exit.RESUME, text, {"suspects": [], "hosts": list(lost), "lost": list(lost)})

    # ------------------------------------------------------------------ ranks that end

    def _take_dead_ranks(self) -> list[Beat]:
        """Take the last beats of the ranks that ended since the last pass without recording a reason."""
        died, self._died = [(rank, rank.beat) for rank in self._died if rank.beat is not None], []
        return [
            beat
            for rank, beat in died
            if beat.segment != 0 and beat.phase is not Phase.END and not self._is_explained(rank)
        ]

    def _is_explained(self, rank: Rank) -> bool:
        """Whether the run recorded why it ends (a failure that this death caused in another rank does not count, nor
        does an error of a rank while a host is known to be broken, which explains both)."""
        intent = self._intent()
        if intent is None or intent.rank == rank.number:
            return intent is not None
        return not intent.is_effect and not (intent.own and self._broken_hosts())

    def _broken_hosts(self) -> list[str]:
        return sorted(self._leader.broken_hosts()) if self._leader is not None else []

    def _check_launcher(self, died: list[Beat]) -> None:
        """End the ranks if their launcher is gone: the kernel kills all of them when torchrun is killed."""
        all_ = len(died) == len(self._ranks.all)
        if self._ranks.launcher_gone and not self._ended and (self._ranks.alive or all_):
            reason = "the process that started the ranks is gone" + (f"; {_deaths(died)}" if died else "")
            self._end_ranks(reason, {}, restart=False)

    def _report_dead_ranks(self, died: list[Beat]) -> None:
        """Open an alarm for ranks that ended without a reason, and set the run's exit intent to resume."""
        if self._ended or not died:
            return
        host, ranks, text = socket.gethostname(), [beat.rank for beat in died], _deaths(died)
        broken = self._broken_hosts()
        code = Exit.RESUME_AVOIDING_HOSTS if broken else Exit.RESUME
        facts = {"suspects": ranks, "hosts": [host], **({"avoid_hosts": broken} if broken else {"unexplained": True})}
        self._write_intent(code, text, facts)
        self._alarms.open(
            "rank-died",
            Severity.CRIT,
            text,
            effect="the other ranks cannot continue",
            remedy="the job starts again from the last checkpoint; check the kernel's log of that host",
            step=max(beat.step for beat in died),
            facts={"ranks": ranks, "host": host},
        )

    def _intent(self) -> ExitIntent | None:
        return exit_intent.read(self._run.segment(self._segment)) if self._segment else None

    def _write_intent(self, code: Exit, reason: str, facts: dict[str, Any], *, restart: bool = True) -> None:
        if self._segment:
            segment, more = self._run.segment(self._segment), {"by": "watchdog", "restart": restart, **facts}
            exit_intent.write(self._run, segment, int(code), reason, is_cause=True, **more)

    def _end_ranks(self, reason: str, facts: dict[str, Any], *, restart: bool = True) -> None:
        """Record the reason, let even stopped ranks dump their stacks, and kill all ranks of this node."""
        self._ended = True
        self._write_intent(Exit.RESUME, reason, facts, restart=restart)
        self._hang.take_last_stacks()
        self._ranks.kill()

    # ------------------------------------------------------------------ records, alarms

    @property
    def _alarms(self) -> AlarmSink:
        """The alarms of the run, or, while this node does not lead, the findings that it reports."""
        return self._findings if self._leader is None else self._leader.alarms

    def _log(self, text: str) -> None:
        Journal(self._run, self._segment or None).write("watchdog", f"{socket.gethostname()}: {text}")

    def _send(self, alarm: Alarm) -> None:
        if self._leader is not None:
            self._leader.send(alarm)

    def _record_alarm(self, alarm: Alarm) -> None:
        if self._leader is not None:  # else nobody was told
            self._leader.alarms.enter_sent(alarm)
            self._leader.alarms.resolve(alarm.key, "the run directory answers again")

    def _on_signal(self, number: int, frame: Any) -> None:
        del number, frame
        self._asked_to_end = not self._ranks.alive  # ranks alive: it asks the job to stop, so watch the last save


def _deaths(died: list[Beat]) -> str:
    host = socket.gethostname()
    return "; ".join(
        f"rank {beat.rank} ({host}, pid {beat.pid}) exited in step {beat.step} without reporting a reason"
        for beat in died
    )


if __name__ == "__main__":
    sys.exit(main())
