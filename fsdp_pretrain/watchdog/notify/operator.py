"""Operator requests to the watchdog: acknowledging alarms, maintenance windows. No torch.

The watchdog that writes the alarms holds a claim on `RUN/watchdog/agent.json`. While one does, people leave requests in
`RUN/watchdog/inbox`; otherwise a command briefly takes the claim and writes itself. So `alarms.jsonl` has one writer at
any time. The claim of a watchdog on another host is judged by its beats.
"""

from __future__ import annotations

import math
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fsdp_pretrain.errors import ConfigError, StorageError
from fsdp_pretrain.record import inbox, journal, state_files
from fsdp_pretrain.record import lease as claims
from fsdp_pretrain.record.files import RunDir, now, seconds_of
from fsdp_pretrain.record.lease import BEAT_SECONDS, Lease, LeaseWatch, take_away
from fsdp_pretrain.record.state_files import StateFile

from .alarms import Alarm, Alarms, read_alarms

_WAIT_SECONDS = 10.0


class MaintenanceWindow(StateFile):
    """A maintenance window: no alarm is sent until then, UTC."""

    until: str


def alarms_file(run: RunDir) -> Path:
    """Every transition of the alarms of a run."""
    return run.path / "watchdog/alarms.jsonl"


def snapshot_file(run: RunDir) -> Path:
    """The watchdog's last `snapshot.Snapshot`, with its time."""
    return run.path / "watchdog/snapshot.json"


def watch_alarm_lease(run: RunDir, silent: float = 0.0) -> LeaseWatch:
    """Watches who may write the alarms of a run. A holder on another host counts as dead after `silent` seconds without
    a beat; 0: never."""
    return LeaseWatch(_claim(run), silent or math.inf)


def take_alarm_lease(
    run: RunDir, purpose: str, *, beat: float = BEAT_SECONDS, watch: LeaseWatch | None = None
) -> Lease | None:
    """Take the right to write the alarms of a run, to be released at the end; None: another process has it.

    Args:
        purpose: shown in the messages of other processes.
        beat: seconds between two signs of life.
        watch: has observed the present claim; see `watch_alarm_lease`.

    Raises:
        OSError: the run directory cannot be written.
    """
    path = _claim(run)
    claim = Lease.take(path, beat=beat, purpose=purpose)
    if claim is None:
        held = claims.read(path)
        try:
            if (watch or watch_alarm_lease(run)).holder_is_alive(held) is not False:
                return None
        except FileNotFoundError:  # released just now
            return None
        take_away(path, held)
        claim = Lease.take(path, beat=beat, purpose=purpose)
    return claim


def serve(run: RunDir, alarms: Alarms) -> None:
    """Carry out the requests since the last pass."""
    for request in inbox.take(_inbox(run)):
        if request.verb == "ack":
            alarms.acknowledge(request.key, request.by)


def acknowledge(run: RunDir, key: str, *, wait: float = _WAIT_SECONDS) -> bool:
    """Acknowledge an alarm, through the watchdog if there is one. False if it did not answer in `wait` seconds; the
    request then stays in its inbox.

    Raises:
        ConfigError: no such alarm is open.
        StorageError: the run directory cannot be written.
    """
    waiting = {alarm.key for alarm in read_alarms(alarms_file(run)) if alarm.state == "open"}
    if key not in waiting:
        raise ConfigError(
            f"no alarm {key!r} is open and unacknowledged",
            remedy=f"these are: {', '.join(sorted(waiting))}" if waiting else "none is; see `fsdp-pretrain alarms RUN`",
        )
    try:
        claim = take_alarm_lease(run, "ack")
        if claim is None:
            left = inbox.put(_inbox(run), verb="ack", key=key)
            deadline = time.monotonic() + wait
            while left.exists() and time.monotonic() <= deadline:
                time.sleep(0.05)
            return not left.exists()
        try:
            writer = journal.Journal(run)
            alarms = Alarms(alarms_file(run), on_change=lambda alarm, before: journal_alarm(writer, alarm))
            known = alarms.acknowledge(key, os.environ.get("USER", "?"))
            if not all((alarms.close(), writer.close())):
                raise StorageError(f"cannot write to the run directory {run.path}: {writer.problem or 'it is full'}")
            return known
        finally:
            claim.release()
    except OSError as error:
        raise StorageError(f"cannot write to the run directory {run.path}: {error.strerror}") from None


def journal_alarm(writer: journal.Journal, alarm: Alarm) -> None:
    """Write a transition to the journal."""
    severity, step = alarm.severity.name, {"step": alarm.step} if alarm.step is not None else {}
    text = f"{severity} {alarm.key} {alarm.state}: {alarm.summary}"
    writer.write("alarm", text, **step, key=alarm.key, severity=severity, state=alarm.state, facts=alarm.facts)


def mute(run: RunDir, seconds: float, reason: str) -> str:
    """Start a maintenance window, or end it with 0 seconds; returns its end, UTC. Raises StorageError."""
    until = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="seconds").replace("+00:00", "Z")
    window = {"until": until, "since": now(), "reason": reason, "by": os.environ.get("USER", "?")}
    try:
        state_files.write(_window(run), window)
    except OSError as error:
        raise StorageError(f"cannot write to the run directory {run.path}: {error.strerror}") from None
    journal.add(run, "mute", f"alarms are not sent until {until}: {reason}" if seconds else "alarms are sent again")
    return until


def muted_until(run: RunDir) -> float:
    """When the maintenance window ends, seconds since the epoch; 0 if there is none."""
    window = state_files.view(_window(run), MaintenanceWindow)
    return (seconds_of(window.until) or 0.0) if window is not None else 0.0


def _claim(run: RunDir) -> Path:
    return run.path / "watchdog/agent.json"


def _window(run: RunDir) -> Path:
    return run.path / "watchdog/muted.json"


def _inbox(run: RunDir) -> Path:
    return run.path / "watchdog/inbox"
