"""Files of the watchdog of node 0, and what operators ask of it: acknowledging alarms.

Only the watchdog of node 0 writes `alarms.jsonl`; people leave requests in `RUN/watchdog/inbox`.
"""

from __future__ import annotations

from pathlib import Path

from fsdp_pretrain.errors import ConfigError, StorageError
from fsdp_pretrain.run import journal, requests
from fsdp_pretrain.run.files import RunDir

from .alarms import Alarm, Alarms, read_alarms


def alarms_file(run: RunDir) -> Path:
    """Every transition of the alarms of a run."""
    return run.path / "watchdog/alarms.jsonl"


def snapshot_file(run: RunDir) -> Path:
    """The watchdog's last `snapshot.Snapshot`, with its time."""
    return run.path / "watchdog/snapshot.json"


def serve(run: RunDir, alarms: Alarms) -> None:
    """Carry out the requests since the last pass."""
    for request in requests.take(_inbox(run)):
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
        requests.put(_inbox(run), verb="ack", key=key)
    except OSError as error:
        raise StorageError(f"cannot write to the run directory {run.path}: {error.strerror}") from None


def journal_alarm(writer: journal.Journal, alarm: Alarm) -> None:
    """Write a transition to the journal."""
    severity, step = alarm.severity.name, {"step": alarm.step} if alarm.step is not None else {}
    text = f"{severity} {alarm.key} {alarm.state}: {alarm.summary}"
    writer.write("alarm", text, **step, key=alarm.key, severity=severity, state=alarm.state, facts=alarm.facts)


def _inbox(run: RunDir) -> Path:
    return run.path / "watchdog/inbox"
