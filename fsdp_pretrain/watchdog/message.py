"""What a message says: one line that is enough on a phone, then what, since when, at risk, done, to do. No torch."""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass, field
from typing import Any, Literal

from ..record.files import age, now
from ..severity import Severity
from ..units import human_count, human_time
from .alarms import Alarm
from .snapshot import Snapshot
from .storm import Message

_HEADS = {
    "open": "",
    "worse": " worse",
    "revised": " revised",
    "acknowledged": " acknowledged",
    "resolved": " resolved",
    "reminder": " still open",
    "flapping": " comes and goes",
}
_DIGEST_LINES = 50
"""Slack cuts a text at 40,000 characters."""


@dataclass(frozen=True)
class Identity:
    """Who speaks.

    Attributes:
        run: name of the run.
        path: of its directory, for the commands that a message proposes.
        segment: number of the start.
        host: of the watchdog.
    """

    run: str
    path: str
    segment: int | None = None
    host: str = field(default_factory=socket.gethostname)


def note(message: Message, identity: Identity, snapshot: Snapshot | None = None) -> dict[str, Any]:
    """A message as JSON values: what a webhook posts, and what the other channels take their text from.

    Returns:
        `schema` 1; `id`, the same whenever the same message is made; `kind` (see `Message`); `run`, `segment`, `host`;
        `key`, `detector`, `severity`, `state`, `summary`, `effect`, `remedy`, `action`, `facts`, `opened`, `count` of
        the alarm; `time`; `step`, `tokens` of the run; `title` and `lines`, the text.
    """
    alarm = message.alarm or _digest(message)
    step = alarm.step if alarm.step is not None else snapshot.step if snapshot else None
    tokens = snapshot.tokens if snapshot else None
    made = f"{identity.path} {alarm.key} {message.kind} {alarm.changed} {alarm.state}"
    if message.kind in ("digest", "reminder"):
        made += now()
    place = "".join(
        [f" · step {step:,}" if step is not None else "", f" · {human_count(tokens)} tokens" if tokens else ""]
    )
    head = "digest" if message.alarm is None else alarm.severity.name + _HEADS[message.kind]
    subject = alarm.summary if message.alarm is None else f"{alarm.key}: {alarm.summary}"
    return {
        "schema": 1,
        "id": hashlib.sha256(made.encode()).hexdigest()[:32],
        "kind": message.kind,
        "run": identity.run,
        "segment": identity.segment,
        "host": identity.host,
        "key": alarm.key,
        "detector": alarm.detector,
        "severity": alarm.severity.name,
        "state": alarm.state,
        "summary": alarm.summary,
        "effect": alarm.effect,
        "remedy": alarm.remedy,
        "action": alarm.action,
        "facts": alarm.facts,
        "opened": alarm.opened,
        "count": alarm.count,
        "time": now(),
        "step": step,
        "tokens": tokens,
        "title": " ".join(f"[{head}] {identity.run} · {subject}{place}".split()),
        "lines": _digest_lines(message, identity.path)
        if message.alarm is None
        else _lines(message, alarm, identity, snapshot),
    }


def test_note(identity: Identity, kind: Literal["open", "resolved"]) -> dict[str, Any]:
    """A message that only shows that messages arrive; opened and resolved, so that no incident stays open."""
    alarm = Alarm("test", Severity.INFO, kind, "this is a test, nothing is wrong", opened=now(), changed=now())
    return note(Message(kind, alarm), identity)


def _lines(message: Message, alarm: Alarm, identity: Identity, snapshot: Snapshot | None) -> list[str]:
    since = f"since: {alarm.opened[:16].replace('T', ' ')} UTC"
    if (seconds := age(alarm.opened)) >= 1:
        since += f" ({human_time(seconds)})"
    if alarm.count > 1:
        since += f", opened {alarm.count} times so far"
    lines = [since]
    if message.kind == "resolved":
        lines[0] = since.replace("since:", "it was open since", 1)
    else:
        lines += [f"meaning: {alarm.effect}"] if alarm.effect else []
        lines += [f"at risk: {risk}"] if (risk := _at_risk(snapshot)) else []
    lines += [f"the watchdog: {alarm.action}"] if alarm.action else []
    if message.kind == "acknowledged":
        lines += [f"taken by: {alarm.facts.get('acknowledged_by', '?')}"]
    elif message.kind != "resolved":
        lines += [f"to do: {alarm.remedy}"] if alarm.remedy else []
        lines += [f"take it: fsdp-pretrain ack {identity.path} {alarm.key}"]
    segment = f", start {identity.segment}" if identity.segment is not None else ""
    return [*lines, f"where: {identity.path} on {identity.host}{segment}"]


def _at_risk(snapshot: Snapshot | None) -> str:
    if snapshot is None or snapshot.verified_step is None:
        return ""
    parts = []
    if snapshot.unprotected_tokens is not None:
        parts.append(f"{human_count(snapshot.unprotected_tokens)} tokens")
    if snapshot.unprotected_gpu_hours is not None:
        parts.append(f"{snapshot.unprotected_gpu_hours:,.1f} GPU hours")
    since = f" since the verified checkpoint of step {snapshot.verified_step:,}"
    return ", ".join(parts) + since if parts else ""


def _digest(message: Message) -> Alarm:
    """A digest in the form of an alarm."""
    count = sum(number for _, number in message.held)
    worst = max((alarm.severity for alarm, _ in message.held), default=Severity.INFO)
    text = f"{count} message{'s' if count != 1 else ''} held back, about {len(message.held)} alarms"
    return Alarm("digest", worst, "open", text, opened=now(), changed=now(), count=count)


def _digest_lines(message: Message, path: str) -> list[str]:
    lines = [
        f"{alarm.key}: {count}x, {alarm.state} now, {alarm.severity.name}: {alarm.summary}"
        for alarm, count in sorted(message.held, key=lambda row: (-row[0].severity, row[0].key))
    ]
    more = len(lines) - _DIGEST_LINES
    return [*lines[:_DIGEST_LINES], f"and {more} more: fsdp-pretrain alarms {path} --all"] if more > 0 else lines
