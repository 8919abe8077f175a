"""Alarms: one key per incident; opened, raised in severity, acknowledged, resolved.

Every transition is a line of `RUN/watchdog/alarms.jsonl`, from which the open alarms are restored after a restart. Only
the watchdog of node 0 writes it; people leave requests in `RUN/watchdog/inbox`. What is *sent* is decided in
`dispatcher`.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import TypeAdapter

from fsdp_pretrain.errors import ConfigError, StorageError, raising
from fsdp_pretrain.run import requests
from fsdp_pretrain.run.files import AppendFile, RunDir, json_object, now, read_lines, seconds_of
from fsdp_pretrain.severity import Severity

State = Literal["open", "acknowledged", "resolved"]
REPORTED_BY = "reported_by"
"""The fact of an alarm that another node reported: the host of that node."""


@dataclass(frozen=True)
class Alarm:
    """The present state of an incident."""

    key: str  # `detector` or `detector/scope`, e.g. `hang` or `straggler/rank-3`: the same incident has the same key
    severity: Severity  # the highest severity since it was opened
    state: State  # open; acknowledged: a person knows; resolved
    summary: str  # what happened, in one line with the numbers
    effect: str = ""  # this and the next: the consequence, and what to do
    remedy: str = ""
    opened: str = ""  # this and the next: times, ISO 8601
    changed: str = ""
    step: int | None = None  # step of the run when it last changed
    count: int = 1  # how often it was opened
    action: str = ""  # what the watchdog did, if anything
    facts: dict[str, Any] = field(default_factory=dict)  # further values

    @property
    def detector(self) -> str:
        return self.key.partition("/")[0]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "severity": self.severity.name}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Alarm:
        """The inverse of `to_json`. Raises ValueError, KeyError."""
        alarm = _schema().validate_python({**content, "severity": Severity[content["severity"]]})
        if seconds_of(alarm.opened) is None:
            raise ValueError(f"it was opened at {alarm.opened!r}")
        return alarm


class AlarmSink(Protocol):
    """Receives the findings of detectors: the alarms of the run on node 0, or a report to node 0 on other nodes."""

    def open_keys(self, least: Severity = Severity.INFO) -> list[str]:
        """The keys of the open alarms of at least a severity."""

    def open(self, key: str, severity: Severity, summary: str, *, revised: bool = False, **more: Any) -> None:
        """Open or update an incident; `more` are further fields of `Alarm`."""

    def resolve(self, key: str, summary: str = "", *, step: int | None = None) -> None:
        """Resolve an incident, if it is open."""


class Alarms(AlarmSink):
    """All alarms of a run. Only the watchdog of node 0 writes them.

    Args:
        path: `alarms.jsonl`; read if it exists. While the disk is full, lines wait in memory.
        on_change: called with the alarm at every transition, before the write, because the file may be on a mount that
            hangs, which must be reported too.
    """

    def __init__(self, path: Path, on_change: Callable[[Alarm], None]) -> None:
        self._file, self._on_change = AppendFile(path, durable=True), on_change
        self._known: dict[str, Alarm] = {}
        with contextlib.suppress(OSError):  # then every condition that lasts is reported once more
            self._known = {alarm.key: alarm for alarm in read_alarms(path)}

    def __iter__(self) -> Iterator[Alarm]:
        return iter([alarm for alarm in self._known.values() if alarm.state != "resolved"])

    def open_keys(self, least: Severity = Severity.INFO) -> list[str]:
        return [alarm.key for alarm in self if alarm.severity >= least]

    @property
    def reported_by_nodes(self) -> set[str]:
        """The keys of the open alarms that other nodes reported, also to earlier leaders."""
        return {alarm.key for alarm in self if REPORTED_BY in alarm.facts}

    def open(self, key: str, severity: Severity, summary: str, *, revised: bool = False, **more: Any) -> None:
        """Open or update an incident. It is reported if it is new, its severity rises, or it is `revised`, that is,
        more is known than was reported. `more` are further fields of `Alarm`."""
        before, time = self._known.get(key), now()
        if before is None or before.state == "resolved":
            count = 1 if before is None else before.count + 1
            alarm = Alarm(key, severity, "open", summary, opened=time, changed=time, count=count, **more)
        else:
            worst = max(severity, before.severity)
            state: State = "open" if worst > before.severity else before.state
            alarm = replace(before, severity=worst, state=state, summary=summary, **more)
            if worst == before.severity and not revised:
                self._known[key] = alarm  # only newer numbers: nothing to write or report
                return
            alarm = replace(alarm, changed=time)
        self._enter(alarm)

    def resolve(self, key: str, summary: str = "", *, step: int | None = None) -> None:
        """Resolve an incident, if it is open."""
        before = self._known.get(key)
        if before is not None and before.state != "resolved":
            summary = summary or before.summary
            self._enter(replace(before, state="resolved", summary=summary, changed=now(), step=step))

    def enter_sent(self, alarm: Alarm) -> None:
        """Enter an alarm as it was sent before it could be written: of another `opened` it would be sent again."""
        before = self._known.get(alarm.key)
        self._enter(alarm if before is None else replace(alarm, count=before.count + 1))

    def acknowledge(self, key: str, by: str = "") -> bool:
        """Acknowledge an alarm for a person (`by`), which ends its reminders. Returns whether it was open."""
        before = self._known.get(key)
        if before is None or before.state == "resolved":
            return False
        facts = {**before.facts, "acknowledged_by": by} if by else before.facts
        self._enter(replace(before, state="acknowledged", changed=now(), facts=facts))
        return True

    def serve(self, run: RunDir) -> None:
        """Carry out people's requests since the last call."""
        for request in requests.take(_inbox(run)):
            if request.verb == "ack":
                self.acknowledge(request.key, request.by)

    def _enter(self, alarm: Alarm) -> None:
        self._known[alarm.key] = alarm
        self._on_change(alarm)
        self._file.write(json.dumps(alarm.to_json()))

    def close(self) -> bool:
        """Write pending lines, if possible, and close the file. Returns whether everything is written."""
        return self._file.close()


def alarms_file(run: RunDir) -> Path:
    """The file with every transition of the alarms of a run."""
    return run.path / "watchdog/alarms.jsonl"


def _inbox(run: RunDir) -> Path:
    return run.path / "watchdog/inbox"


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
            remedy=f"these are: {', '.join(sorted(waiting))}" if waiting else "there is nothing to acknowledge",
        )
    with raising(StorageError, f"cannot write to the run directory {run.path}"):
        requests.put(_inbox(run), verb="ack", key=key)


def read_alarms(path: Path) -> list[Alarm]:
    """The present state of every alarm, in the order of first opening; damaged lines are skipped.

    Raises OSError if the file is there and cannot be read.
    """
    known: dict[str, Alarm] = {}
    with contextlib.suppress(FileNotFoundError):
        for alarm, _ in read_lines(path, _alarm):
            known[alarm.key] = alarm
    return list(known.values())


def _alarm(line: bytes) -> Alarm | None:
    content = json_object(line)
    try:
        return None if content is None else Alarm.from_json(content)
    except (ValueError, TypeError, KeyError):
        return None


@functools.cache
def _schema() -> TypeAdapter[Alarm]:
    return TypeAdapter(Alarm)
