"""Formats messages: a title that suffices on a phone, then details, risk, actions and advice. No torch."""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdp_pretrain.record.files import age, now
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_count, human_time

from .alarms import Alarm
from .snapshot import Snapshot
from .throttle import Message

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
class MessageSender:
    """The sender: name of the run, its directory for proposed commands, number of the start, host of the watchdog."""

    run: str
    path: str
    segment: int | None = None
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class Note:
    """A message as channels send it: a webhook sends all of it as JSON, the others what they show. `id` is the same
    whenever the same message is made; `time` is when it was made."""

    id: str
    kind: str
    run: str
    segment: int | None
    host: str
    key: str
    detector: str
    severity: str
    state: str
    summary: str
    effect: str
    remedy: str
    action: str
    facts: dict[str, Any]
    opened: str
    count: int
    time: str
    step: int | None
    tokens: int | None
    title: str
    lines: list[str]
    schema: int = 1


def make_note(message: Message, identity: MessageSender, snapshot: Snapshot | None = None) -> Note:
    """The note of a message, with what is known of the run."""
    if message.alarm is None:
        alarm, head = _digest(message), "digest"
        subject, lines = alarm.summary, _digest_lines(message, identity.path)
    else:
        alarm, head = message.alarm, message.alarm.severity.name + _HEADS[message.kind]
        subject, lines = f"{alarm.key}: {alarm.summary}", _lines(message.kind, alarm, identity, snapshot)
    step = alarm.step if alarm.step is not None else snapshot.step if snapshot else None
    tokens = snapshot.tokens if snapshot else None
    made = f"{identity.path} {alarm.key} {message.kind} {alarm.changed} {alarm.state}"
    if message.kind in ("digest", "reminder"):
        made += now()
    place = f" · step {step:,}" if step is not None else ""
    place += f" · {human_count(tokens)} tokens" if tokens else ""
    return Note(
        id=hashlib.sha256(made.encode()).hexdigest()[:32],
        kind=message.kind,
        run=identity.run,
        segment=identity.segment,
        host=identity.host,
        key=alarm.key,
        detector=alarm.detector,
        severity=alarm.severity.name,
        state=alarm.state,
        summary=alarm.summary,
        effect=alarm.effect,
        remedy=alarm.remedy,
        action=alarm.action,
        facts=alarm.facts,
        opened=alarm.opened,
        count=alarm.count,
        time=now(),
        step=step,
        tokens=tokens,
        title=" ".join(f"[{head}] {identity.run} · {subject}{place}".split()),
        lines=lines,
    )


def test_note(identity: MessageSender, kind: Literal["open", "resolved"]) -> Note:
    """A message that tests delivery; opened and resolved, so that no incident stays open."""
    alarm = Alarm("test", Severity.INFO, kind, "this is a test, nothing is wrong", opened=now(), changed=now())
    return make_note(Message(kind, alarm), identity)


def _lines(kind: str, alarm: Alarm, identity: MessageSender, snapshot: Snapshot | None) -> list[str]:
    since = f"{alarm.opened[:16].replace('T', ' ')} UTC"
    if (seconds := age(alarm.opened)) >= 1:
        since += f" ({human_time(seconds)})"
    if alarm.count > 1:
        since += f", opened {alarm.count} times so far"
    lines = [f"it was open since {since}" if kind == "resolved" else f"since: {since}"]
    if kind != "resolved":
        lines += [f"meaning: {alarm.effect}"] if alarm.effect else []
        lines += [f"at risk: {risk}"] if (risk := _at_risk(snapshot)) else []
    lines += [f"the watchdog: {alarm.action}"] if alarm.action else []
    if kind == "acknowledged":
        lines += [f"acknowledged by: {alarm.facts.get('acknowledged_by', '?')}"]
    elif kind != "resolved":
        lines += [f"to do: {alarm.remedy}"] if alarm.remedy else []
        lines += [f"acknowledge: fsdp-pretrain ack {identity.path} {alarm.key}"]
    segment = f", start {identity.segment}" if identity.segment is not None else ""
    return [*lines, f"where: {identity.path} on {identity.host}{segment}"]


def _at_risk(snapshot: Snapshot | None) -> str:
    if snapshot is None or snapshot.verified_step is None:
        return ""
    parts = []
    if snapshot.unprotected_tokens is not None:
        parts.append(f"{human_count(snapshot.unprotected_tokens)} tokens")
    if snapshot.world is not None and snapshot.verified_age is not None:
        parts.append(f"{snapshot.world * snapshot.verified_age / 3600:,.1f} GPU hours")
    since = f" since the verified checkpoint of step {snapshot.verified_step:,}"
    return ", ".join(parts) + since if parts else ""


def _digest(message: Message) -> Alarm:
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
