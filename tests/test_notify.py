"""Messages arrive on every channel, exactly once, with endpoints down, slow or broken, and with killed watchdogs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from endpoint import SECRET, Endpoint
from laboratory import tiny
from sight import until

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.notify import NotifySection
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.hang.collectives import GroupProgress
from fsdp_pretrain.watchdog.hang.rank_monitor import RankMonitor, RankSnapshot
from fsdp_pretrain.watchdog.leader import Leader
from fsdp_pretrain.watchdog.notify import channels, notifier
from fsdp_pretrain.watchdog.notify.alarms import Alarm, Alarms, alarms_file
from fsdp_pretrain.watchdog.notify.message import MessageSender, make_message
from fsdp_pretrain.watchdog.notify.notifier import Notifier, Ping

pytestmark = pytest.mark.quick
INFO, WARN, CRIT = Severity


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of a tenth and less where something that does not come is waited for."""
    monkeypatch.setattr(notifier, "RETRIES", (0.05, 0.05, 0.05, 0.1))
    monkeypatch.setattr(notifier, "_POLL_SECONDS", 0.05)


class Watch:
    """The watchdog's side of notification: alarms, their notifier, passes."""

    def __init__(self, run: Path, environment: dict[str, str], **tables: Any) -> None:
        section = NotifySection.model_validate(tables)
        self.notifier = Notifier(section, RunDir(run), MessageSender("llama-7b", str(run), 3, "n1"), environment)
        self.alarms = Alarms(run / "watchdog/alarms.jsonl", on_change=self.notifier.on_change)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Run passes until a condition holds; its value."""

        def looked() -> Any:
            self.notifier.tick(self.alarms)
            return condition()

        return until(looked, what=lambda: f"what the test expects of {list(self.alarms)}")

    def open(self, key: str) -> str | None:
        return next((alarm.severity.name for alarm in self.alarms if alarm.key == key), None)


def told(run: Path, channel: str) -> dict[str, bool]:
    """Whether it is over, of every alarm that people know of through a channel."""
    path = run / f"watchdog/told/{channel}.json"
    return {key: each["over"] for key, each in json.loads(path.read_text())["told"].items()} if path.exists() else {}


@pytest.mark.shows("F33")
@pytest.mark.parametrize("fault", ["down", "redirect", "hangs"])
@pytest.mark.promise("alarms-arrive")
def test_an_endpoint_that_fails_delays_and_loses_nothing(
    endpoint: Endpoint, quick: None, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Visible as an alarm of the channel, other channels continue, delivered once later."""
    endpoint.answers = 302 if fault == "redirect" else 200
    if fault != "down":
        endpoint.up()
    if fault == "hangs":
        monkeypatch.setattr(channels, "_ANSWER_SECONDS", 0.2)
        endpoint.delay = 0.4
        endpoint.answers = 503  # its final answer, when nobody is waiting
    hook = tmp_path / "hook"
    hook.write_text(
        f"#!/bin/sh\nuntil [ -e {tmp_path}/go ]; do sleep 0.05; done\necho $WD_KEY $WD_STATE >>{tmp_path}/heard\n"
    )
    hook.chmod(0o755)
    url = f"http://127.0.0.1:{endpoint.port}/{SECRET}"
    watch = Watch(tmp_path, {"ALARM_WEBHOOK_URL": url}, webhook=True, command=[str(hook)])
    for n in range(3):
        watch.alarms.open(f"disk/{n}", CRIT, f"disk {n} is full")
    for alarm in list(watch.alarms) * 30:
        watch.notifier.on_change(alarm)  # the same again: nothing to send, and no channel is waited for
    (tmp_path / "go").touch()
    watch.until(lambda: watch.open("notify/webhook") == "WARN")
    assert told(tmp_path, "webhook") == {}
    watch.until(lambda: (tmp_path / "heard").exists() and (tmp_path / "heard").read_text().count("\n") >= 4)
    heard = (tmp_path / "heard").read_text().splitlines()  # reported by another channel, not by itself
    assert heard == ["disk/0 open", "disk/1 open", "disk/2 open", "notify/webhook open"]
    if fault == "down":
        endpoint.up()
    endpoint.answers, endpoint.delay = 200, 0.0
    monkeypatch.setattr(channels, "_ANSWER_SECONDS", 30)
    watch.until(lambda: watch.open("notify/webhook") is None and len(told(tmp_path, "webhook")) == 3)
    watch.notifier.close()
    assert [body["key"] for body in endpoint.bodies()] == ["disk/0", "disk/1", "disk/2"]
    assert SECRET not in "".join(path.read_text() for path in tmp_path.rglob("*.json*"))


