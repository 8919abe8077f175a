"""Alarms reach people: every channel has a thread that decides, spools and sends. No torch.

The watchdog hands over and goes on. A message is on disk before it is sent and leaves the disk when it has arrived, so
an endpoint that is down and a watchdog that is killed lose nothing. A kill between the arrival and the note of it makes
a message arrive twice; its `id` shows that.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..notify_sections import NotifySection, PingSection
from ..record.files import RunDir, age
from ..severity import Severity
from ..units import human_time
from .alarms import Alarm, Alarms, read_alarms
from .channels import Channel, DeliveryError, fetch, make_channels, secret
from .desk import alarms_file, muted_until
from .message import Identity, note
from .snapshot import Snapshot
from .spool import Spool
from .storm import Storm

RETRIES = (1.0, 5.0, 30.0, 120.0)
"""Seconds to wait after a failure, the last one again and again."""
_LOOK_SECONDS = 1.0


class Notifier:
    """Tells people of the alarms of a run. One process of a run has one: the watchdog that leads.

    Args:
        section: the channels.
        run: the run directory.
        identity: who speaks.
        environment: where secrets are looked up.

    Raises:
        ConfigError: a channel cannot work: a variable that is not set, a file that others can read, no such program.
    """

    def __init__(
        self,
        section: NotifySection,
        run: RunDir,
        identity: Identity,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._run = run
        self._outboxes = [_Outbox(channel, run.path, identity) for channel in make_channels(section, environment)]
        known = read_alarms(alarms_file(run)) if self._outboxes else []
        for outbox in self._outboxes:
            outbox.muted_until = muted_until(run)
            outbox.start(known)

    def told(self, alarm: Alarm, before: Alarm | None) -> None:
        """An alarm changed. Returns at once."""
        del before
        for outbox in self._outboxes:
            if alarm.key != outbox.key:  # that a channel fails is not told through it
                outbox.events.put(alarm)

    def tick(self, alarms: Alarms, snapshot: Snapshot | None = None) -> None:
        """A pass of the watchdog: hand over what is known of the run, open and resolve the alarms of channels."""
        until = muted_until(self._run)
        for outbox in self._outboxes:
            outbox.snapshot, outbox.muted_until = snapshot, until
            problem, tries = outbox.problem, outbox.tries
            if problem:
                severity = Severity.WARN if tries > len(RETRIES) else Severity.INFO
                alarms.open(
                    outbox.key,
                    severity,
                    f"messages do not get through: {problem}",
                    effect=f"{len(outbox.spool)} messages wait; they are kept and sent when it works again",
                    remedy="check the endpoint and its secret; `fsdp-pretrain notify RUN --test` shows what happens",
                )
            elif problem is None:
                alarms.resolve(outbox.key, "messages get through again")
            if outbox.refused:
                alarms.open(
                    f"{outbox.key}-refused",
                    Severity.WARN,
                    f"the receiver refused a message: {outbox.refused}",
                    effect="nobody was told of it on this channel",
                    remedy=f"read it in {outbox.spool.refused}",
                )

    def close(self, seconds: float = 10.0) -> None:
        """Send what can be sent in so many seconds; the rest waits on disk for the next process."""
        deadline = time.monotonic() + seconds
        for outbox in self._outboxes:
            outbox.events.put(None)
        for outbox in self._outboxes:
            outbox.join(max(0.0, deadline - time.monotonic()))


class _Outbox(threading.Thread):
    """A channel's thread.

    Attributes:
        key: of the alarm that it fails.
        problem: why it fails; empty before the first message, None when it works.
        tries: how often it has failed since it last worked.
        refused: title of the last message that the receiver would not take; empty if there is none.
    """

    def __init__(self, channel: Channel, run: Path, identity: Identity) -> None:
        super().__init__(name=f"notify {channel.name}", daemon=True)
        self.key = f"notify/{channel.name}"
        self.events: queue.SimpleQueue[Alarm | None] = queue.SimpleQueue()
        self.snapshot: Snapshot | None = None
        self.muted_until = 0.0
        self.problem: str | None = ""
        self.tries = 0
        self.refused = ""
        self.spool = Spool(run, channel.name)
        self._channel, self._identity = channel, identity
        self._storm = Storm(channel.least, channel.digest_every)
        self._next_try = 0.0
        self._closing = False

    def start(self, known: list[Alarm] | None = None) -> None:
        """Begin with what an earlier process left: the state, and transitions that it did not get to."""
        state = self.spool.state
        if state is not None:
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                self._storm.restore(state["storm"], time.monotonic() - max(0.0, time.time() - state["saved"]))
        for alarm in known or []:
            if alarm.key != self.key and not self._storm.has_seen(alarm):
                self.events.put(alarm)
        super().start()

    def run(self) -> None:
        """Until `None` comes and everything is sent, or the process ends."""
        while not (self._closing and (self.tries or not len(self.spool))):
            try:
                self._pass()
            except Exception as error:  # a defect of ours must not end the only way out; it is visible as an alarm
                self.problem, self.tries = f"defect: {type(error).__name__}", self.tries + 1
                time.sleep(_LOOK_SECONDS)

    def _pass(self) -> None:
        waiting = len(self.spool) > 0
        pause = self._next_try - time.monotonic() if waiting else _LOOK_SECONDS
        changed = [] if self._closing else self._changed(min(max(0.0, pause), _LOOK_SECONDS))
        at = time.monotonic()
        self._storm.muted = time.time() < self.muted_until
        self._storm.steps = self.snapshot.segment_steps if self.snapshot else None
        messages = [message for alarm in changed for message in self._storm.transition(alarm, at)]
        messages += self._storm.tick(at)
        for message in messages:
            self.spool.add(note(message, self._identity, self.snapshot))
        if changed or messages:
            self.spool.keep({"storm": self._storm.saved(at)})
        oldest = self.spool.oldest()
        if oldest is not None and time.monotonic() >= self._next_try:
            self._send(oldest)

    def _changed(self, pause: float) -> list[Alarm]:
        """What has come, waiting so many seconds for the first."""
        found: list[Alarm] = []
        with contextlib.suppress(queue.Empty):
            event = self.events.get(timeout=pause) if pause > 0 else self.events.get_nowait()
            while event is not None:
                found.append(event)
                event = self.events.get_nowait()
            self._closing, self.tries, self._next_try = True, 0, 0.0
        return found

    def _send(self, oldest: dict[str, Any]) -> None:
        try:
            self._channel.send(_late(oldest))
        except DeliveryError as error:
            self.tries += 1
            self.problem = str(error)
            self._next_try = time.monotonic() + RETRIES[min(self.tries, len(RETRIES)) - 1]
            if error.refused and self.tries > len(RETRIES):
                self.refused = oldest["title"]
                self.spool.refuse(oldest)
        else:
            self.tries, self.problem = 0, None
            self.spool.delivered(oldest)


def _late(message: dict[str, Any]) -> dict[str, Any]:
    """A message that waited says so."""
    waited = age(message["time"])
    if waited < 60:
        return message
    return {**message, "lines": [f"(sent {human_time(waited)} late)", *message["lines"]]}


class Ping:
    """The dead man's switch: a URL that is fetched while the watchdog really observes.

    Args:
        section: where, how often.
        environment: where the URL is looked up.
    """

    def __init__(self, section: PingSection, environment: Mapping[str, str] = os.environ) -> None:
        self._url = secret(section.url_env, section.url_file, environment)
        self._interval, self._pinged = section.interval.value, -float("inf")
        self._due = threading.Event()
        threading.Thread(target=self._work, name="ping", daemon=True).start()

    def passed(self, observed: bool, now: float) -> None:
        """A pass ended. `observed`: it saw the ranks and the record; a blind one must not look healthy."""
        if observed and now - self._pinged >= self._interval:
            self._pinged = now
            self._due.set()

    def _work(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            with contextlib.suppress(DeliveryError):  # who waits for it notices
                fetch(self._url)
