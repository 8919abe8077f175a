"""Which alarms reach a person: simulated hours of alarms that open, worsen, come and go, and flood."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.notify import alarms as alarms_module
from fsdp_pretrain.watchdog.notify.alarms import Alarm, Alarms, read_alarms
from fsdp_pretrain.watchdog.notify.dispatcher import PER_HOUR, Dispatcher, Due

pytestmark = pytest.mark.quick
HOUR = 3600.0
INFO, WARN, CRIT = Severity


class Life:
    """Alarms of a run and one channel, with a manual clock."""

    def __init__(self, path: Path, least: Severity = WARN) -> None:
        self.time, self.sent = 1e6, list[tuple[float, Due]]()
        self.down = False
        self._path, self._least = path, least
        self.begin()

    def begin(self) -> None:
        """Another watchdog continues from what is on disk."""
        self.alarms = Alarms(self._path / "alarms.jsonl", self._changed)
        self.known = {alarm.key: alarm for alarm in read_alarms(self._path / "alarms.jsonl")}
        self.dispatcher = Dispatcher(self._least, self._path / "told.json", self.known)

    def _changed(self, alarm: Alarm) -> None:
        self.known[alarm.key] = alarm
        self.deliver()

    def deliver(self) -> None:
        """Send what is due now, unless the endpoint is down."""
        while not self.down and (due := self.dispatcher.due(self.time)) is not None:
            self.sent.append((self.time, due))
            self.dispatcher.was_told(due, self.time)

    def wait(self, seconds: float) -> None:
        """Passes of a watchdog, every ten seconds or more."""
        passes = max(1, int(min(seconds / 10, 200)))
        for _ in range(passes):
            self.time += seconds / passes
            self.deliver()

    def messages(self) -> list[str]:
        """`kind key` of the messages since the last call."""
        messages = [due.kind if due.kind == "digest" else f"{due.kind} {due.alarms[0].key}" for _, due in self.sent]
        self.sent.clear()
        return messages


@pytest.fixture
def lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Life]:
    """Makes lives. No two transitions have the same time, as between passes."""
    ticks = itertools.count(1)
    monkeypatch.setattr(alarms_module, "now", lambda: f"2026-01-17T03:12:00.{next(ticks):06}Z")
    numbers = itertools.count()
    return lambda least=WARN: Life(tmp_path / str(next(numbers)), least)


@pytest.fixture
def life(lives: Callable[..., Life]) -> Life:
    return lives()


def test_an_alarm_is_told_when_it_opens_and_ends(life: Life) -> None:
    """With every new severity it opens again; what is only known better is for the record."""
    life.alarms.open("disk/run", WARN, "two checkpoints fit")
    life.alarms.open("disk/run", WARN, "two checkpoints still fit")
    life.alarms.open("disk/run", CRIT, "none fits")
    life.alarms.open("disk/run", CRIT, "none fits, since a core dump was written", revised=True)
    life.alarms.open("disk/run", WARN, "one fits")
    life.wait(HOUR)
    life.alarms.resolve("disk/run", "ten fit")
    life.wait(50 * HOUR)
    assert life.messages() == ["open disk/run", "open disk/run", "resolved disk/run"]


def test_a_clock_that_was_ahead_for_years_delays_no_reminder(life: Life) -> None:
    life.alarms.open("disk/run", CRIT, "none fits")
    life.time += 7 * 365 * 24 * HOUR
    life.deliver()
    life.time -= 7 * 365 * 24 * HOUR
    life.wait(50 * HOUR)
    assert life.messages() == ["open disk/run", *3 * ["reminder disk/run"]]


def test_a_reminder_comes_every_day_until_somebody_takes_it(life: Life) -> None:
    life.alarms.open("disk/run", CRIT, "none fits")
    start = life.time
    life.wait(80 * HOUR)
    assert [round((at - start) / HOUR) for at, due in life.sent if due.kind == "reminder"] == [24, 48, 72]
    life.messages()
    life.alarms.acknowledge("disk/run", "ada")
    life.alarms.open("disk/run", CRIT, "less than none fits", revised=True)
    life.wait(80 * HOUR)
    assert life.messages() == [] and [alarm.state for alarm in life.alarms] == ["acknowledged"]
    life.alarms.open("disk/tmp", WARN, "two fit")
    life.alarms.acknowledge("disk/tmp")
    life.alarms.open("disk/tmp", CRIT, "none fits")  # it got worse
    assert life.messages() == ["open disk/tmp", "open disk/tmp"]


def test_what_was_sent_before_it_could_be_written_is_not_sent_again(life: Life) -> None:
    """A run directory that hung: the alarm is entered once it answers, and ends."""
    for hour in ("03", "05"):
        time = f"2026-01-17T{hour}:00:00.000Z"
        life.known["blind/h"] = Alarm("blind/h", CRIT, "open", "no answer", opened=time, changed=time)
        life.deliver()
        life.alarms.enter_sent(life.known["blind/h"])
        life.alarms.resolve("blind/h", "it answers again")
        life.wait(HOUR)
        assert life.messages() == ["open blind/h", "resolved blind/h"]
    assert life.known["blind/h"].count == 2 and [alarm.key for alarm in life.alarms] == []


@pytest.mark.shows("F34")
@pytest.mark.parametrize("severity", [WARN, CRIT])
def test_an_alarm_that_comes_and_goes_is_limited(life: Life, severity: Severity) -> None:
    """Every minute for six hours: up to the limit one by one, the rest in digests; and how it ended."""
    start = life.time
    for _ in range(6 * 60):
        life.alarms.open("pace", severity, "steps take 5% longer")
        life.wait(30)
        life.alarms.resolve("pace")
        life.wait(30)
    hours = Counter(int((at - start) // HOUR) for at, due in life.sent if due.kind != "digest")
    assert hours[0] <= 2 * PER_HOUR and all(number <= 2 * PER_HOUR + 1 for number in hours.values())
    digests = sum(due.kind == "digest" for _, due in life.sent)
    assert 4 <= digests <= (7 if severity is WARN else 6 * 60)
    life.wait(2 * HOUR)
    assert life.sent[-1][1].alarms[0].state == "resolved"
    life.messages()
    life.alarms.open("pace", severity, "steps take 5% longer")
    assert life.messages() == ["open pace"]


def test_a_critical_alarm_waits_a_minute_at_most_in_any_flood(life: Life) -> None:
    for n in range(50):
        life.alarms.open(f"host/{n}", WARN, "memory grows")
    life.wait(60)
    life.messages()
    life.alarms.open("hang", CRIT, "no progress")
    begun = life.time
    life.wait(120)
    told = next(at for at, due in life.sent if any(alarm.key == "hang" for alarm in due.alarms))
    assert told - begun <= 60


def test_many_critical_alarms_are_one_digest_and_those_with_an_own_message_end_with_one(life: Life) -> None:
    """PagerDuty would keep an incident without an end open."""
    life.down = True
    for n in range(64):
        life.alarms.open(f"gpu/{n}", CRIT, "fell off the bus")
    life.down = False
    life.wait(10)
    assert life.messages() == [*(f"open gpu/{n}" for n in range(PER_HOUR)), "digest"]
    life.wait(60)
    for n in range(64):
        life.alarms.resolve(f"gpu/{n}")
    life.wait(61)
    own = [due.alarms[0].key for _, due in life.sent if due.kind == "resolved"]
    assert own == [f"gpu/{n}" for n in range(PER_HOUR)]
    listed = {alarm.key for _, due in life.sent if due.kind == "digest" for alarm in due.alarms}
    assert listed == {f"gpu/{n}" for n in range(PER_HOUR, 64)} and len(life.sent) <= PER_HOUR + 2


def test_a_clock_that_is_set_back_holds_nothing_up(life: Life) -> None:
    for n in range(20):
        life.alarms.open(f"gpu/{n}", CRIT, "fell off the bus")
        life.wait(1)
    life.messages()
    life.time -= 24 * HOUR
    life.alarms.open("hang", CRIT, "no progress")
    life.alarms.open("disk/run", WARN, "two fit")
    life.wait(60)
    assert {"hang", "disk/run"} <= {alarm.key for _, due in life.sent for alarm in due.alarms}


def test_what_came_and_went_while_nothing_got_through_is_told_once(life: Life) -> None:
    life.alarms.open("disk/run", WARN, "two fit")
    life.down = True
    life.alarms.resolve("disk/run")
    life.alarms.open("hang", CRIT, "no progress")
    life.alarms.resolve("hang")
    life.alarms.open("mount/data", WARN, "silent")
    life.alarms.open("mount/data", CRIT, "still silent")
    life.down = False
    life.wait(10)
    assert life.messages() == ["open disk/run", "resolved disk/run", "resolved hang", "open mount/data"]


def test_it_goes_on_after_the_watchdog_was_killed(lives: Callable[..., Life]) -> None:
    """At any time: the same messages as without the kill."""

    def story(die_after: int | None) -> list[str]:
        life = lives()
        for n in range(24):
            if n == die_after:
                life.begin()
            if n % 2:
                life.alarms.resolve("pace")
            else:
                life.alarms.open("pace", WARN, "slow")
                life.alarms.open(f"disk/{n}", WARN, "two fit")
            life.wait(240)
        life.wait(25 * HOUR)
        return life.messages()

    expected = story(None)
    assert {"open", "resolved", "reminder", "digest"} == {each.split()[0] for each in expected}
    for n in range(0, 24, 3):
        assert story(n) == expected


def test_a_new_channel_is_not_told_what_is_over(lives: Callable[..., Life]) -> None:
    """Of a run that had alarms before the channel was configured."""
    life = lives()
    life.down = True
    life.alarms.open("disk/run", WARN, "two fit")
    life.alarms.resolve("disk/run")
    life.alarms.open("hang", CRIT, "no progress")
    (life._path / "told.json").unlink()
    life.begin()
    life.down = False
    life.wait(10)
    assert life.messages() == ["open hang"]
