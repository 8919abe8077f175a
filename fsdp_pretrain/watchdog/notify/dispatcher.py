"""What the people on a channel have been told, and what they must be told next.

The state of every alarm and what was last told of it are compared; the difference is the next message. So a message
that did not get through is not stored: it is made again, until it gets through or is out of date. What has been told
is in `RUN/watchdog/told/CHANNEL.json`, the alarms are in `alarms.jsonl`: another watchdog continues from both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic_core import to_json

from fsdp_pretrain.processes import Worker
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import replace_file
from fsdp_pretrain.severity import Severity

from .alarms import Alarm
from .message import Kind

PER_HOUR = 10
"""Messages within an hour; what is over it goes into a digest. The end of an alarm that had its own message is told in
any case: else PagerDuty would keep its incident open."""
_REMIND_SECONDS = 86_400.0
_DIGEST_SECONDS, _CRITICAL_DIGEST_SECONDS = 3600.0, 60.0
"""Between two digests, and between two if a critical alarm waits."""
_DISK_SECONDS = 5.0
"""The run directory may hang, which may be the very thing to tell."""


@dataclass
class Told:
    """What people know of an alarm, and since when, in seconds since 1970.

    Attributes:
        over: they know that it is resolved.
        own: it has its own message, not only a line in a digest.
    """

    opened: str
    severity: Severity
    over: bool
    at: float
    own: bool


@dataclass
class ChannelMemory:
    """What a channel remembers across restarts of the watchdog; times are seconds since 1970.

    Attributes:
        told: by key of the alarm.
        sent: when the messages of the last hour were sent, except those that end an alarm.
        digest_at: when the last digest was sent.
    """

    told: dict[str, Told] = field(default_factory=dict)
    sent: list[float] = field(default_factory=list)
    digest_at: float = 0.0


@dataclass(frozen=True)
class Due:
    """What is to be told next: one alarm, or, of kind `digest`, several. `free`: it does not count for the limit."""

    kind: Kind
    alarms: list[Alarm]
    free: bool = False


class Dispatcher:
    """Decides for one channel.

    Args:
        least: severity below which nothing is sent.
        file: where the memory is kept.
        alarms: the present state of every alarm of the run, by key; kept up to date by its owner.
        but: key of an alarm that is never told here: the channel's own failure.
    """

    def __init__(self, least: Severity, file: Path, alarms: Mapping[str, Alarm], but: str = "") -> None:
        self._least, self._file, self._disk = least, file, Worker("told")
        self._alarms, self._but = alarms, but
        memory = None
        with contextlib.suppress(OSError):
            memory = self._disk.call(lambda: state_files.view(file, ChannelMemory), _DISK_SECONDS)
        self._memory = memory or ChannelMemory()
        if memory is None:  # a new channel: what is over is not told
            self._mark([alarm for alarm in self._known() if alarm.state == "resolved"], 0.0, own=False)

    def _known(self) -> list[Alarm]:
        return [alarm for alarm in list(self._alarms.values()) if alarm.key != self._but]

    def due(self, time: float, *, closing: bool = False) -> Due | None:
        """What is to be told now; None: nothing.

        Args:
            time: seconds since 1970.
            closing: the watchdog ends: a digest does not wait.
        """
        lacking = [(kind, alarm) for alarm in self._known() if (kind := self._lacking(alarm, time)) is not None]
        for kind, alarm in lacking:
            if kind == "resolved" and self._has_own_message(alarm):
                return Due(kind, [alarm], free=True)
        if not lacking:
            return None
        worst = max(alarm.severity for _, alarm in lacking)
        self._memory.sent = [at for at in self._memory.sent if _since(at, time) < 3600]
        if len(self._memory.sent) < PER_HOUR:
            kind, alarm = next(each for each in lacking if each[1].severity == worst)
            return Due(kind, [alarm])
        pause = _CRITICAL_DIGEST_SECONDS if worst is Severity.CRIT else _DIGEST_SECONDS
        if _since(self._memory.digest_at, time) < pause and not closing:
            return None
        return Due("digest", [alarm for _, alarm in lacking])

    def was_told(self, due: Due, time: float) -> None:
        """It was delivered."""
        if due.kind == "digest":
            self._memory.digest_at = time
        elif not due.free:
            self._memory.sent.append(time)
        self._mark(due.alarms, time, own=due.kind != "digest")

    def _lacking(self, alarm: Alarm, time: float) -> Kind | None:
        """The message that would bring people up to date about an alarm; None if they are."""
        if alarm.severity < self._least:
            return None
        told = self._memory.told.get(alarm.key)
        if told is not None and told.opened != alarm.opened:
            told = None
        if alarm.state == "resolved":  # also one that was over before it could be told
            return None if told is not None and told.over else "resolved"
        if told is None:
            return None if alarm.state == "acknowledged" else "open"
        if alarm.severity > told.severity:
            return "open"
        return "reminder" if alarm.state == "open" and time - told.at >= _REMIND_SECONDS else None

    def _has_own_message(self, alarm: Alarm) -> bool:
        told = self._memory.told.get(alarm.key)
        return told is not None and told.opened == alarm.opened and told.own

    def _mark(self, alarms: list[Alarm], time: float, *, own: bool) -> None:
        """Record and save that people know the present state of these alarms."""
        for alarm in alarms:
            self._memory.told[alarm.key] = Told(
                opened=alarm.opened,
                severity=alarm.severity,
                over=alarm.state == "resolved",
                at=time,
                own=own or self._has_own_message(alarm),
            )
        text = to_json(self._memory).decode() + "\n"
        with contextlib.suppress(OSError):  # then it is saved with the next one
            self._disk.call(lambda: replace_file(self._file, text), _DISK_SECONDS)


def _since(at: float, time: float) -> float:
    """Seconds from `at` to `time`; infinite if the clock was set back in between, so that nothing waits for it."""
    return time - at if time >= at else math.inf
