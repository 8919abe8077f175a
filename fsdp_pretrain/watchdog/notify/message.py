"""The text of messages: a title that suffices on a phone, then meaning, risk, actions and advice."""

from __future__ import annotations

import hashlib
import json
import socket
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fsdp_pretrain.run.files import age, now
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time

from .alarms import Alarm

Kind = Literal["open", "resolved", "reminder", "digest"]
_HEADS = {"open": "", "reminder": " still open", "resolved": " resolved"}
_DIGEST_LINES = 50
"""Slack cuts a text at 40,000 characters."""
_FACTS_BYTES = 32 * 1024
"""Limit of `facts`: PagerDuty refuses messages of 512 KB, other receivers smaller ones."""


@dataclass(frozen=True)
class MessageSender:
    """The sender: name of the run, its directory for proposed commands, segment, host of the watchdog."""

    run: str
    path: str
    segment: int | None = None
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class Message:
    """A message about an alarm, or about several in a digest."""

    id: str  # identifies the message, also when it is made again
    kind: Kind
    alarm: Alarm
    sender: MessageSender
    title: str
    lines: list[str]

    def to_json(self) -> dict[str, Any]:
        """The JSON for webhooks and commands."""
        sender, alarm = self.sender, self.alarm
        about = {"schema": 1, "id": self.id, "kind": self.kind, "time": now()}
        about |= {"run": sender.run, "segment": sender.segment, "host": sender.host, "detector": alarm.detector}
        about |= alarm.to_json()
        return {**about, "title": self.title, "lines": self.lines}


def make_message(kind: Kind, alarms: list[Alarm], sender: MessageSender) -> Message:
    """Make a message about an alarm, or a digest of several."""
    (alarm, *_), head = alarms, "digest"
    if kind == "digest":
        alarm, lines = _digest(alarms), _digest_lines(alarms, sender)
        subject = alarm.summary
    else:
        head = alarm.severity.name + _HEADS[kind]
        subject, lines = f"{alarm.key}: {alarm.summary}", _lines(kind, alarm, sender)
    place = f" · step {alarm.step:,}" if alarm.step is not None else ""
    key = [sender.path, alarm.key, kind, alarm.opened, alarm.changed, alarm.state, *([now()] * (kind == "reminder"))]
    return Message(
        id=hashlib.sha256(" ".join(key).encode()).hexdigest()[:32],
        kind=kind,
        alarm=replace(alarm, facts=_shortened(alarm.facts, sender)),
        sender=sender,
        title=" ".join(f"[{head}] {sender.run} · {subject}{place}".split()),
        lines=lines,
    )


def test_message(sender: MessageSender, kind: Literal["open", "resolved"]) -> Message:
    """A message that tests delivery; opened and resolved, so that no incident stays open."""
    alarm = Alarm("test", Severity.INFO, kind, "this is a test, nothing is wrong", opened=now(), changed=now())
    return make_message(kind, [alarm], sender)


def _lines(kind: Kind, alarm: Alarm, sender: MessageSender) -> list[str]:
    since = f"{alarm.opened[:16].replace('T', ' ')} UTC"
    if (seconds := age(alarm.opened)) >= 1:
        since += f" ({human_time(seconds)})"
    if alarm.count > 1:
        since += f", opened {alarm.count} times so far"
    over = kind == "resolved"
    lines = [f"it was open since {since}" if over else f"since: {since}"]
    if not over:
        lines += [f"meaning: {alarm.effect}"] if alarm.effect else []
    lines += [f"the watchdog: {alarm.action}"] if alarm.action else []
    if not over:
        lines += [f"to do: {alarm.remedy}"] if alarm.remedy else []
        lines += [f"acknowledge: fsdp-pretrain alarms {sender.path} ack {alarm.key}"]
    segment = f", start {sender.segment}" if sender.segment is not None else ""
    return [*lines, f"where: {sender.path} on {sender.host}{segment}"]


def _shortened(facts: dict[str, Any], sender: MessageSender) -> dict[str, Any]:
    """The facts without the largest ones, if all are too many for a message: the positions of all ranks of a hang."""
    sizes = {name: len(json.dumps(value)) for name, value in facts.items()}
    left_out: list[str] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if sum(sizes.values()) <= _FACTS_BYTES:
            break
        del sizes[name]
        left_out.append(name)
    if not left_out:
        return facts
    text = f"{', '.join(left_out)}: see {sender.path}/watchdog/alarms.jsonl"
    return {name: facts[name] for name in sizes} | {"left_out": text}


def _digest(alarms: list[Alarm]) -> Alarm:
    worst, text = max(alarm.severity for alarm in alarms), f"news of {len(alarms)} alarms, in one message"
    return Alarm("digest", worst, "open", text, opened=now(), changed=now())


def _digest_lines(alarms: list[Alarm], sender: MessageSender) -> list[str]:
    lines = [
        f"{alarm.severity.name} {alarm.key}, {alarm.state}: {alarm.summary}"
        for alarm in sorted(alarms, key=lambda alarm: (-alarm.severity, alarm.key))
    ]
    more = len(lines) - _DIGEST_LINES
    return [*lines[:_DIGEST_LINES], f"and {more} more: fsdp-pretrain alarms {sender.path} --all"] if more > 0 else lines