@pytest.mark.promise("alarms-arrive")
def test_a_message_that_is_refused_does_not_block_the_others(endpoint: Endpoint, quick: None, tmp_path: Path) -> None:
    endpoint.up()
    endpoint.answers = 400
    watch = Watch(tmp_path, {"SLACK_WEBHOOK_URL": f"http://127.0.0.1:{endpoint.port}/x"}, slack=True)
    watch.alarms.open("hang", CRIT, "no progress")
    watch.until(lambda: any("for good, to: [CRIT] llama-7b" in alarm.summary for alarm in watch.alarms))
    endpoint.answers = 200
    watch.alarms.open("disk/run", CRIT, "full")
    watch.until(lambda: any("disk/run" in body["text"] for body in endpoint.bodies()))
    assert not any("hang" in body["text"] for body in endpoint.bodies())


KILLED = """
import os, sys, time
from pathlib import Path
from fsdp_pretrain.config.notify import NotifySection
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.watchdog.notify.alarms import Alarms, Severity
from fsdp_pretrain.watchdog.notify.message import MessageSender
from fsdp_pretrain.watchdog.notify.notifier import Notifier
run = Path(sys.argv[1])
section = NotifySection.model_validate({"webhook": True})
notifier = Notifier(section, RunDir(run), MessageSender("llama-7b", str(run)))
alarms = Alarms(run / "watchdog/alarms.jsonl", on_change=notifier.on_change)
for n in range(3):
    alarms.open(f"disk/{n}", Severity.CRIT, "full")
time.sleep(1)
Alarms(run / "watchdog/alarms.jsonl", on_change=lambda _: None).open("hang", Severity.CRIT, "in the last moment")
os.kill(os.getpid(), 9)
"""


@pytest.mark.shows("F33")
@pytest.mark.promise("alarms-arrive")
def test_a_killed_watchdog_leaves_its_messages_to_the_next(
    endpoint: Endpoint, quick: None, tmp_path: Path, helpers: Any
) -> None:
    """Killed with the endpoint down; also what it had no time to hand over."""
    url = f"http://127.0.0.1:{endpoint.port}/x"
    environment = helpers.environment(ALARM_WEBHOOK_URL=url)
    script = [sys.executable, "-c", KILLED, str(tmp_path)]
    assert subprocess.run(script, env=environment).returncode == -signal.SIGKILL
    endpoint.up()
    keys = ["disk/0", "disk/1", "disk/2", "hang"]
    for _ in range(2):  # and the one after the next repeats nothing
        watch = Watch(tmp_path, {"ALARM_WEBHOOK_URL": url}, webhook=True)
        watch.until(lambda: len(endpoint.requests) >= len(keys))
        watch.notifier.close()
    assert sorted(body["key"] for body in endpoint.bodies()) == sorted(keys)
    assert sorted(told(tmp_path, "webhook")) == sorted(keys)


def test_a_digest_of_a_flood_fits_a_message() -> None:
    news = [Alarm(f"gpu/{n:03}", WARN, "open", "hot", changed="t") for n in range(300)]
    digest = make_message("digest", news, MessageSender("llama-7b", "/runs/7b"))
    assert digest.title == "[digest] llama-7b · news of 300 alarms, in one message"
    assert len(digest.lines) == 51 and digest.lines[-1] == "and 250 more: fsdp-pretrain alarms /runs/7b --all"


