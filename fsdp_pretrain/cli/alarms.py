"""`fsdp-pretrain alarms`, `ack`, `mute`, `notify`: alarm handling by operators."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from fsdp_pretrain.console import JSON, CommandLine, argument, verb
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.record.arguments import RUN, seconds
from fsdp_pretrain.record.files import age
from fsdp_pretrain.units import Pause, human_time

if TYPE_CHECKING:
    from fsdp_pretrain.watchdog.notify.alarms import Alarm
    from fsdp_pretrain.watchdog.notify.channels import Channel
    from fsdp_pretrain.watchdog.notify.message import MessageSender

_LONGEST_WINDOW = 366 * 86_400.0
_EXAMPLE = "runs/quickstart/run"


def add(command: CommandLine) -> None:
    """Add the verbs."""
    command.add(_alarms, _ack, _mute, _notify)


def _window(text: str) -> float:
    if (found := seconds(text, Pause)) > _LONGEST_WINDOW:
        raise argparse.ArgumentTypeError(f"{text!r} is more than a year")
    return found


@verb("alarms", _EXAMPLE, RUN, argument("--all", action="store_true", help="also those that are over"), JSON)
def _alarms(args: argparse.Namespace) -> int:
    """The alarms of a run that are open. Exit 0 none, 1 warnings, 2 critical ones."""
    from fsdp_pretrain.severity import Severity
    from fsdp_pretrain.watchdog.notify.alarms import read_alarms
    from fsdp_pretrain.watchdog.notify.operator import alarms_file, muted_until

    known = read_alarms(alarms_file(args.run))
    open_ones = [alarm for alarm in known if alarm.state != "resolved"]
    shown = sorted(known if args.all else open_ones, key=lambda alarm: (alarm.state == "resolved", -alarm.severity))
    for alarm in shown:
        print(json.dumps(alarm.to_json()) if args.json else _render(alarm))
    if not args.json:
        if not shown:
            print("no alarm" if args.all else "no open alarm")
        if (until := muted_until(args.run)) > time.time():
            print(f"muted for {human_time(until - time.time())} more")
    return int(max((alarm.severity for alarm in open_ones), default=Severity.INFO))


def _render(alarm: Alarm) -> str:
    step = f", step {alarm.step:_}" if alarm.step is not None else ""
    count = f", {alarm.count} times" if alarm.count > 1 else ""
    opened = f"opened {human_time(age(alarm.opened))} ago"
    head = f"{alarm.severity.name:4} {alarm.state:12} {alarm.key}  ({opened}{count}{step})"
    lines = [head, f"     {alarm.summary}"]
    for name, text in (("meaning", alarm.effect), ("the watchdog", alarm.action), ("to do", alarm.remedy)):
        if text and alarm.state != "resolved":
            lines.append(f"     {name}: {text}")
    return "\n".join(lines)


@verb("ack", f"{_EXAMPLE} disk/run", RUN, argument("key", help="of the alarm, as `fsdp-pretrain alarms` shows it"))
def _ack(args: argparse.Namespace) -> int:
    """Acknowledge an alarm: you take it, and no reminders are sent. It is sent again if it gets worse."""
    from fsdp_pretrain.watchdog.notify.operator import acknowledge

    acknowledge(args.run, args.key)
    print(f"the watchdog acknowledges {args.key} within seconds, or when the run starts again")
    return 0


@verb(
    "mute",
    f'{_EXAMPLE} 2h "new firmware on the switches"',
    RUN,
    argument("duration", type=_window, help="such as 30min or 2h; 0h ends the window"),
    argument("reason", nargs="?", default="", help="for the chronicle; required to begin"),
)
def _mute(args: argparse.Namespace) -> int:
    """A maintenance window: alarms are written down and not sent. What is open at its end is sent then."""
    from fsdp_pretrain.watchdog.notify.operator import mute

    if args.duration and not args.reason:
        raise ConfigError("a maintenance window needs a reason", remedy='fsdp-pretrain mute RUN 2h "why"')
    until = mute(args.run, args.duration, args.reason)
    print(f"alarms are not sent until {until}" if args.duration else "alarms are sent again")
    return 0


@verb(
    "notify",
    f"{_EXAMPLE} --test",
    RUN,
    argument("--test", action="store_true", help="really send; secrets come from your environment"),
    JSON,
)
def _notify(args: argparse.Namespace) -> int:
    """Check the channels of a run; with --test send a test message through each. Exit 1 if one fails."""
    from tqdm import tqdm

    from fsdp_pretrain.config.resume_rules import load_recorded
    from fsdp_pretrain.watchdog.notify.channels import make_channels
    from fsdp_pretrain.watchdog.notify.message import MessageSender

    config = load_recorded(args.run.config)
    channels = make_channels(config.watchdog.notify)
    if not channels:
        raise ConfigError("no channel is configured", remedy="add a [watchdog.notify.slack] table, see docs/alarms.md")
    problems: list[str | None] = [None] * len(channels)
    if args.test:
        sender = MessageSender(config.run.name, str(args.run.path))
        problems = [_try(channel, sender) for channel in tqdm(channels, desc="sending", delay=2, disable=None)]
    for channel, problem in zip(channels, problems, strict=True):
        row = {"channel": channel.name, "least": channel.least.name, "problem": problem}
        result = (f"failed: {problem}" if problem else "delivered") if args.test else "ready"
        print(json.dumps(row) if args.json else f"{row['channel']:10} from {row['least']:5} {result}")
    return int(any(problems))


def _try(channel: Channel, sender: MessageSender) -> str | None:
    from fsdp_pretrain.watchdog.notify.channels import DeliveryError
    from fsdp_pretrain.watchdog.notify.message import test_message

    try:
        channel.send(test_message(sender, "open"))
        channel.send(test_message(sender, "resolved"))
    except DeliveryError as error:
        return str(error)
    return None
