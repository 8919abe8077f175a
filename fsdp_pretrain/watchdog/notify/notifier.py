"""Delivers alarms to people: every channel has a thread that decides, spools and sends. No torch.

The watchdog hands over without waiting. A message is on disk from before it is sent until it has arrived, so neither a
channel that is down nor a killed watchdog loses any. A kill just after delivery causes a duplicate, with the same `id`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fsdp_pretrain.config.notify import NotifySection, PingSection
from fsdp_pretrain.record.files import RunDir, age
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time

from .alarms import Alarm, Alarms, read_alarms
from .channels import Channel, DeliveryError, fetch, make_channels, secret
from .formatting import MessageSender, Note, make_note
from .operator import alarms_file, muted_until
from .outbox import Outbox
from .snapshot import Snapshot
from .throttle import AlertThrottle

RETRIES = (1.0, 5.0, 30.0, 120.0)
"""Seconds to wait after a failure; the last value repeats."""
_POLL_SECONDS = 1.0


class Notifier:
    """Notifies people of the alarms of a run. Only the watchdog that leads has one.

    Raises:
        ConfigError: a channel cannot work: a variable that is not set, a file that others can read, a missing program.
    """

    def __init__(
        self,
        section: NotifySection,
        run: RunDir,
        identity: MessageSender,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._run = run
        channels = make_channels(section, environment)
        known = read_alarms(alarms_file(run)) if channels else []
        muted = muted_until(run)
        self._threads = [_ChannelThread(channel, run.path, identity, known, muted) for channel in channels]

    def on_change(self, alarm: Alarm, before: Alarm | None) -> None:
        """An alarm changed. Returns at once."""
        del before
        for thread in self._threads:
            thread.put(alarm)

    def tick(self, alarms: Alarms, snapshot: Snapshot | None = None) -> None:
        """A pass of the watchdog: hand over the snapshot, open and resolve the alarms of failing channels."""
        until = muted_until(self._run)
        for thread in self._threads:
            thread.snapshot, thread.muted_until = snapshot, until
            problem, tries = thread.problem, thread.tries
            if problem:
                alarms.open(
                    thread.key,
                    Severity.WARN if tries > len(RETRIES) else Severity.INFO,
                    f"messages do not get through: {problem}",
                    effect=f"{len(thread.outbox)} messages wait; they are kept and sent when it works again",
                    remedy="check the endpoint and its secret; `fsdp-pretrain notify RUN --test` shows what happens",
                )
            elif problem is None:
                alarms.resolve(thread.key, "messages get through again")
            if thread.refused:
                alarms.open(
                    f"{thread.key}-refused",
                    Severity.WARN,
                    f"the receiver refused a message: {thread.refused}",
                    effect="nobody was notified of it on this channel",
                    remedy=f"read it in {thread.outbox.refused}",
                )

    def close(self, seconds: float = 10.0) -> None:
        """Send what can be sent within this time; the rest waits on disk for the next process."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class _ChannelThread(threading.Thread):
    """A channel's thread. It starts with what an earlier process left: messages, and unprocessed transitions.

    Args:
        known: the present alarms of the run.
        muted_until: end of the maintenance window.

    Attributes:
        key: of the alarm for its failure.
        problem: why it fails; empty before the first message, None when it works.
        tries: failures since it last worked.
        refused: title of the last message that the receiver refused; empty if there is none.
    """

    def __init__(
        self, channel: Channel, run: Path, identity: MessageSender, known: list[Alarm], muted_until: float
    ) -> None:
        super().__init__(name=f"notify {channel.name}", daemon=True)
        self.key = f"notify/{channel.name}"
        self.snapshot: Snapshot | None = None
        self.muted_until = muted_until
        self.problem: str | None = ""
        self.tries = 0
        self.refused = ""
        self.outbox = Outbox(run, channel.name)
        self._channel, self._identity = channel, identity
        self._throttle = AlertThrottle(channel.least, channel.digest_every, self.outbox.memory)
        self._events: queue.SimpleQueue[Alarm | None] = queue.SimpleQueue()
        self._next_try, self._closing = 0.0, False
        for alarm in known:
            if not self._throttle.has_seen(alarm):
                self.put(alarm)
        self.start()

    def put(self, alarm: Alarm | None) -> None:
        """Hand over an alarm that changed; None: end. The alarm for this channel's failure is not sent through it."""
        if alarm is None or alarm.key != self.key:
            self._events.put(alarm)

    def run(self) -> None:
        """Run until `None` was put and everything is sent, or the process ends."""
        while not (self._closing and (self.tries or not len(self.outbox))):
            try:
                self._pass()
            except Exception as error:  # a bug must not end the channel; an alarm shows it
                self.problem, self.tries = f"defect: {type(error).__name__}", self.tries + 1
                time.sleep(_POLL_SECONDS)

    def _pass(self) -> None:
        pause = self._next_try - time.monotonic() if len(self.outbox) else _POLL_SECONDS
        changed = [] if self._closing else self._changed(min(max(0.0, pause), _POLL_SECONDS))
        at = time.time()
        self._throttle.muted = at < self.muted_until
        messages = [message for alarm in changed for message in self._throttle.transition(alarm, at)]
        messages += self._throttle.tick(at)
        for message in messages:
            self.outbox.add(make_note(message, self._identity, self.snapshot))
        if changed or messages:
            self.outbox.keep()
        oldest = self.outbox.oldest()
        if oldest is not None and time.monotonic() >= self._next_try:
            self._send(oldest)

    def _changed(self, pause: float) -> list[Alarm]:
        """The alarms that have changed, waiting this many seconds for the first."""
        found: list[Alarm] = []
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=pause) if pause > 0 else self._events.get_nowait()
            while event is not None:
                found.append(event)
                event = self._events.get_nowait()
            self._closing, self.tries, self._next_try = True, 0, 0.0
        return found

    def _send(self, oldest: Note) -> None:
        try:
            self._channel.send(_late(oldest))
        except DeliveryError as error:
            self.tries += 1
            self.problem = str(error)
            self._next_try = time.monotonic() + RETRIES[min(self.tries, len(RETRIES)) - 1]
            if error.refused and self.tries > len(RETRIES):
                self.refused = oldest.title
                self.outbox.refuse()
        else:
            self.tries, self.problem = 0, None
            self.outbox.delivered()


def _late(note: Note) -> Note:
    """Mark a message that was delayed."""
    waited = age(note.time)
    return note if waited < 60 else replace(note, lines=[f"(sent {human_time(waited)} late)", *note.lines])


class Ping:
    """The dead man's switch: a URL that is fetched while the watchdog really observes."""

    def __init__(self, section: PingSection, environment: Mapping[str, str] = os.environ) -> None:
        self._url = secret(section.url_env, section.url_file, environment)
        self._interval, self._pinged = section.interval.value, -float("inf")
        self._due = threading.Event()
        threading.Thread(target=self._work, name="ping", daemon=True).start()

    def on_pass(self, observed: bool, now: float) -> None:
        """A pass ended. `observed`: it saw ranks; a blind watchdog must not look healthy."""
        if observed and now - self._pinged >= self._interval:
            self._pinged = now
            self._due.set()

    def _work(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            with contextlib.suppress(DeliveryError):  # the service that expects the ping notices
                fetch(self._url)
