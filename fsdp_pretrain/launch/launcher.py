"""Starts a run, and restarts it until it is complete or should not be restarted.

One launcher per node, with the same command on each. They do not communicate: each node reads from the run directory
how a start ended, and all decide by the same rule.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import Exit, UserError
from fsdp_pretrain.run import lock, run_id, status
from fsdp_pretrain.run.files import RunDir, now
from fsdp_pretrain.run.journal import Journal, Kind
from fsdp_pretrain.run.run_id import LauncherMemory
from fsdp_pretrain.units import human_time

from . import limit, outcome, torchrun
from .outcome import StartOutcome
from .policy import RestartDecision, decide, same_place
from .preflight import preflight
from .torchrun import Torchrun
from .watch import END_SECONDS, TorchrunWatch

_POLL, _READ_EVERY = 0.1, 1.0  # seconds
_TOLD_SECONDS = 15.0
"""For the last messages of the watchdog."""


class Launcher:
    """The starts of one run on one node.

    Args:
        args: parsed options of `fsdp-pretrain launch`.
        options: further options of torchrun.
        job: configuration file and arguments of the trainer, which make up `config`.
        notes: a directory for notes left by the ranks.
    """

    def __init__(
        self, args: argparse.Namespace, options: list[str], job: list[str], config: Config, notes: Path
    ) -> None:
        self._args, self._config, self._settings = args, config, config.launch
        self._run, self._host = RunDir(config.run.dir), socket.gethostname()
        self._notes, self._seen_note = notes, notes / "seen.json"
        self._most_nodes = torchrun.most_nodes(args.nnodes)
        join = self._settings.join_timeout.value
        self._is_first_node = torchrun.is_first(args, join)
        self._command = torchrun.command(args, options, "fsdp_pretrain.train", job, join=join)
        # How long torchrun waits for the ranks that it ends.
        ending = str(max(1, int(self._settings.stop_timeout.value)))
        self._environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": ending, **os.environ}
        self._deadline = limit.deadline(args.time_limit, time.monotonic(), time.time())
        self._pending_signals: list[int] = []
        self._grace = limit.grace(self._run)
        self._stop_reason = ""
        self._history: list[StartOutcome] = []

    def run(self) -> int:
        """Start until there is a reason to end; the exit code. Raises UserError from the checks around a start."""
        for number in torchrun.STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        identifier = run_id.read(self._run.path)
        if identifier is not None:  # no start may use another run directory in its place
            LauncherMemory(self._seen_note).remember(run_id=identifier)
        while True:
            self._check_place()
            if not self._args.no_preflight:
                self._preflight()
            if not self._history and self._run.begun:  # the end of queueing; see `run.goodput`
                self._journal("launch", f"launched on {self._host}")
            decision = self._start_once()
            if decision.code is not None:
                return self._end(decision)
            self._report_restart(decision)
            self._wait_for(lambda: False, decision.pause, _POLL)
            if self._is_held():
                _say("waiting for the end of what somebody does to the run, such as a rollback")
            self._wait_for(lambda: not self._is_held(), math.inf, _POLL)
            if self._pending_signals:
                name = signal.Signals(self._pending_signals[0]).name
                reason = f"asked to stop before it was started again: {name}"
                return self._end(RestartDecision(int(Exit.RESUME), reason))

    def _preflight(self) -> None:
        """Check storage and devices. Raises UserError, which the record has if there were starts before."""
        try:
            for warning in preflight(self._config, self._run, self._args.nproc_per_node):
                _say(f"preflight: {warning}")
        except UserError as error:
            if self._history:
                self._record_refusal(int(error.exit), error.cause)
            raise

    def _is_held(self) -> bool:
        """Whether a person goes back, or does something else to the run that no start can do meanwhile."""
        held = lock.read(self._run.lock)
        return held is not None and held.purpose != lock.TRAINING and lock.is_held(self._run)

    def _check_place(self) -> None:
        """Raise RunGoneError if the run directory is not the one that earlier starts have seen."""
        memory = LauncherMemory(self._seen_note)
        if memory.seen is not None:
            run_id.bind(self._run.path, memory.seen.run_id)
        memory.check(self._run.path, lambda: outcome.newest_segment(self._run))

    def _start_once(self) -> RestartDecision:
        """Run one start to its end, and decide what follows."""
        newest = outcome.newest_segment(self._run)
        verified_before = outcome.verified_step(self._run)

        def newest_before() -> int:
            seen = LauncherMemory(self._seen_note).seen
            return max(newest, seen.restored if seen is not None else 0)

        note = self._notes / f"{len(self._history)}.json"
        child = Torchrun(self._command, torchrun.environment(self._environment, note, self._seen_note))
        host = self._host if self._most_nodes > 1 else None
        begun = time.monotonic()
        watch = TorchrunWatch(self._run, self._settings, child, newest_before, host=host)
        code = watch.run(self._take_signal, self._on_read)

        def read() -> StartOutcome:
            joined = child.had_ranks or self._most_nodes == 1
            return outcome.read_outcome(self._run, newest_before(), note, code, host=host, joined=joined)

        try:
            ended = read()
        except OSError:  # a mount that is gone says so
            self._check_place()
            raise
        if ended.code != Exit.COMPLETE:
            self._check_place()
        if self._most_nodes > 1 and ended.segment is not None:
            self._wait_for_others(ended.segment)
            ended = read()
        at = time.monotonic()
        verified = outcome.verified_step(self._run)
        ended = replace(ended, at=at, seconds=at - begun, verified=verified, verified_before=verified_before)
        self._history.append(ended)
        if ended.code == Exit.RESUME_AVOIDING_HOSTS and self._is_first_node:
            _try_to_write(lambda: outcome.avoid(self._run, ended.avoid))
        elastic = ":" in self._args.nnodes
        return decide(self._history, self._settings, asked=bool(self._stop_reason), host=self._host, elastic=elastic)

    def _wait_for_others(self, segment: int) -> None:
        """Wait until every node's part of a segment has ended or timed out: ranks left would join the next start."""
        _try_to_write(lambda: outcome.mark_ended(self._run, segment))
        hosts = outcome.hosts_of(self._run, segment)
        patience = 2 * END_SECONDS
        self._wait_for(lambda: hosts <= outcome.gone_hosts(self._run, segment), patience, _READ_EVERY)

    def _wait_for(self, condition: Callable[[], bool], seconds: float, poll: float) -> None:
        """Wait until a condition holds, the time is over, or a signal comes."""
        until = time.monotonic() + seconds
        while not condition() and time.monotonic() < until and not self._pending_signals:
            time.sleep(poll)

    # ------------------------------------------------------------------ the journal

    def _report_restart(self, decision: RestartDecision) -> None:
        last, number = self._history[-1], len(self._history) + 1
        code = "no code" if last.code is None else f"exit {last.code}"
        text = f"start {number} follows in {human_time(decision.pause)}: {code}, {decision.reason}"
        _say(text)
        self._journal(
            "restart",
            text,
            attempt=number,
            reason=last.reason,
            code=last.code,
            pause=decision.pause,
            ended_segment=last.segment,
            last_step=last.step,
            suspects=list(last.ahead) if same_place(self._history) else [],
        )

    def _on_read(self) -> None:
        """Called by a thread about every second of a start."""
        if self._deadline is not None:
            self._grace = limit.grace(self._run)

    def _end(self, decision: RestartDecision) -> int:
        """Report why the launcher ends. Returns its exit code."""
        assert decision.code is not None
        torchrun.ignore_requests()
        last = self._history[-1] if self._history else StartOutcome(None, "")
        told = decision.code == last.code == Exit.REFUSED and self._most_nodes == 1  # by its ranks
        _say(f"exit {decision.code}" + ("" if told else f": {decision.reason}"))
        if decision.overruled:
            if self._is_first_node:
                _try_to_write(lambda: outcome.overrule(self._run, last.segment, decision.reason))
            self._journal(
                "stop", f"exit {decision.code}: {decision.reason}", code=decision.code, suspects=list(last.ahead)
            )
        elif last.segment is None and len(self._history) > 1:
            self._record_refusal(decision.code, decision.reason)
        elif decision.code == Exit.RESUME_AVOIDING_HOSTS:
            hosts = outcome.avoided(self._run)
            self._journal("avoid-hosts", f"start again without {', '.join(hosts)}", hosts=hosts)
        torchrun.wait_for_watchdog(self._run.path, _TOLD_SECONDS)  # a container ends with this process
        return decision.code

    def _record_refusal(self, code: int, reason: str) -> None:
        """Record why no further start follows, of one that has no segment to record it in."""
        if self._is_first_node:
            _try_to_write(lambda: status.update(self._run, **status.ended(code, reason)))
        self._journal("stop", f"exit {code}: {reason}", code=code)

    def _journal(self, kind: Kind, text: str, **data: object) -> None:
        """Write an entry, on the first node only."""
        if self._is_first_node:
            journal = Journal(self._run)
            journal.write(kind, text, **data)
            journal.close()

    # ------------------------------------------------------------------ requests to stop

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._pending_signals.append(number)

    def _take_signal(self) -> tuple[int, bool] | None:
        """A pending signal for the ranks, or SIGTERM when the time limit is near: its number, and whether to end at
        once."""
        if self._pending_signals:
            number, again = self._pending_signals.pop(0), bool(self._stop_reason)
            self._stop_reason = self._stop_reason or signal.Signals(number).name
            at_once = again and number == signal.SIGINT
            _say(f"{self._stop_reason}: " + ("ending at once" if at_once else "asking the ranks to save and stop"))
            return number, at_once
        left = (self._deadline or math.inf) - time.monotonic()
        if self._stop_reason or left > self._grace:
            return None
        self._stop_reason = f"time limit in {human_time(max(0.0, left))}"
        _say(f"{self._stop_reason}: asking the ranks to save and stop")
        return int(signal.SIGTERM), False


def _try_to_write(act: Callable[[], object]) -> None:
    """Write to the run directory; a failure is only printed, so that the launcher ends in the same way."""
    try:
        act()
    except OSError as error:
        _say(f"cannot write to the run directory: {error}")


def _say(text: str) -> None:
    print(f"{now()[11:19]} launch: {text}", file=sys.stderr, flush=True)
