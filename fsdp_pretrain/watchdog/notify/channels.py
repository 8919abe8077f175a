"""Notification channels: Slack, a webhook, PagerDuty, mail, a command. Standard library only, no torch.

A channel sends one message or raises `DeliveryError`. Error texts can be shown to anybody: they hold no URL (the host
at most), key or server response.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import smtplib
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import EmailMessage
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fsdp_pretrain.config.notify import (
    ChannelSection,
    CommandSection,
    EmailSection,
    NotifySection,
    PagerDutySection,
    PingSection,
    SlackSection,
    WebhookSection,
)
from fsdp_pretrain.deadline import NoAnswerError, run_program
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.severity import Severity

from .message import Message

_ANSWER_SECONDS = 30.0
"""To connect, and for every answer. Long: retrying a request that got through delivers it twice."""
_COMMAND_SECONDS = 10.0
_REFUSED = frozenset({400, 413, 415, 422})
"""Status codes that blame the message, not the connection."""


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
    """A channel: the name of its table in the configuration, the minimum severity that is sent, and how."""

    name: str
    least: Severity
    send: Send


def make_channels(section: NotifySection, environment: Mapping[str, str] = os.environ) -> list[Channel]:
    """The configured channels, with the secrets of the environment.

    Raises:
        ConfigError: lists every secret that is missing or readable by others, and every missing program.
    """
    found: list[Channel] = []
    problems: list[str] = []
    for name, table in section:
        try:
            if isinstance(table, PingSection):
                ping_url(table, environment)
            elif isinstance(table, ChannelSection):
                found.append(Channel(name, Severity[table.least], _MAKERS[type(table)](table, environment)))
        except ValueError as error:
            problems.append(f"watchdog.notify.{name}: {error}")
    if problems:
        raise ConfigError(
            "\n".join(["nobody could be notified of alarms:", *(f"  - {problem}" for problem in problems)]),
            remedy="correct it, or remove the channel's table from the configuration",
        )
    return found


def ping_url(section: PingSection, environment: Mapping[str, str]) -> str:
    """The URL of the dead man's switch. Raises ValueError."""
    return _url("WATCHDOG_PING_URL", section.url_file, environment)


# ---------------------------------------------------------------------- the channels; ValueError if one cannot work


