"""Which transitions of alarms are sent, and when: at most one page per incident. No torch.

Everything is written down elsewhere; here it is decided what a person hears. An incident is told when it opens, when it
gets worse and when it ends. One that comes and goes becomes a single message about coming and going. What follows from
a worse incident is not told beside it. What is too much for an hour goes into one digest at its end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from .alarms import Alarm, Severity

_CAUSES: dict[str, frozenset[str]] = {
    "hang": frozenset({"pace", "straggler", "checkpoint-age", "data-wait"}),
    "rank-died": frozenset({"hang", "pace", "straggler", "checkpoint-age", "data-wait"}),
    "disk": frozenset({"checkpoint-speed", "checkpoint-failed"}),
}
"""What an open alarm of a detector keeps from being told."""
_COOL_DOWN = {Severity.WARN: 3600.0, Severity.CRIT: 900.0}
_REMINDERS = (3600.0, 4 * 3600.0, 12 * 3600.0)
_BURST, _PER_HOUR = 5, 10
_FLAPPING = 3


@dataclass(frozen=True)
class Message:
    """What is sent.

    Attributes:
        alarm: what it is about; None for a digest.
        kind: open, worse, resolved, reminder, flapping or digest.
        also: of a digest: how many messages of each key were held back.
    """

    alarm: Alarm | None
    kind: str
    also: dict[str, int] = field(default_factory=dict)


@dataclass
class _Sent:
    at: float
    severity: Severity
    reminders: int = 0
    open: bool = True
    flapping: bool = False


class Storm:
    """Decides for one run.

    Args:
        least: severity below which nothing is sent.
    """

    def __init__(self, least: Severity = Severity.WARN) -> None:
        self._least = least
        self._open: dict[str, Alarm] = {}
        self._sent: dict[str, _Sent] = {}
        self._turns: dict[str, deque[float]] = defaultdict(deque)
        self._tokens, self._filled_at = float(_BURST), 0.0
        self._held: dict[str, int] = {}
        self._digest_at = 0.0

    def transition(self, alarm: Alarm, time: float) -> list[Message]:
        """An alarm changed; what is sent now. `time`: seconds of a clock that never steps."""
        if alarm.state == "resolved":
            self._open.pop(alarm.key, None)
        else:
            self._open[alarm.key] = alarm
        if alarm.severity < self._least or alarm.state == "acknowledged":
            return []
        turns = self._turns[alarm.key]
        turns.append(time)
        while turns and turns[0] < time - 3600:
            turns.popleft()
        before = self._sent.get(alarm.key)
        if alarm.state == "resolved":
            if before is None or not before.open:
                return []
            before.open = False
            return [] if before.flapping else self._send(Message(alarm, "resolved"), time)
        if self._follows(alarm):
            return self._hold(alarm.key)
        if before is not None and alarm.severity <= before.severity and time - before.at < _COOL_DOWN[alarm.severity]:
            if len(turns) >= 2 * _FLAPPING - 1 and not before.flapping:
                before.flapping = before.open = True
                return self._send(Message(alarm, "flapping"), time)
            return self._hold(alarm.key)
        kind = "worse" if before is not None and before.open else "open"
        self._sent[alarm.key] = _Sent(time, alarm.severity)
        return self._send(Message(alarm, kind), time)

    def tick(self, time: float) -> list[Message]:
        """Reminders of what is open and not acknowledged; the digest, once an hour if anything was held back."""
        found = []
        for key, alarm in self._open.items():
            sent = self._sent.get(key)
            if sent is None or not sent.open or alarm.state != "open" or sent.reminders >= len(_REMINDERS):
                continue
            if time - sent.at >= _REMINDERS[sent.reminders]:
                sent.reminders += 1
                found += self._send(Message(alarm, "reminder"), time)
        for key, turns in self._turns.items():
            sent = self._sent.get(key)
            if sent is not None and sent.flapping and key not in self._open and time - turns[-1] > 3600:
                sent.flapping = sent.open = False
        if self._held and time - self._digest_at >= 3600:
            self._digest_at, held, self._held = time, self._held, {}
            found.append(Message(None, "digest", held))
        return found

    def _follows(self, alarm: Alarm) -> bool:
        return any(alarm.detector in _CAUSES.get(other.detector, ()) for other in self._open.values())

    def _send(self, message: Message, time: float) -> list[Message]:
        self._tokens = min(float(_BURST), self._tokens + (time - self._filled_at) * _PER_HOUR / 3600)
        self._filled_at = time
        if self._tokens < 1 and message.kind != "worse":
            return self._hold(message.alarm.key if message.alarm else "digest")
        self._tokens -= 1
        return [message]

    def _hold(self, key: str) -> list[Message]:
        self._held[key] = self._held.get(key, 0) + 1
        return []
