"""Which transitions of alarms are sent on a channel, and when: at most one page per incident. No torch.

Everything is written down elsewhere; here it is decided what a person hears. An incident is told when it opens, when it
gets worse, when somebody took it and when it ends. One that comes and goes becomes a single message about coming and
going. What follows from a worse incident is not told beside it, and is told when that one is over and it is not.
What is too much, or fell into a maintenance window, goes into one digest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ..severity import Severity
from .alarms import Alarm

_CAUSES: dict[str, frozenset[str]] = {
    "hang": frozenset({"pace", "straggler", "checkpoint-age", "data-wait"}),
    "rank-died": frozenset({"hang", "pace", "straggler", "checkpoint-age", "data-wait"}),
    "disk": frozenset({"checkpoint-speed", "checkpoint-failed", "checkpoint-writer"}),
}
"""What an open alarm of a detector, at least as severe, keeps from being told."""
_NODE = "node"
"""Detector whose scope is a host; keeps from being told whatever has that host in its facts."""
_ALWAYS = ("checkpoint-age", Severity.CRIT)
"""Told beside any cause: training that nothing protects is the costliest thing there is."""
_UNSETTLED = frozenset({"pace", "straggler"})
"""What is not told of in the first steps of a start."""
_FIRST_STEPS = 20
_REMINDERS = (3600.0, 4 * 3600.0, 12 * 3600.0)
_BURST, _PER_HOUR = 5, 10
_FLAPPING, _CALM = 3, 3600.0
_DIGEST, _CRIT_DIGEST = 3600.0, 900.0


@dataclass(frozen=True)
class Message:
    """What is sent.

    Attributes:
        kind: open, worse, revised, acknowledged, resolved, reminder, flapping or digest.
        alarm: what it is about; None for a digest.
        held: of a digest: the alarms that were held back, as they stand, and how many messages of each.
    """

    kind: str
    alarm: Alarm | None = None
    held: tuple[tuple[Alarm, int], ...] = ()


@dataclass
class _Told:
    """What people were last told of a key: when, how severe; whether they think it is open, or comes and goes."""

    at: float
    severity: Severity
    reminders: int = 0
    open: bool = True
    flapping: bool = False


@dataclass
class _Bucket:
    """Messages that may be sent at once, refilled over time."""

    filled_at: float
    left: float = float(_BURST)

    def spend(self, time: float, *, anyway: bool = False) -> bool:
        self.left = min(float(_BURST), self.left + (time - self.filled_at) * _PER_HOUR / 3600)
        self.filled_at = time
        if self.left < 1 and not anyway:
            return False
        self.left -= 1
        return True


@dataclass
class _Held:
    """Messages of a key that were held back: how many, since when; `late`: told by the digest and not before it."""

    since: float
    count: int = 0
    late: bool = False


@dataclass
class Storm:
    """Decides for one channel. Times are seconds of a clock that never steps.

    Attributes:
        least: severity below which nothing is sent.
        digest_every: seconds that messages are collected for a digest; with a CRIT among them 15 minutes at most.
        muted: a maintenance window: only what ends, and what somebody takes, is told.
        steps: steps of the present start; None if not known.
    """

    least: Severity = Severity.WARN
    digest_every: float = _DIGEST
    muted: bool = False
    steps: int | None = None
    _last: dict[str, Alarm] = field(default_factory=dict)
    _told: dict[str, _Told] = field(default_factory=dict)
    _turns: dict[str, deque[float]] = field(default_factory=dict)
    _held: dict[str, _Held] = field(default_factory=dict)
    _buckets: dict[bool, _Bucket] = field(default_factory=dict)
    _causes: set[str] = field(default_factory=set)

    def has_seen(self, alarm: Alarm) -> bool:
        """Whether this transition, or a later one of the key, was handed to `transition` already."""
        last = self._last.get(alarm.key)
        if last is None:
            return False
        return alarm.changed < last.changed or (alarm.changed, alarm.state) == (last.changed, last.state)

    def transition(self, alarm: Alarm, time: float) -> list[Message]:
        """An alarm changed; what is sent now."""
        before, self._last[alarm.key] = self._last.get(alarm.key), alarm
        if alarm.detector in _CAUSES or alarm.detector == _NODE:
            self._causes.add(alarm.key)
        if alarm.severity < self.least:
            return []
        told = self._told.get(alarm.key)
        if before is not None and _is_revision(alarm, before):
            return self._revise(alarm, told, time)
        if alarm.state == "acknowledged":
            return [self._in_any_case("acknowledged", alarm, time)] if told is not None and told.open else []
        if alarm.state == "resolved" or before is None or before.state == "resolved":  # not: it became worse
            self._turns.setdefault(alarm.key, deque(maxlen=_FLAPPING)).append(time)
        if alarm.state == "open":
            return self._consider(alarm, time, new=True)
        if told is None or not told.open:
            return []
        if told.flapping:
            self._hold(alarm.key, time)
            return []
        told.open = False
        return [self._in_any_case("resolved", alarm, time)]

    def _revise(self, alarm: Alarm, told: _Told | None, time: float) -> list[Message]:
        """What people were told of an incident that goes on is not what is known now."""
        if told is None or not told.open:
            return []  # they will hear it as it is then
        if told.flapping or self.muted:
            self._hold(alarm.key, time)
            return []
        return [self._in_any_case("revised", alarm, time)]

    def tick(self, time: float) -> list[Message]:
        """What is due: alarms whose reason to be held back is gone, reminders, the digest."""
        found = []
        for alarm in self._open():
            if alarm.severity >= self.least and alarm.state == "open":
                found += self._consider(alarm, time) + self._remind(alarm, time)
        for key, told in self._told.items():
            if told.flapping and time - self._turns[key][-1] > _CALM:
                found.append(self._calmed(key, told, time))
        return found + self._digest(time)

    def _open(self) -> Iterator[Alarm]:
        return (alarm for alarm in self._last.values() if alarm.state != "resolved")

    def _consider(self, alarm: Alarm, time: float, *, new: bool = False) -> list[Message]:
        """Tell of an open alarm that people do not know of, or not how bad it is, unless there is a reason not to."""
        key, told, held = alarm.key, self._told.get(alarm.key), self._held.get(alarm.key)
        known = told is not None and told.open and alarm.severity <= told.severity
        if not new and (known or (held is not None and held.late)):
            return []
        if known or self._follows(alarm) or self._is_unsettled(alarm):
            if new and told is not None and told.flapping:
                self._hold(key, time)
            return []
        if self.muted:
            if new:
                self._hold(key, time)
            return []
        if not self._bucket(alarm.severity, time).spend(time):
            self._hold(key, time, late=True)
            return []
        turns = self._turns.get(key, deque())
        flapping = len(turns) >= _FLAPPING and time - turns[0] <= _CALM
        kind = "worse" if told is not None and told.open else "flapping" if flapping else "open"
        self._told[key] = _Told(time, alarm.severity, flapping=flapping)
        self._held.pop(key, None)
        return [Message(kind, alarm)]

    def _remind(self, alarm: Alarm, time: float) -> list[Message]:
        told = self._told.get(alarm.key)
        if told is None or not told.open or told.flapping or told.reminders >= len(_REMINDERS):
            return []
        if time - told.at < _REMINDERS[told.reminders] or self.muted or self._follows(alarm):
            return []
        if not self._bucket(alarm.severity, time).spend(time):
            return []  # later
        told.reminders += 1
        return [Message("reminder", alarm)]

    def _calmed(self, key: str, told: _Told, time: float) -> Message:
        """What came and went has stayed as it is for an hour."""
        alarm = self._last[key]
        told.flapping, told.open, told.at, told.reminders = False, alarm.state != "resolved", time, 0
        return self._in_any_case("reminder" if told.open else "resolved", alarm, time)

    def _digest(self, time: float) -> list[Message]:
        held = [(self._last[key], held) for key, held in self._held.items()]
        critical = any(alarm.severity == Severity.CRIT for alarm, _ in held)
        wait = min(self.digest_every, _CRIT_DIGEST) if critical else self.digest_every
        if self.muted or not held or time - min(each.since for _, each in held) < wait:
            return []
        for alarm, each in held:
            if alarm.state == "open" and each.late:
                self._told[alarm.key] = _Told(time, alarm.severity)
        self._held.clear()
        return [Message("digest", held=tuple((alarm, each.count) for alarm, each in held))]

    def _follows(self, alarm: Alarm) -> bool:
        if (alarm.detector, alarm.severity) == _ALWAYS:
            return False
        for key in self._causes:
            other = self._last[key]
            if key == alarm.key or other.severity < alarm.severity or other.state == "resolved":
                continue
            host = key.partition("/")[2] if other.detector == _NODE else None
            if alarm.detector in _CAUSES.get(other.detector, ()) or (host and alarm.facts.get("host") == host):
                return True
        return False

    def _is_unsettled(self, alarm: Alarm) -> bool:
        return alarm.detector in _UNSETTLED and self.steps is not None and self.steps < _FIRST_STEPS

    def _in_any_case(self, kind: str, alarm: Alarm, time: float) -> Message:
        """What keeps people from looking on, or in the wrong place, is told even if much was told before; it counts."""
        self._bucket(alarm.severity, time).spend(time, anyway=True)
        return Message(kind, alarm)

    def _bucket(self, severity: Severity, time: float) -> _Bucket:
        """CRIT has its own: many small things must not keep a large one from being told."""
        return self._buckets.setdefault(severity == Severity.CRIT, _Bucket(time))

    def _hold(self, key: str, time: float, *, late: bool = False) -> None:
        held = self._held.setdefault(key, _Held(time))
        held.count, held.late = held.count + 1, held.late or late

    def saved(self, time: float) -> dict[str, Any]:
        """JSON values from which `restore` goes on; times as ages. Keys that are over and calm are left out."""
        keys = [
            key
            for key, alarm in self._last.items()
            if alarm.state != "resolved"
            or key in self._held
            or (key in self._told and self._told[key].open)
            or (key in self._turns and time - self._turns[key][-1] < _CALM)
        ]
        return {
            "alarms": [self._last[key].to_json() for key in keys],
            "told": {k: {**asdict(self._told[k]), "at": time - self._told[k].at} for k in keys if k in self._told},
            "turns": {k: [time - at for at in self._turns[k]] for k in keys if k in self._turns},
            "held": {k: {**asdict(held), "since": time - held.since} for k, held in self._held.items()},
            "left": {str(int(crit)): (bucket.left, time - bucket.filled_at) for crit, bucket in self._buckets.items()},
        }

    def restore(self, saved: dict[str, Any], time: float) -> None:
        """Go on from what `saved` gave, at the time that corresponds to its own. Raises ValueError, TypeError, ..."""
        alarms = [Alarm.from_json(each) for each in saved["alarms"]]
        told = {
            key: _Told(**{**each, "at": time - each["at"], "severity": Severity(each["severity"])})
            for key, each in saved["told"].items()
        }
        turns = {k: deque([time - age for age in ages], maxlen=_FLAPPING) for k, ages in saved["turns"].items()}
        held = {key: _Held(**{**each, "since": time - each["since"]}) for key, each in saved["held"].items()}
        buckets = {bool(int(crit)): _Bucket(time - age, left) for crit, (left, age) in saved["left"].items()}
        self._last = {alarm.key: alarm for alarm in alarms}
        self._causes = {alarm.key for alarm in alarms if alarm.detector in (*_CAUSES, _NODE)}
        self._told, self._turns, self._held, self._buckets = told, turns, held, buckets


def _is_revision(alarm: Alarm, before: Alarm) -> bool:
    """Whether an incident that goes on is described otherwise than before."""
    same = (alarm.state, alarm.severity, alarm.count) == (before.state, before.severity, before.count)
    return same and alarm.state != "resolved" and alarm.summary != before.summary