def _slack(section: SlackSection, environment: Mapping[str, str]) -> Send:
    url = _url("SLACK_WEBHOOK_URL", section.url_file, environment)

    def send(message: Message) -> None:
        """With a bold title."""
        text = "\n".join([f"*{message.title}*", *message.lines])
        _post(url, {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")})

    return send


def _webhook(section: WebhookSection, environment: Mapping[str, str]) -> Send:
    url = _url("ALARM_WEBHOOK_URL", section.url_file, environment)
    return lambda message: _post(url, message.to_json(), {"Idempotency-Key": message.id})


def _pagerduty(section: PagerDutySection, environment: Mapping[str, str]) -> Send:
    """Events API v2: run and key of the alarm identify the incident."""
    routing_key = _secret("PAGERDUTY_ROUTING_KEY", section.key_file, environment)

    def send(message: Message) -> None:
        """Trigger, acknowledge or resolve."""
        action = {"resolved": "resolve", "acknowledged": "acknowledge"}.get(message.kind, "trigger")
        sender, alarm = message.sender, message.alarm
        event: dict[str, object] = {
            "routing_key": routing_key,
            "event_action": action,
            "dedup_key": f"{sender.run}/{alarm.key}",
        }
        if action == "trigger":
            event["payload"] = {
                "summary": message.title[:1024],
                "source": sender.host,
                "severity": {"INFO": "info", "WARN": "warning", "CRIT": "critical"}[alarm.severity.name],
                "component": sender.run,
                "class": alarm.detector,
                "timestamp": alarm.changed,
                "custom_details": {"text": "\n".join(message.lines), "step": message.step, "facts": alarm.facts},
            }
        _post(section.url, event)

    return send


def _email(section: EmailSection, environment: Mapping[str, str]) -> Send:
    """Mail by SMTP. The Message-ID is the message's, so that duplicates are recognised."""
    where = urlsplit(section.server)
    host, port, user = where.hostname or "", where.port or 0, where.username
    password = _secret("SMTP_PASSWORD", section.password_file, environment) if user else ""

    def connect() -> smtplib.SMTP:
        """Connected and logged in. A password goes to a verified server only."""
        if where.scheme == "smtps":
            secure = ssl.create_default_context()
            server: smtplib.SMTP = smtplib.SMTP_SSL(host, port, timeout=_ANSWER_SECONDS, context=secure)
        else:
            server = smtplib.SMTP(host, port, timeout=_ANSWER_SECONDS)
            if user:
                server.starttls(context=ssl.create_default_context())
        if user:
            server.login(user, password)
        return server

    def send(message: Message) -> None:
        """One mail."""
        mail = EmailMessage()
        mail["Subject"], mail["From"], mail["To"] = message.title, section.sender, ", ".join(section.to)
        mail["Message-ID"] = f"<{message.id}@fsdp-pretrain>"
        mail["Auto-Submitted"] = "auto-generated"
        mail.set_content("\n".join(message.lines) + "\n")
        try:
            with contextlib.closing(connect()) as server:
                server.send_message(mail)
        except smtplib.SMTPResponseException as error:
            raise DeliveryError(f"{host} answered {error.smtp_code}") from None
        except (smtplib.SMTPException, OSError) as error:
            raise DeliveryError(f"{host}: {_reason(error)}") from None

    return send


def _command(section: CommandSection, environment: Mapping[str, str]) -> Send:
    """JSON on standard input, the main facts in the environment."""
    del environment
    program, names = section.argv[0], "key severity state kind run step host summary title id".split()
    if shutil.which(program) is None:
        raise ValueError(f"there is no program {program}")

    def send(message: Message) -> None:
        """Run the command, at most for some seconds."""
        content = message.to_json()
        facts = {f"WD_{name.upper()}": str(content[name]) for name in names if content[name] is not None}
        text, variables = json.dumps(content).encode(), {**os.environ, **facts}
        try:
            done = run_program(section.argv, _COMMAND_SECONDS, text=text, environment=variables)
        except NoAnswerError:
            raise DeliveryError(f"{program} took longer than {_COMMAND_SECONDS:g}s") from None
        except OSError as error:
            raise DeliveryError(f"{program} cannot be started: {error.strerror}") from None
        if done.returncode:
            raise DeliveryError(f"{program} ended with exit status {done.returncode}")

    return send


_MAKERS: dict[type, Callable[[Any, Mapping[str, str]], Send]] = {
    SlackSection: _slack,
    WebhookSection: _webhook,
    PagerDutySection: _pagerduty,
    EmailSection: _email,
    CommandSection: _command,
}


# ---------------------------------------------------------------------- secrets, requests


def _secret(variable: str, file: Path | None, environment: Mapping[str, str]) -> str:
    """A secret from its file, or else its variable. Raises ValueError, which does not contain it."""
    if file is None:
        value = environment.get(variable, "").strip()
        if not value:
            raise ValueError(f"the environment variable {variable} is not set")
        return value
    try:
        if file.stat().st_mode & 0o077:
            raise ValueError(f"{file} can be read by others; chmod 600 {file}")
        value = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text") from None
    if not value:
        raise ValueError(f"{file} is empty")
    return value


def _url(variable: str, file: Path | None, environment: Mapping[str, str]) -> str:
    value, place = _secret(variable, file, environment), file or variable
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and parts.hostname and not any(c.isspace() for c in value)
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{place} does not hold a URL that begins with https:// or http://")
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
    """What went wrong, in words that cannot contain a part of a URL."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return _reason(error.reason)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}"
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return error.strerror
    return type(error).__name__
