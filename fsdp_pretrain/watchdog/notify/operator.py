"""Operator requests to the watchdog: acknowledging alarms, maintenance windows. No torch.

Only the watchdog of node 0 writes `alarms.jsonl`; people leave requests in `RUN/watchdog/inbox`.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fsdp_pretrain.errors import ConfigError, StorageError
from fsdp_pretrain.record import inbox, journal, state_files
from fsdp_pretrain.record.files import RunDir, now, seconds_of
from fsdp_pretrain.record.state_files import StateFile

from .alarms import Alarm, Alarms, read_alarms


class MaintenanceWindow(StateFile):
    """A maintenance window: no alarm is sent until then, UTC."""

    until: str


def alarms_file(run: RunDir) -> Path:
    """Every transition of the alarms of a run."""
    return run.path / "watchdog/alarms.jsonl"


def snapshot_file(run: RunDir) -> Path:
    """The watchdog's last `snapshot.Snapshot`, with its time."""
    return run.path / "watchdog/snapshot.json"


def serve(run: RunDir, alarms: Alarms) -> None:
    """Carry out the requests since the last pass."""
    for request in inbox.take(_inbox(run)):
        if request.verb == "ack":
            alarms.acknowledge(request.key, request.by)


def acknowledge(run: RunDir, key: str) -> None:
    """Ask the watchdog to acknowledge an alarm: it does so in one of its next passes, or when the run starts again.

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
        inbox.put(_inbox(run), verb="ack", key=key)
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


def _window(run: RunDir) -> Path:
    return run.path / "watchdog/muted.json"


def _inbox(run: RunDir) -> Path:
    return run.path / "watchdog/inbox"
