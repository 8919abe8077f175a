"""Decides which message a channel sends next, and remembers which were delivered.

The next message is the difference between the state of every alarm and its last delivered message. So an undelivered
message is not stored: it is made again until it is delivered or out of date. Delivered messages are remembered in
`RUN/watchdog/told/CHANNEL.json`, alarms in `alarms.jsonl`; a restarted watchdog continues from both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fsdp_pretrain.processes import Worker
from fsdp_pretrain.run import state_files
from fsdp_pretrain.severity import Severity

from .alarms import Alarm
from .message import Kind

PER_HOUR = 10
"""Maximum messages per hour; further news goes into a digest. The end of an alarm that had its own message is always
sent, or PagerDuty would keep its incident open."""
_REMIND_SECONDS = 86_400.0
_DIGEST_SECONDS, _CRITICAL_DIGEST_SECONDS = 3600.0, 60.0
"""Seconds between two digests, usually and while a critical alarm waits."""
_DISK_SECONDS = 5.0
"""Time limit of disk access: the run directory may hang, which may be the very alarm to send."""


@dataclass
class Told:
    """The last delivered message about an alarm."""

    opened: str  # when the alarm was opened
    severity: Severity  # its severity in the message
    over: bool  # whether the message reported that it is resolved
    at: float  # when it was delivered, in seconds since 1970
    own: bool  # whether the alarm had a message of its own, not only a line in a digest


@dataclass
class ChannelMemory:
    """State of a channel across restarts of the watchdog, with times in seconds since 1970."""

    told: dict[str, Told] = field(default_factory=dict)  # the last delivered messages by key of the alarm
    sent: list[float] = field(default_factory=list)  # of the messages of the last hour, except those that end an alarm
    digest_at: float = 0.0  # of the last digest


@dataclass(frozen=True)
class Due:
    """The next message: about one alarm, or a `digest` of several. `free`: it does not count towards the limit."""

    kind: Kind
    alarms: list[Alarm]
    free: bool = False


class Dispatcher:
    """Decides which messages one channel sends.

    Args:
        least: severity below which nothing is sent.
        file: file of the `ChannelMemory`.
        alarms: the present state of every alarm of the run, by key; kept up to date by its owner.
        but: key of an alarm that is never sent here: the channel's own failure.
    """

    def __init__(self, least: Severity, file: Path, alarms: Mapping[str, Alarm], but: str = "") -> None:
        self._least, self._file, self._disk = least, file, Worker("told")
        self._alarms, self._but = alarms, but
        memory = None
        with contextlib.suppress(OSError):
            memory = self._disk.call(lambda: state_files.view(file, ChannelMemory), _DISK_SECONDS)
        self._memory = memory or ChannelMemory()
        if memory is None:  # a new channel: do not report alarms that are resolved
            self._mark([alarm for alarm in self._known() if alarm.state == "resolved"], 0.0, own=False)

    def _known(self) -> list[Alarm]:
        return [alarm for alarm in list(self._alarms.values()) if alarm.key != self._but]

    def due(self, time: float, *, closing: bool = False) -> Due | None:
        """The message to send now; None: none is due.

        Args:
            time: seconds since 1970.
            closing: whether the watchdog ends, so that a digest does not wait.
        """
        pending = [(kind, alarm) for alarm in self._known() if (kind := self._next_kind(alarm, time)) is not None]
        for kind, alarm in pending:
            if kind == "resolved" and self._has_own_message(alarm):
                return Due(kind, [alarm], free=True)
        if not pending:
            return None
        worst = max(alarm.severity for _, alarm in pending)
        self._memory.sent = [at for at in self._memory.sent if _since(at, time) < 3600]
        if len(self._memory.sent) < PER_HOUR:
            kind, alarm = next(news for news in pending if news[1].severity == worst)
            return Due(kind, [alarm])
        pause = _CRITICAL_DIGEST_SECONDS if worst is Severity.CRIT else _DIGEST_SECONDS
        if _since(self._memory.digest_at, time) < pause and not closing:
            return None
        return Due("digest", [alarm for _, alarm in pending])

    def was_told(self, due: Due, time: float) -> None:
        """Remember that the message `due` was delivered at `time`."""
        if due.kind == "digest":
            self._memory.digest_at = time
        elif not due.free:
            self._memory.sent.append(time)
        self._mark(due.alarms, time, own=due.kind != "digest")

    def _next_kind(self, alarm: Alarm, time: float) -> Kind | None:
        """The kind of the next message about an alarm; None if the delivered ones are up to date."""
        if alarm.severity < self._least:
            return None
        told = self._memory.told.get(alarm.key)
        if told is not None and told.opened != alarm.opened:
            told = None
        if alarm.state == "resolved":  # also if it was resolved before it could be sent
            return None if told is not None and told.over else "resolved"
        if told is None:
            return None if alarm.state == "acknowledged" else "open"
        if alarm.severity > told.severity:
            return "open"
        told.at = min(told.at, time)  # the clock may have been set back
        return "reminder" if alarm.state == "open" and time - told.at >= _REMIND_SECONDS else None

    def _has_own_message(self, alarm: Alarm) -> bool:
        told = self._memory.told.get(alarm.key)
        return told is not None and told.opened == alarm.opened and told.own

    def _mark(self, alarms: list[Alarm], time: float, *, own: bool) -> None:
        """Remember and save that the present state of these alarms was delivered."""
        for alarm in alarms:
            self._memory.told[alarm.key] = Told(
                opened=alarm.opened,
                severity=alarm.severity,
                over=alarm.state == "resolved",
                at=time,
                own=own or self._has_own_message(alarm),
            )
        memory = asdict(self._memory)
        with contextlib.suppress(OSError):  # then it is saved with the next one
            self._disk.call(lambda: state_files.write(self._file, memory), _DISK_SECONDS)


def _since(at: float, time: float) -> float:
    """Seconds from `at` to `time`; infinite if the clock was set back in between, so that nothing waits for it."""
    return time - at if time >= at else math.inf
