"""Which alarms are sent on a channel, and when: at most one page per incident. No torch.

For every incident, the present state and the last one sent are known; the difference is the next message, sent as soon
as nothing holds it back. What is over budget, flapping, or in a maintenance window is counted and listed in a digest.
All of it is in `alarms.jsonl` and the journal in any case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from fsdp_pretrain.severity import Severity

from .alarms import Alarm

Kind = Literal["open", "worse", "revised", "acknowledged", "resolved", "reminder", "flapping", "digest"]

_CAUSES: dict[str, frozenset[str]] = {
    "hang": frozenset({"pace", "straggler", "checkpoint-age", "data-wait"}),
    "rank-died": frozenset({"hang", "pace", "straggler", "checkpoint-age", "data-wait"}),
    "disk": frozenset({"checkpoint-speed", "checkpoint-failed", "checkpoint-writer"}),
}
"""Detectors whose alarms are not sent while an alarm of this detector, at least as severe, is open."""
_NODE = "node"
"""Detector whose scope is a host: while it is open, no alarm with that host in its facts is sent."""
_ALWAYS = ("checkpoint-age", Severity.CRIT)
"""Sent despite any cause: unprotected training is the costliest failure."""
_REMIND_AFTER = (3600.0, 3 * 3600.0, 8 * 3600.0)
"""Seconds of silence before the first, second and third reminder."""
_BURST, _PER_HOUR = 5, 10
_FLAPPING, _CALM = 3, 3600.0
_CRIT_DIGEST = 60.0
"""Minimum seconds between two digests with a critical alarm; such a digest does not wait longer."""


@dataclass(frozen=True)
class Message:
    """A message to send.

    Attributes:
        kind: what happened.
        alarm: its subject; None for a digest.
        held: for a digest: the present alarms that were held back, and how many messages of each.
    """

    kind: Kind
    alarm: Alarm | None = None
    held: tuple[tuple[Alarm, int], ...] = ()


@dataclass
class Incident:
    """An alarm key, and what people know of it. Times are seconds since 1970.

    Attributes:
        alarm: its present state.
        sent, sent_at: its state in the last message, and the time of that; None: there was none.
        own: it had its own message since it opened, not only a line in a digest.
        flapping: people know that it comes and goes.
        reminders: how many were sent since it opened or got worse.
        turns: when it last opened or ended, oldest first.
        held, held_since: messages held back since the last one sent, and the time of the first.
    """

    alarm: Alarm
    sent: Alarm | None = None
    sent_at: float = 0.0
    own: bool = False
    flapping: bool = False
    reminders: int = 0
    turns: list[float] = field(default_factory=list)
    held: int = 0
    held_since: float = 0.0

    def lacking(self, time: float) -> Kind | None:
        """The message that would bring people up to date; None if they are, or know that it is flapping."""
        alarm, sent = self.alarm, self.sent
        if sent is None or sent.state == "resolved":
            if alarm.state != "open":
                return None
            return "flapping" if len(self.turns) == _FLAPPING and _since(self.turns[0], time) <= _CALM else "open"
        if alarm.state == "open" and alarm.severity > sent.severity:
            return "worse"
        if alarm.state == "acknowledged" != sent.state:
            return "acknowledged"
        if self.flapping and not self._is_calm(time):
            return None
        if alarm.state == "resolved":
            return "resolved"
        if self.flapping:
            return "reminder"
        if alarm.summary != sent.summary:
            return "revised"
        waits = alarm.state == "open" and self.reminders < len(_REMIND_AFTER)
        return "reminder" if waits and _since(self.sent_at, time) >= _REMIND_AFTER[self.reminders] else None

    def mark_sent(self, kind: Kind, time: float) -> None:
        """Record that a message of this kind is sent."""
        self.sent, self.sent_at, self.held = self.alarm, time, 0
        if kind == "digest":
            self.own &= self.alarm.state != "resolved"
            return
        self.own = kind != "resolved"
        self.flapping = kind == "flapping" or (self.flapping and kind in ("worse", "acknowledged"))
        self.reminders = self.reminders + 1 if kind == "reminder" else 0

    def hold(self, time: float) -> None:
        """Record that a message is held back: the next one, or a digest, replaces it."""
        self.held_since = self.held_since if self.held else time
        self.held += 1

    def is_over(self, time: float) -> bool:
        """Whether no further message can follow."""
        known = self.sent is None or self.sent.state == "resolved"
        return self.alarm.state == "resolved" and known and not self.held and self._is_calm(time)

    def _is_calm(self, time: float) -> bool:
        return not self.turns or _since(self.turns[-1], time) > _CALM


@dataclass
class Budget:
    """Messages that may be sent at once, refilled over time."""

    left: float = float(_BURST)
    filled_at: float = 0.0

    def spend(self, time: float, *, anyway: bool = False) -> bool:
        """Take one, if there is one or it must be sent anyway; returns whether it may be sent."""
        self.left = min(float(_BURST), self.left + _since(self.filled_at, time) * _PER_HOUR / 3600)
        self.filled_at = time
        if self.left < 1 and not anyway:
            return False
        self.left -= 1
        return True


@dataclass
class ChannelState:
    """The state of a channel's throttle, kept across restarts of the watchdog.

    Attributes:
        incidents: by key.
        budget, critical: of messages, and of critical ones, so that many small alarms do not hold up a critical one.
        digest_at: time of the last digest.
        saved: when this was written.
    """

    incidents: dict[str, Incident] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    critical: Budget = field(default_factory=Budget)
    digest_at: float = 0.0
    saved: float = 0.0


class AlertThrottle:
    """Decides for one channel.

    Args:
        least: severity below which nothing is sent.
        digest_every: seconds for which messages are collected for a digest.
        memory: of an earlier watchdog; kept up to date.

    Attributes:
        muted: in a maintenance window: only resolved and acknowledged alarms are sent.
    """

    def __init__(self, least: Severity, digest_every: float, memory: ChannelState) -> None:
        self._least, self._digest_every, self.memory, self.muted = least, digest_every, memory, False

    def has_seen(self, alarm: Alarm) -> bool:
        """Whether this transition, or a later one of the key, was handed to `transition` already."""
        known = self.memory.incidents.get(alarm.key)
        if known is None:
            return alarm.state == "resolved"
        return alarm.changed < known.alarm.changed or alarm == known.alarm

    def transition(self, alarm: Alarm, time: float) -> list[Message]:
        """An alarm changed; returns the messages to send now."""
        if alarm.severity < self._least:
            return []
        incident = self.memory.incidents.setdefault(alarm.key, Incident(alarm))
        before, incident.alarm = incident.alarm.state, alarm
        if not incident.turns or "resolved" in (alarm.state, before):
            incident.turns = [*incident.turns, time][-_FLAPPING:]
        return self._bring_up_to_date(incident, time, self._open_causes(), changed=True)

    def tick(self, time: float) -> list[Message]:
        """The messages that are due: alarms no longer held back, reminders, the digest."""
        incidents, causes = self.memory.incidents, self._open_causes()
        for key in [key for key, incident in incidents.items() if incident.is_over(time)]:
            del incidents[key]
        found = [self._bring_up_to_date(incident, time, causes, changed=False) for incident in incidents.values()]
        return [message for messages in found for message in messages] + self._digest(time)

    def _bring_up_to_date(
        self, incident: Incident, time: float, causes: list[Alarm], *, changed: bool
    ) -> list[Message]:
        kind, alarm = incident.lacking(time), incident.alarm
        if kind is None:
            if changed and incident.flapping:
                incident.hold(time)
            return []
        ends = kind in ("resolved", "acknowledged")
        if not ends and kind != "revised" and any(_follows(alarm, cause) for cause in causes):
            return []
        budget = self.memory.critical if alarm.severity is Severity.CRIT else self.memory.budget
        must = incident.own and (ends or kind == "revised")  # else people, and PagerDuty, would consider it open
        if (self.muted and not ends) or not budget.spend(time, anyway=must):
            if changed or not (incident.held or kind == "reminder"):
                incident.hold(time)
            return []
        incident.mark_sent(kind, time)
        return [Message(kind, alarm)]

    def _digest(self, time: float) -> list[Message]:
        held = [incident for incident in self.memory.incidents.values() if incident.held]
        urgent = any(incident.alarm.severity is Severity.CRIT and not incident.flapping for incident in held)
        due = urgent and _since(self.memory.digest_at, time) >= _CRIT_DIGEST
        due = due or any(_since(incident.held_since, time) >= self._digest_every for incident in held)
        if self.muted or not due:
            return []
        self.memory.digest_at = time
        rows = tuple((incident.alarm, incident.held) for incident in held)
        for incident in held:
            if incident.flapping:
                incident.held = 0
            else:
                incident.mark_sent("digest", time)
        return [Message("digest", held=rows)]

    def _open_causes(self) -> list[Alarm]:
        alarms = [incident.alarm for incident in self.memory.incidents.values()]
        return [alarm for alarm in alarms if alarm.state != "resolved" and alarm.detector in (*_CAUSES, _NODE)]


def _follows(alarm: Alarm, cause: Alarm) -> bool:
    """Whether an alarm adds nothing to the open alarm of its cause."""
    if (alarm.detector, alarm.severity) == _ALWAYS or cause.key == alarm.key or cause.severity < alarm.severity:
        return False
    host = cause.key.partition("/")[2] if cause.detector == _NODE else None
    return alarm.detector in _CAUSES.get(cause.detector, ()) or (bool(host) and alarm.facts.get("host") == host)


def _since(at: float, time: float) -> float:
    """Seconds from `at` to `time`; infinite if the clock was set back in between, so that nothing waits for it."""
    return time - at if time >= at else math.inf
