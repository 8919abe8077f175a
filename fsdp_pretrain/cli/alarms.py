"""`fsdp-pretrain alarms`: what is open, acknowledging it, and a test of the channels."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fsdp_pretrain.console import JSON, argument, as_json, verb
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run.arguments import RUN
from fsdp_pretrain.run.files import age
from fsdp_pretrain.units import human_time

from .views import RUN_OR_URL

if TYPE_CHECKING:
    from fsdp_pretrain.watchdog.notify.alarms import Alarm
    from fsdp_pretrain.watchdog.notify.channels import Channel
    from fsdp_pretrain.watchdog.notify.message import MessageSender

_EXAMPLE = "runs/quickstart/run"
_KEY = "of the alarm, as the list shows it"


@verb(
    "alarms",
    _EXAMPLE,
    RUN_OR_URL,
    argument("action", nargs="?", choices=("list", "ack", "test"), default="list", help="default: list"),
    argument("key", nargs="?", help=f"ack: {_KEY}"),
    argument("--all", action="store_true", help="list: also those that are over"),
    JSON,
)
def alarms(args: argparse.Namespace) -> int:
    """The alarms of a run. `list` shows those that are open, and exits with 0 for none, 1 for warnings, 2 for critical
    ones; `ack` acknowledges one: you take it, no reminders are sent, and it is sent again if it gets worse; `test`
    sends a message through every channel, with the secrets of your environment, and exits with 1 if one fails."""
    if (args.key is not None) != (args.action == "ack") or (args.all and args.action != "list"):
        raise ConfigError("`ack` needs the key of an alarm, which belongs to no other action; --all is for `list`")
    if args.action != "list" and args.run.fetched:
        raise ConfigError("a copy of a run is only looked at", remedy="go to the machine with the run directory")
    return {"list": _list, "ack": _acknowledge, "test": _test}[args.action](args)


@verb("ack", f"{_EXAMPLE} disk/run", RUN, argument("key", help=_KEY))
def ack(args: argparse.Namespace) -> int:
    """Acknowledge an alarm, as `alarms RUN ack` does."""
    return _acknowledge(args)


def _list(args: argparse.Namespace) -> int:
    from fsdp_pretrain.severity import Severity
    from fsdp_pretrain.watchdog.notify.alarms import alarms_file, read_alarms

    recorded = read_alarms(alarms_file(args.run))
    open_ones = [alarm for alarm in recorded if alarm.state != "resolved"]
    shown = sorted(recorded if args.all else open_ones, key=lambda alarm: (alarm.state == "resolved", -alarm.severity))
    for alarm in shown:
        print(as_json(alarm.to_json(), indent=None) if args.json else _render(alarm))
    if not shown and not args.json:
        print("no alarm" if args.all else "no open alarm")
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


def _acknowledge(args: argparse.Namespace) -> int:
    from fsdp_pretrain.watchdog.notify.alarms import acknowledge

    acknowledge(args.run, args.key)
    print(f"the watchdog acknowledges {args.key} within seconds, or when the run starts again")
    return 0


def _test(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from fsdp_pretrain.config.resume_rules import load_recorded
    from fsdp_pretrain.watchdog.notify.channels import make_channels
    from fsdp_pretrain.watchdog.notify.message import MessageSender

    config = load_recorded(args.run.config)
    channels = make_channels(config.watchdog.notify)
    if not channels:
        raise ConfigError("no channel is configured", remedy="set watchdog.notify.slack = true, see docs/alarms.md")
    sender = MessageSender(config.run.name, str(args.run.path))
    problems = [_try(channel, sender) for channel in tqdm(channels, desc="sending", delay=2, disable=None)]
    for channel, problem in zip(channels, problems, strict=True):
        result = f"failed: {problem}" if problem else "delivered"
        print(
            as_json({"channel": channel.name, "problem": problem}, indent=None)
            if args.json
            else f"{channel.name:10} {result}"
        )
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
