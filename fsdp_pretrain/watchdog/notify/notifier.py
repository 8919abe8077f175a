"""Delivers alarms to people: every channel has a thread that decides and sends.

The watchdog never waits for a delivery, and a channel that hangs delays no other. If the watchdog is killed just after
a delivery, the message is sent again, with the same `id`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping

from fsdp_pretrain.config.notify import NotifySection
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.severity import Severity

from .alarms import Alarm, Alarms, alarms_file, read_alarms
from .channels import Channel, DeliveryError, fetch, make_channels, ping_url
from .dispatcher import Dispatcher
from .message import MessageSender, make_message

RETRIES = (1.0, 5.0, 30.0, 120.0)
"""Seconds to wait after a failure; the last value repeats."""
_POLL_SECONDS = 1.0
_PING_SECONDS = 60.0


class Notifier:
    """Notifies people of the alarms of a run. Only the watchdog of node 0 has one. Raises ConfigError if a channel
    cannot work: a variable that is not set, a missing program."""

    def __init__(
        self, section: NotifySection, run: RunDir, sender: MessageSender, environment: Mapping[str, str] = os.environ
    ) -> None:
        channels = make_channels(section, environment)
        self._alarms: dict[str, Alarm] = {}
        with contextlib.suppress(OSError):
            self._alarms |= {alarm.key: alarm for alarm in read_alarms(alarms_file(run)) if channels}
        self._threads = [_ChannelThread(channel, run, self._alarms, sender) for channel in channels]

    def on_change(self, alarm: Alarm) -> None:
        """An alarm changed. Returns at once."""
        self._alarms[alarm.key] = alarm
        for thread in self._threads:
            thread.wake.set()

    def tick(self, alarms: Alarms) -> None:
        """A pass of the watchdog: open and resolve the alarms of failing channels."""
        for thread in self._threads:
            problem, tries = thread.problem, thread.tries
            if problem:
                alarms.open(
                    thread.key,
                    Severity.WARN if tries > len(RETRIES) else Severity.INFO,
                    f"messages do not get through: {problem}",
                    effect="nobody hears of alarms on this channel; they are sent when it works again",
                    remedy="check the endpoint and its secret; `fsdp-pretrain alarms RUN test` shows what happens",
                )
            elif problem is None:
                alarms.resolve(thread.key, "messages get through again")

    def close(self, seconds: float = 10.0) -> None:
        """Send what can be sent within this time; the next watchdog sends the rest."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.closing = True
            thread.wake.set()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class _ChannelThread(threading.Thread):
    """A channel's thread.

    Args:
        alarms: the present state of every alarm of the run, by key.

    Attributes:
        key: key of the alarm for its failure.
        problem: why it fails; empty before the first message, None when it works.
        tries: number of failures since it last worked.
        wake: set when an alarm has changed, or to close.
        closing: whether the thread should end once everything is sent, or cannot be.
    """

    def __init__(self, channel: Channel, run: RunDir, alarms: Mapping[str, Alarm], sender: MessageSender) -> None:
        super().__init__(name=f"notify {channel.name}", daemon=True)
        self.key = channel.key
        self.problem: str | None = ""
        self.tries = 0
        self.wake, self.closing = threading.Event(), False
        self._channel, self._sender = channel, sender
        file = run.path / f"watchdog/told/{channel.name}.json"
        self._dispatcher = Dispatcher(channel.least, file, alarms, but=self.key)
        self._next_try = 0.0
        self.start()

    def run(self) -> None:
        """Run until it is closing and everything is sent, or the process ends."""
        while True:
            closing = self.closing
            try:
                more = self._send_next(closing)
            except Exception as error:  # a bug must not end the channel; an alarm shows it
                self.problem, self.tries, more = f"defect: {type(error).__name__}", self.tries + 1, False
            if not more:
                if closing:
                    return
                self.wake.wait(_POLL_SECONDS)
                self.wake.clear()

    def _send_next(self, closing: bool) -> bool:
        """Send the next message, if one is due. Returns whether another may be."""
        at = time.time()
        if time.monotonic() < self._next_try and not closing:
            return False
        due = self._dispatcher.due(at, closing=closing)
        if due is None:
            return False
        message = make_message(due.kind, due.alarms, self._sender)
        try:
            self._channel.send(message)
        except DeliveryError as error:
            self.tries, self.problem = self.tries + 1, str(error)
            self._next_try = time.monotonic() + RETRIES[min(self.tries, len(RETRIES)) - 1]
            if not error.refused or self.tries <= len(RETRIES):
                return False
            self.problem = f"{error}, for good, to: {message.title}"  # so that it does not block the others
        else:
            self.tries, self.problem = 0, None
        self._dispatcher.was_told(due, at)
        return True


class Ping:
    """The dead man's switch: a URL that is fetched while the watchdog really observes."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._url = ping_url(environment)
        self._pinged = -float("inf")

    def on_pass(self, observed: bool, now: float) -> None:
        """Ping after a pass if it saw ranks (`observed`): a blind watchdog must not look healthy."""
        if observed and now - self._pinged >= _PING_SECONDS:
            self._pinged = now
            threading.Thread(target=self._fetch, name="ping", daemon=True).start()

    def _fetch(self) -> None:
        with contextlib.suppress(DeliveryError):  # the service that expects the ping notices
            fetch(self._url)
