"""Which alarms reach a person: simulated hours of alarms that open, worsen, flap, follow from others and flood."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from pydantic_core import to_json

from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.notify.alarms import Alarm, Alarms
from fsdp_pretrain.watchdog.notify.throttle import AlertThrottle, ChannelState, Message

pytestmark = pytest.mark.quick
HOUR = 3600.0
INFO, WARN, CRIT = Severity


def written_and_read(memory: ChannelState) -> ChannelState:
    """The state another watchdog would continue from."""
    return TypeAdapter(ChannelState).validate_json(to_json(memory))


class Life:
    """Alarms of a run and one channel, with a manual clock."""

    def __init__(self, least: Severity = WARN) -> None:
        self.storm, self.time, self.sent = (
            AlertThrottle(least, HOUR, ChannelState()),
            1e6,
            list[tuple[float, Message]](),
        )
        self.alarms = Alarms(Path("/dev/null/nowhere"), on_change=lambda alarm, before: self._send(alarm))

    def _send(self, alarm: Alarm) -> None:
        self.sent += [(self.time, message) for message in self.storm.transition(alarm, self.time)]

    def wait(self, seconds: float) -> None:
        """Passes of a watchdog, every ten seconds or more."""
        passes = max(1, int(min(seconds / 10, 200)))
        for _ in range(passes):
            self.time += seconds / passes
            self.sent += [(self.time, message) for message in self.storm.tick(self.time)]

    def messages(self) -> list[str]:
        """`kind key` of the messages since the last call."""
        messages = [f"{m.kind} {m.alarm.key}" if m.alarm else m.kind for _, m in self.sent]
        self.sent.clear()
        return messages


@pytest.fixture
def life() -> Life:
    return Life()


def test_an_incident_is_told_when_it_opens_worsens_and_ends(life: Life) -> None:
    life.alarms.open("disk/run", WARN, "two checkpoints fit")
    life.alarms.open("disk/run", WARN, "two checkpoints still fit")
    life.alarms.open("disk/run", CRIT, "none fits")
    life.alarms.open("disk/run", WARN, "one fits")
    life.alarms.resolve("disk/run", "ten fit")
    assert life.messages() == ["open disk/run", "worse disk/run", "resolved disk/run"]


def test_what_was_told_is_revised_once_more_is_known(life: Life) -> None:
    life.alarms.open("hang", CRIT, "no progress: not all ranks of n1 have reported their position yet")
    life.alarms.open("hang", CRIT, "no progress for longer")
    life.alarms.open("hang", CRIT, "no progress: rank 8 on n1 is stopped", revised=True)
    life.alarms.acknowledge("hang", "ada")
    life.alarms.open("hang", CRIT, "no progress: rank 8 on n1 and rank 16 on n2 are stopped", revised=True)
    life.storm.muted = True
    life.alarms.open("hang", CRIT, "no progress: rank 16 on n2 is stopped", revised=True)
    assert life.messages() == ["open hang", "revised hang", "acknowledged hang", "revised hang"]
    assert [alarm.state for alarm in life.alarms] == ["acknowledged"]
    life.storm.muted = False
    life.wait(1000)
    assert life.messages() == ["revised hang"]


def test_a_channel_hears_from_its_severity_on() -> None:
    life = Life(CRIT)
    life.alarms.open("disk/run", WARN, "two fit")
    life.alarms.resolve("disk/run")
    assert life.messages() == []
    life.alarms.open("disk/tmp", INFO, "ten fit")
    life.alarms.open("disk/tmp", CRIT, "none fits")
    life.alarms.resolve("disk/tmp")
    assert life.messages() == ["open disk/tmp", "resolved disk/tmp"]


def test_reminders_come_after_1_4_and_12_hours_until_somebody_takes_it(life: Life) -> None:
    life.alarms.open("disk/run", CRIT, "none fits")
    start = life.time
    life.wait(30 * HOUR)
    assert [round((at - start) / HOUR) for at, m in life.sent if m.kind == "reminder"] == [1, 4, 12]
    life.messages()
    life.alarms.open("mount/data", CRIT, "silent")
    life.wait(2 * HOUR)
    life.alarms.acknowledge("mount/data", "ada")
    life.wait(30 * HOUR)
    assert life.messages() == ["open mount/data", "reminder mount/data", "acknowledged mount/data"]


def test_what_was_taken_is_told_again_if_it_gets_worse(life: Life) -> None:
    life.alarms.open("disk/run", WARN, "two fit")
    life.alarms.acknowledge("disk/run")
    life.alarms.open("disk/run", CRIT, "none fits")
    assert life.messages() == ["open disk/run", "acknowledged disk/run", "worse disk/run"]


@pytest.mark.shows("F34")
@pytest.mark.parametrize("severity", [WARN, CRIT])
@pytest.mark.parametrize("period", [60, 600, 1000])
def test_flapping_is_three_messages_an_hour_and_a_digest(life: Life, severity: Severity, period: int) -> None:
    """A slowdown that comes and goes for six hours, then stays away."""
    start, turns = life.time, 0
    while life.time - start < 6 * HOUR:
        turns += 2
        life.alarms.open("pace", severity, "steps take 5% longer")
        life.wait(period / 2)
        life.alarms.resolve("pace")
        life.wait(period / 2)
    immediate = [(at, m) for at, m in life.sent if m.kind != "digest"]
    for hour in range(6):
        assert sum(hour * HOUR <= at - start < (hour + 1) * HOUR for at, _ in immediate) <= 3
    assert [m.kind for _, m in immediate] == ["open", "resolved", "flapping"]
    digests = [m for _, m in life.sent if m.kind == "digest"]
    assert 4 <= len(digests) <= 6
    life.wait(2 * HOUR)
    held = sum(count for _, m in life.sent for _, count in m.held)
    assert turns - held - 3 in (0, 1)  # sent at once, in a digest, or by the last message: nothing is lost
    assert life.messages()[-1] == "resolved pace"
    life.alarms.open("pace", severity, "steps take 5% longer")
    assert life.messages() == ["open pace"]


def test_flapping_that_ends_open_is_told_as_open(life: Life) -> None:
    for _ in range(5):
        life.alarms.resolve("pace")
        life.alarms.open("pace", WARN, "slow")
        life.wait(60)
    life.messages()
    life.wait(1.1 * HOUR)
    assert "reminder pace" in life.messages()


def test_flapping_that_worsens_is_told(life: Life) -> None:
    for _ in range(5):
        life.alarms.resolve("pace")
        life.alarms.open("pace", WARN, "slow")
    life.messages()
    life.alarms.open("pace", CRIT, "very slow")
    assert life.messages() == ["worse pace"]


def test_a_flood_is_five_at_once_ten_an_hour_and_a_digest(life: Life) -> None:
    start = life.time
    for n in range(300):
        life.alarms.open(f"straggler/rank-{n}", WARN, "slow")
        life.wait(120)
    opened = Counter(int((at - start) // HOUR) for at, m in life.sent if m.kind == "open")
    assert opened[0] <= 15 and all(opened[hour] <= 11 for hour in range(1, 10))
    digests = [m for _, m in life.sent if m.kind == "digest"]
    assert 5 <= len(digests) <= 10
    life.wait(HOUR)
    keys = {m.alarm.key for _, m in life.sent if m.alarm}
    keys |= {alarm.key for _, m in life.sent for alarm, _ in m.held}
    assert len(keys) == 300  # each was sent


def test_a_flood_of_warnings_does_not_drown_what_is_critical(life: Life) -> None:
    for n in range(50):
        life.alarms.open(f"host/{n}", WARN, "memory grows")
    life.alarms.open("hang", CRIT, "no progress")
    assert life.messages()[-1] == "open hang"


def test_a_flood_of_critical_ones_is_told_within_a_minute(life: Life) -> None:
    for n in range(64):
        life.alarms.open(f"gpu/{n}", CRIT, "fell off the bus")
    assert life.messages() == [f"open gpu/{n}" for n in range(5)]
    life.wait(10)
    (digest,) = [m for _, m in life.sent if m.kind == "digest"]
    assert len(digest.held) == 59
    life.alarms.open("gpu/64", CRIT, "fell off the bus")
    life.wait(60)
    assert [len(m.held) for _, m in life.sent if m.kind == "digest"] == [59, 1]
    life.messages()
    for n in range(65):
        life.alarms.resolve(f"gpu/{n}")
    assert life.messages() == [f"resolved gpu/{n}" for n in range(5)]  # alarms with an own message end with one
    life.wait(HOUR)
    listed = {alarm.key for _, m in life.sent for alarm, _ in m.held if alarm.state == "resolved"}
    assert len(life.sent) <= 12 and len(listed | {m.alarm.key for _, m in life.sent if m.alarm}) == 60


def test_a_clock_that_is_set_back_holds_nothing_up(life: Life) -> None:
    for n in range(20):
        life.alarms.open(f"gpu/{n}", CRIT, "fell off the bus")
        life.wait(1)
    life.messages()
    life.time -= 24 * HOUR
    life.alarms.open("hang", CRIT, "no progress")
    life.alarms.open("disk/run", WARN, "two fit")
    life.wait(60)
    assert {"open hang", "open disk/run"} <= set(life.messages())


@pytest.mark.parametrize("cause", ["hang", "rank-died"])
def test_what_follows_from_a_worse_incident_is_told_when_that_is_over_and_it_is_not(life: Life, cause: str) -> None:
    life.alarms.open(cause, CRIT, "no progress")
    for follower in ("pace", "straggler/rank-3", "checkpoint-age", "data-wait"):
        life.alarms.open(follower, WARN, "as a consequence")
    life.alarms.open("disk/run", WARN, "two fit")
    for follower in ("pace", "straggler/rank-3", "data-wait"):
        life.alarms.resolve(follower)
    life.wait(600)
    life.alarms.resolve(cause)
    life.wait(60)
    assert life.messages() == [f"open {cause}", "open disk/run", f"resolved {cause}", "open checkpoint-age"]


def test_a_lesser_cause_hides_nothing_worse(life: Life) -> None:
    life.alarms.open("disk/run", WARN, "two fit")
    life.alarms.open("checkpoint-speed", WARN, "slow")
    life.alarms.open("checkpoint-failed", CRIT, "the third time")
    life.alarms.open("hang", CRIT, "no progress")
    life.alarms.open("checkpoint-age", CRIT, "12 hours")
    expected = ["open disk/run", "open checkpoint-failed", "open hang", "open checkpoint-age"]
    assert life.messages() == expected


def test_a_lost_node_speaks_for_its_ranks(life: Life) -> None:
    life.alarms.open("node/n7", CRIT, "no beat")
    life.alarms.open("rank-died/9", CRIT, "gone", facts={"host": "n7"})
    life.alarms.open("rank-died/1", CRIT, "gone", facts={"host": "n8"})
    assert life.messages() == ["open node/n7", "open rank-died/1"]


def test_a_maintenance_window_is_silent_and_its_end_tells_what_is_open(life: Life) -> None:
    life.alarms.open("disk/run", WARN, "two fit")
    life.storm.muted = True
    life.alarms.resolve("disk/run")
    life.alarms.open("hang", CRIT, "no progress")
    life.alarms.resolve("hang")
    life.alarms.open("mount/data", CRIT, "silent")
    life.wait(3 * HOUR)
    assert life.messages() == ["open disk/run", "resolved disk/run"]
    life.storm.muted = False
    life.wait(10)
    assert life.messages() == ["open mount/data", "digest"]


def test_it_goes_on_after_the_watchdog_was_killed() -> None:
    """At any time: the same messages as without the kill."""

    def story(die_after: int | None) -> list[str]:
        life, messages = Life(), list[str]()
        for n in range(12):
            if n == die_after:
                life.storm = AlertThrottle(WARN, HOUR, written_and_read(life.storm.memory))
            if n % 2:
                life.alarms.resolve("pace")
            else:
                life.alarms.open("pace", WARN, "slow")
                life.alarms.open(f"disk/{n}", WARN, "two fit")
            life.wait(400)
        messages += life.messages()
        return messages

    expected = story(None)
    assert {"open", "resolved", "flapping", "reminder", "digest"} <= {each.split()[0] for each in expected}
    for n in range(12):
        assert story(n) == expected


def test_transitions_that_were_seen_are_known(life: Life) -> None:
    opened = life.alarms.open("disk/run", WARN, "two fit")
    assert life.storm.has_seen(opened)
    assert AlertThrottle(WARN, HOUR, written_and_read(life.storm.memory)).has_seen(opened)
    assert not AlertThrottle(WARN, HOUR, ChannelState()).has_seen(opened)
