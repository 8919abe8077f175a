"""Notification channels: Slack, a webhook, PagerDuty, a command.

A channel sends one message or raises `DeliveryError`. Error texts can be shown to anybody: they hold no URL (the host
at most), key or server response.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fsdp_pretrain.config.notify import NotifySection
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.processes import NoAnswerError, run_program
from fsdp_pretrain.severity import Severity

from .message import Message

_ANSWER_SECONDS = 30.0
"""Time limit of connecting and of every response; long, because retrying a delivered request delivers it twice."""
_COMMAND_SECONDS = 10.0
_PAGERDUTY = {
    "us": "https://events.pagerduty.com/v2/enqueue",
    "eu": "https://events.eu.pagerduty.com/v2/enqueue",
}
_REFUSED = frozenset({400, 413, 415, 422})
"""HTTP status codes that reject the message itself."""


class DeliveryError(Exception):
    """A message was not delivered. The text is safe to show; `refused`: the receiver will never take this message, but
    may take others."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


Send = Callable[[Message], None]
"""Delivers a message, or raises DeliveryError. May take half a minute."""


@dataclass(frozen=True)
class Channel:
    """A channel: its key in the configuration, how to send, and the minimum severity that is sent."""

    name: str
    send: Send
    least: Severity = Severity.WARN

    @property
    def key(self) -> str:
        """The key of the alarm that deliveries fail."""
        return f"notify/{self.name}"


def make_channels(section: NotifySection, environment: Mapping[str, str] = os.environ) -> list[Channel]:
    """The configured channels, with the secrets of the environment. Raises a ConfigError that lists every secret that
    is missing, and a missing program."""
    channels: list[Channel] = []
    problems: list[str] = []
    for name, value in section:
        if not value or name == "metrics":
            continue
        try:
            if name == "ping":
                ping_url(environment)
            else:
                least = Severity.CRIT if name == "pagerduty" else Severity.WARN
                channels.append(Channel(name, _MAKERS[name](value, environment), least))
        except ValueError as error:
            problems.append(f"watchdog.notify.{name}: {error}")
    if problems:
        raise ConfigError(
            "\n".join(["nobody could be notified of alarms:", *(f"  - {problem}" for problem in problems)]),
            remedy="correct it, or remove the channel from the configuration",
        )
    return channels


def ping_url(environment: Mapping[str, str]) -> str:
    """The URL of the dead man's switch. Raises ValueError."""
    return _url("WATCHDOG_PING_URL", environment)


# ---------------------------------------------------------------------- the channels; ValueError if one cannot work


def _slack(_: bool, environment: Mapping[str, str]) -> Send:
    url = _url("SLACK_WEBHOOK_URL", environment)

    def send(message: Message) -> None:
        """POST the message with a bold title."""
        text = "\n".join([f"*{message.title}*", *message.lines])
        _post(url, {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")})

    return send


def _webhook(_: bool, environment: Mapping[str, str]) -> Send:
    url = _url("ALARM_WEBHOOK_URL", environment)
    return lambda message: _post(url, message.to_json(), {"Idempotency-Key": message.id})


def _pagerduty(region: str, environment: Mapping[str, str]) -> Send:
    """PagerDuty's Events API v2, where run and key of the alarm identify the incident."""
    url, routing_key = _PAGERDUTY[region], _secret("PAGERDUTY_ROUTING_KEY", environment)

    def send(message: Message) -> None:
        """Trigger or resolve the incident."""
        sender, alarm = message.sender, message.alarm
        event: dict[str, object] = {"routing_key": routing_key, "dedup_key": f"{sender.run}/{alarm.key}"}
        if message.kind == "resolved":
            _post(url, {**event, "event_action": "resolve"})
            return
        payload = {
            "summary": message.title[:1024],
            "source": sender.host,
            "severity": "critical",
            "component": sender.run,
            "class": alarm.detector,
            "timestamp": alarm.changed,
            "custom_details": {"text": "\n".join(message.lines), "step": alarm.step, "facts": alarm.facts},
        }
        _post(url, {**event, "event_action": "trigger", "payload": payload})

    return send


def _command(argv: list[str], _: Mapping[str, str]) -> Send:
    """A program that gets JSON on standard input and the main facts in its environment."""
    program, names = argv[0], "key severity state kind run step host summary title id".split()
    if shutil.which(program) is None:
        raise ValueError(f"there is no program {program}")

    def send(message: Message) -> None:
        """Run the command, at most for some seconds."""
        content = message.to_json()
        facts = {f"WD_{name.upper()}": str(content[name]) for name in names if content[name] is not None}
        variables = {**os.environ, **facts, "WD_TEXT": "\n".join(message.lines)}
        try:
            done = run_program(
                argv,
                _COMMAND_SECONDS,
                text=json.dumps(content).encode(),
                environment=variables,
                spare_children=True,  # `mail` may leave the delivery to one
            )
        except NoAnswerError:
            raise DeliveryError(f"{program} took longer than {_COMMAND_SECONDS:g}s") from None
        except OSError as error:
            raise DeliveryError(f"{program} cannot be started: {error.strerror}") from None
        if done.returncode:
            raise DeliveryError(f"{program} ended with exit status {done.returncode}")

    return send


_MAKERS: dict[str, Callable[[Any, Mapping[str, str]], Send]] = {
    "slack": _slack,
    "webhook": _webhook,
    "pagerduty": _pagerduty,
    "command": _command,
}


# ---------------------------------------------------------------------- secrets, requests


def _secret(variable: str, environment: Mapping[str, str]) -> str:
    """A secret. Raises ValueError, which does not contain it."""
    value = environment.get(variable, "").strip()
    if not value:
        raise ValueError(f"the environment variable {variable} is not set")
    return value


def _url(variable: str, environment: Mapping[str, str]) -> str:
    value = _secret(variable, environment)
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and parts.hostname and not any(c.isspace() for c in value)
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{variable} does not hold a URL that begins with https:// or http://")
    return value


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a POST becomes a GET, often of a log-in page, whose 200 would look like a delivery."""

    def redirect_request(self, *args: Any) -> None:
        return None


def fetch(url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> None:
    """GET a URL, or POST a body to it, through the proxies of the environment. Raises DeliveryError."""
    host = urlsplit(url).hostname
    request = urllib.request.Request(url, data=body, headers={"User-Agent": "fsdp-pretrain", **(headers or {})})
    try:
        urllib.request.build_opener(_NoRedirect).open(request, timeout=_ANSWER_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()
        raise DeliveryError(f"{host} answered {error.code}", refused=error.code in _REFUSED) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DeliveryError(f"{host}: {_reason(error)}") from None


def _post(url: str, content: object, headers: Mapping[str, str] | None = None) -> None:
    """POST JSON. Raises DeliveryError."""
    fetch(url, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})


def _reason(error: BaseException) -> str:
    """The cause of a failed request, in words that cannot contain a part of a URL."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return _reason(error.reason)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}"
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return error.strerror
    return type(error).__name__