def test_what_a_message_says(endpoint: Endpoint, quick: None, tmp_path: Path) -> None:
    """Words to people, facts to programs."""
    endpoint.up()
    environment = {
        name: f"http://127.0.0.1:{endpoint.port}/{name}" for name in ("SLACK_WEBHOOK_URL", "ALARM_WEBHOOK_URL")
    }
    watch = Watch(tmp_path, environment, slack=True, webhook=True)
    more = {"effect": "a crash now loses it", "remedy": "free <space>", "action": "asked for a save"}
    watch.alarms.open("checkpoint-age", CRIT, "3h12m, 2.6x the interval", step=41_200, facts={"tokens": 7}, **more)
    watch.until(lambda: len(endpoint.requests) == 2)
    _, headers, body = next(each for each in endpoint.requests if "ALARM" in each[0])
    content, text = json.loads(body), next(each["text"] for each in endpoint.bodies() if "text" in each)
    lines = text.splitlines()
    assert lines[0] == "*[CRIT] llama-7b · checkpoint-age: 3h12m, 2.6x the interval · step 41,200*"
    assert lines[1].startswith("since: 20") and lines[1].endswith("UTC")
    assert lines[2:5] == [
        "meaning: a crash now loses it",
        "the watchdog: asked for a save",
        "to do: free &lt;space&gt;",
    ]
    assert lines[5] == f"acknowledge: fsdp-pretrain alarms {tmp_path} ack checkpoint-age"
    expected = {
        "schema": 1, "key": "checkpoint-age", "detector": "checkpoint-age", "severity": "CRIT", "state": "open",
        "run": "llama-7b", "segment": 3, "host": "n1", "step": 41_200, "facts": {"tokens": 7},
    }  # fmt: skip
    assert {key: content[key] for key in expected} == expected and headers["Idempotency-Key"] == content["id"]


def test_a_message_about_a_thousand_ranks_fits_its_receiver(
    endpoint: Endpoint, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PagerDuty takes 512 KB, others less. What is left out is in `alarms.jsonl`."""
    endpoint.up()
    url = f"http://127.0.0.1:{endpoint.port}"
    monkeypatch.setitem(channels._PAGERDUTY, "eu", f"{url}/v2/enqueue")
    hook, note = tmp_path / "hook", tmp_path / "note"
    hook.write_text(f"#!/bin/sh\ncat >{note}.new\nmv {note}.new {note}\n")
    hook.chmod(0o755)
    secrets = {"PAGERDUTY_ROUTING_KEY": SECRET, "SLACK_WEBHOOK_URL": f"{url}/s", "ALARM_WEBHOOK_URL": f"{url}/w"}
    watch = Watch(tmp_path, secrets, pagerduty="eu", slack=True, webhook=True, command=[str(hook)])
    groups = tuple(GroupProgress(f"0:{n}", f"mesh {n}", 1000, 70, -1, 69, "all_gather", "[4096]") for n in range(4))
    ranks = [
        asdict(RankSnapshot(rank, "n", 1, 7, "compute", 9, 600.0, "S", False, "nccl", "x.py:1", ("x",), "", groups))
        for rank in range(1000)
    ]
    verdict = {"verdict": "stuck", "suspects": [417], "hosts": ["n52"], "seconds": 600.0}
    watch.alarms.open("hang", CRIT, "rank 417 is stuck", facts={**verdict, "ranks": ranks})
    watch.until(lambda: len(endpoint.requests) == 3 and note.exists())
    bodies = [body for _, _, body in endpoint.requests] + [note.read_bytes()]
    assert max(map(len, bodies)) < 64 * 1024 and all(b"rank 417 is stuck" in body for body in bodies)
    contents = [json.loads(body) for body in bodies]
    told = [each.get("facts") or each["payload"]["custom_details"]["facts"] for each in contents if "text" not in each]
    left_out = f"ranks: see {tmp_path}/watchdog/alarms.jsonl"
    assert len(told) == 3 and all(facts == {**verdict, "left_out": left_out} for facts in told)
    assert next(iter(watch.alarms)).facts["ranks"] == ranks


def test_pagerduty_opens_and_closes_one_incident(
    endpoint: Endpoint, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.up()
    monkeypatch.setitem(channels._PAGERDUTY, "eu", f"http://127.0.0.1:{endpoint.port}/v2/enqueue")
    watch = Watch(tmp_path, {"PAGERDUTY_ROUTING_KEY": SECRET}, pagerduty="eu")
    watch.alarms.open("pace", WARN, "5% slower")
    watch.alarms.open("hang", CRIT, "no progress")
    watch.until(lambda: len(endpoint.requests) == 1)
    watch.alarms.resolve("hang")
    watch.until(lambda: len(endpoint.requests) == 2)
    bodies = endpoint.bodies()
    assert [body["event_action"] for body in bodies] == ["trigger", "resolve"]
    assert {body["dedup_key"] for body in bodies} == {"llama-7b/hang"}
    assert {body["routing_key"] for body in bodies} == {SECRET} and bodies[0]["payload"]["severity"] == "critical"


def test_a_command_has_ten_seconds_and_its_children_with_it(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_COMMAND_SECONDS", 2.0)
    hook = tmp_path / "hook"
    hook.write_text(
        f"#!/bin/sh\ncat >{tmp_path}/note\nenv | grep ^WD_ >{tmp_path}/env\nsleep 60 & echo $! >{tmp_path}/pid\nwait\n"
    )
    hook.chmod(0o755)
    watch = Watch(tmp_path, {}, command=[str(hook)])
    watch.alarms.open("hang", CRIT, "no progress", step=12)
    watch.until(lambda: watch.open("notify/command"))
    note = json.loads((tmp_path / "note").read_text())
    environment = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    expected = {"WD_KEY": "hang", "WD_SEVERITY": "CRIT", "WD_STATE": "open", "WD_STEP": "12", "WD_RUN": "llama-7b"}
    assert {**environment, **expected} == environment and note["key"] == "hang"
    problem = next(alarm for alarm in watch.alarms if alarm.key == "notify/command").summary
    assert "took longer than 2s" in problem
    child = int((tmp_path / "pid").read_text())
    watch.until(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text())
    hook.write_text("#!/bin/sh\nexit 3\n")
    watch.until(lambda: "exit status 3" in next(a for a in watch.alarms if a.key == "notify/command").summary)
    watch.notifier.close()


def test_what_a_command_left_running_may_finish(quick: None, tmp_path: Path) -> None:
    """As `mail`, which leaves the delivery to a child."""
    (hook := tmp_path / "hook").write_text(f"#!/bin/sh\n(sleep 0.5; touch {tmp_path}/delivered) &\n")
    hook.chmod(0o755)
    watch = Watch(tmp_path, {}, command=[str(hook)])
    watch.alarms.open("hang", CRIT, "no progress")
    watch.until(lambda: told(tmp_path, "command"))
    watch.notifier.close()
    assert until((tmp_path / "delivered").exists)


def test_channels_that_work_again_or_are_not_used_any_more_have_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the start on, and no message says otherwise."""
    run, key = RunDir(tmp_path / "run"), "notify"
    run.new_segment()

    def opened(**tables: Any) -> list[str]:
        config = Config.model_validate(tiny("x", run.path, "/nowhere", watchdog={"notify": tables}))
        leader = Leader(config, RankMonitor(range(1), run.path / "pages", os.getpid()), 1)
        leader.end_pass([])
        leader.close()
        return leader.alarms.open_keys()

    assert opened(webhook=True, slack=True) == [key]
    known = Alarms(alarms_file(run), lambda _: None)
    known.open("notify/slack", Severity.WARN, "messages do not get through: 503")
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\necho $WD_KEY $WD_STATE >>{tmp_path}/heard\n")
    hook.chmod(0o755)
    assert opened(command=[str(hook)]) == []
    assert not (tmp_path / "heard").exists() or "open" not in (tmp_path / "heard").read_text()


@pytest.mark.parametrize(
    ("tables", "environment", "says"),
    [
        ({"slack": True}, {}, "SLACK_WEBHOOK_URL is not set"),
        ({"slack": True}, {"SLACK_WEBHOOK_URL": SECRET}, "SLACK_WEBHOOK_URL does not hold a URL"),
        ({"webhook": True}, {"ALARM_WEBHOOK_URL": f"ftp://x/{SECRET}"}, "does not hold a URL"),
        ({"pagerduty": "us"}, {}, "PAGERDUTY_ROUTING_KEY is not set"),
        ({"command": ["no-such-program"]}, {}, "no program no-such-program"),
        ({"ping": True}, {}, "WATCHDOG_PING_URL is not set"),
    ],
)
def test_what_cannot_work_is_refused_at_start(
    tmp_path: Path, tables: Any, environment: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        Watch(tmp_path, environment, **tables)
    assert says in str(refusal.value) and SECRET not in str(refusal.value)


@pytest.mark.shows("F48")
@pytest.mark.parametrize(
    "given",
    [f'slack="https://x/{SECRET}"', f'metrics="{SECRET}@h"'],
)
def test_a_secret_in_the_configuration_is_refused_and_not_shown(run_command: Any, helpers: Any, given: str) -> None:
    config = helpers.root / "configs/runs/quickstart.toml"
    done = run_command("fsdp_pretrain.cli", "plan", config, f"watchdog.notify.{given}")
    assert done.returncode == 78 and f"watchdog.notify.{given.partition('=')[0].partition('.')[0]}" in done.stderr
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.shows("F48")
@pytest.mark.promise("secrets")
def test_a_secret_is_nowhere(endpoint: Endpoint, tmp_path: Path, run_command: Any, constants: Any) -> None:
    """Not in the record, what commands print, or a process list, while sending works and fails."""
    run = make_run(tmp_path, "slack=true", "pagerduty='us'", f'command=["{tmp_path}/hook"]')
    (tmp_path / "hook").write_text(
        f"#!/bin/sh\ncat /proc/*/cmdline 2>/dev/null | tr '\\0' ' ' >{tmp_path}/processes\ncat >{tmp_path}/note\n"
    )
    (tmp_path / "hook").chmod(0o755)
    endpoint.up()
    secrets = {
        "SLACK_WEBHOOK_URL": f"http://127.0.0.1:{endpoint.port}/services/{SECRET}",
        "PAGERDUTY_ROUTING_KEY": SECRET,
    }
    constants("fsdp_pretrain.watchdog.notify.channels", _PAGERDUTY={"us": "http://127.0.0.1:1/x"})
    done = run_command("fsdp_pretrain.cli", "alarms", run, "test", "--json", **secrets)
    rows = {row["channel"]: row["problem"] for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 1 and rows["slack"] is None and rows["command"] is None
    assert rows["pagerduty"] == "127.0.0.1: Connection refused"
    endpoint.answers = 404
    again = run_command("fsdp_pretrain.cli", "alarms", run, "test", **secrets)
    assert "slack      failed: 127.0.0.1 answered 404" in again.stdout
    assert endpoint.requests[0][0].endswith(SECRET)  # it was used
    output = done.stdout + done.stderr + again.stdout + again.stderr
    assert SECRET not in output + (tmp_path / "processes").read_text() + (tmp_path / "note").read_text()
    assert not [path for path in run.rglob("*") if path.is_file() and SECRET in path.read_text()]


def make_run(path: Path, *tables: str) -> Path:
    """A run directory with the configuration of a run that has these tables of `watchdog.notify`."""
    from fsdp_pretrain.config.config import load

    root = Path(__file__).resolve().parent.parent
    overrides = [f"watchdog.notify.{table}" for table in tables]
    (path / "run/segments").mkdir(parents=True)
    (path / "run/config.toml").write_text(load(root / "configs/runs/quickstart.toml", overrides).to_toml())
    return path / "run"


def test_the_dead_mans_switch_is_held_only_while_it_sees(endpoint: Endpoint, quick: None) -> None:
    endpoint.up()
    ping = Ping({"WATCHDOG_PING_URL": f"http://127.0.0.1:{endpoint.port}/ping"})
    for now in range(500):
        ping.on_pass(observed=False, now=now)
    for now, seen in ((1000, 1), (1059, 1), (1060, 2), (1119, 2), (1121, 3)):
        ping.on_pass(observed=True, now=now)
        until(lambda seen=seen: endpoint.seen >= seen, what=f"a ping at {now}")
        assert endpoint.seen == seen
    endpoint.down()
    ping.on_pass(observed=True, now=2000)  # nobody there: no effect
