"""Notification channels: Slack, a webhook, PagerDuty, mail, a command. Standard library only, no torch.

A channel sends one note or raises `DeliveryError`. Error texts can be shown to anybody: they hold no URL (the host at
most), key or server response.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import json
import os
import shutil
import smtplib
import socket
import ssl
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from email.message import EmailMessage
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fsdp_pretrain.config.notify import (
    CommandSection,
    EmailSection,
    Level,
    NotifySection,
    PagerDutySection,
    PingSection,
    SlackSection,
    WebhookSection,
)
from fsdp_pretrain.deadline import NoAnswerError, run_program
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.severity import Severity

from .formatting import Note

CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
"""Longer than to connect: retrying a request that got through delivers it twice."""
_COMMAND_SECONDS = 10.0
_REFUSED = frozenset({400, 413, 415, 422})
"""Status codes that blame the message, not the connection."""
_PAGERDUTY_SEVERITY = {"INFO": "info", "WARN": "warning", "CRIT": "critical"}


class DeliveryError(Exception):
    """A note was not delivered. The text is safe to show; `refused`: the receiver will never take this note, but may
    take others."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


class Channel(ABC):
    """A channel, made from its config table and the environment with its secrets; ValueError if it cannot work.

    Attributes:
        name: of its table in the configuration.
        least: minimum severity that is sent.
        digest_every: seconds for which held-back messages are collected.
    """

    name: str
    digest_every = 3600.0

    def __init__(self, least: Level) -> None:
        self.least = Severity[least]

    @abstractmethod
    def send(self, note: Note) -> None:
        """Deliver, or raise DeliveryError. May take half a minute."""


class SlackChannel(Channel):
    """A Slack-compatible webhook."""

    name = "slack"

    def __init__(self, section: SlackSection, environment: Mapping[str, str]) -> None:
        super().__init__(section.least)
        self._url = _url(section.url_env, section.url_file, environment)

    def send(self, note: Note) -> None:
        _post(self._url, {"text": "\n".join([f"*{_slack(note.title)}*", *map(_slack, note.lines)])})


class WebhookChannel(Channel):
    """The whole note as JSON, signed if there is a key."""

    name = "webhook"

    def __init__(self, section: WebhookSection, environment: Mapping[str, str]) -> None:
        super().__init__(section.least)
        self._key = secret(section.hmac_env, None, environment) if section.hmac_env else None
        self._url = _url(section.url_env, section.url_file, environment)

    def send(self, note: Note) -> None:
        _post(self._url, asdict(note), {"Idempotency-Key": note.id}, self._key)


class PagerDutyChannel(Channel):
    """Events API v2: the alarm's key identifies the incident."""

    name = "pagerduty"

    def __init__(self, section: PagerDutySection, environment: Mapping[str, str]) -> None:
        super().__init__(section.least)
        self._url, self._key = section.url, secret(section.key_env, section.key_file, environment)

    def send(self, note: Note) -> None:
        """As an event of the Events API v2."""
        action = {"resolved": "resolve", "acknowledged": "acknowledge"}.get(note.kind, "trigger")
        event: dict[str, object] = {
            "routing_key": self._key,
            "event_action": action,
            "dedup_key": f"{note.run}/{note.key}",
        }
        if action == "trigger":
            event["payload"] = {
                "summary": note.title[:1024],
                "source": note.host,
                "severity": _PAGERDUTY_SEVERITY[note.severity],
                "component": note.run,
                "class": note.detector,
                "timestamp": note.time,
                "custom_details": {"text": "\n".join(note.lines), "step": note.step, "facts": note.facts},
            }
        _post(self._url, event)


class EmailChannel(Channel):
    """SMTP, or the local sendmail."""

    name = "email"
    digest_every = 86400.0

    def __init__(self, section: EmailSection, environment: Mapping[str, str]) -> None:
        super().__init__(section.least)
        self._section, self._password = section, ""
        if section.host is None and _sendmail() is None:
            raise ValueError("there is no sendmail here; set host")
        if section.host is not None and section.user is not None:
            self._password = secret(section.password_env, section.password_file, environment)

    def send(self, note: Note) -> None:
        """Send one mail; its Message-ID is the note's, so that duplicates are recognised."""
        mail = EmailMessage()
        mail["Subject"], mail["From"], mail["To"] = note.title, self._section.sender, ", ".join(self._section.to)
        mail["Message-ID"] = f"<{note.id}@fsdp-pretrain>"
        mail["Auto-Submitted"] = "auto-generated"
        mail.set_content("\n".join(note.lines) + "\n")
        if self._section.host is None:
            _run([_sendmail() or "sendmail", "-t", "-i"], mail.as_bytes(), os.environ)
            return
        try:
            self._send_by_smtp(self._section.host, mail)
        except smtplib.SMTPResponseException as error:
            raise DeliveryError(f"{self._section.host} answered {error.smtp_code}") from None
        except (smtplib.SMTPException, OSError) as error:
            raise DeliveryError(f"{self._section.host}: {_reason(error)}") from None

    def _send_by_smtp(self, host: str, mail: EmailMessage) -> None:
        section, secure = self._section, ssl.create_default_context()
        server: smtplib.SMTP
        if section.tls == "tls":
            server = smtplib.SMTP_SSL(host, section.port, timeout=CONNECT_SECONDS, context=secure)
        else:
            server = smtplib.SMTP(host, section.port, timeout=CONNECT_SECONDS)
        try:
            if section.tls == "starttls":
                server.starttls(context=secure)
            if section.user is not None:
                server.login(section.user, self._password)
            assert server.sock is not None
            server.sock.settimeout(_ANSWER_SECONDS)
            server.send_message(mail)
            with contextlib.suppress(smtplib.SMTPException, OSError):  # it was accepted already
                server.quit()
        finally:
            server.close()


class CommandChannel(Channel):
    """A command of the user."""

    name = "command"

    def __init__(self, section: CommandSection, environment: Mapping[str, str]) -> None:
        del environment
        super().__init__(section.least)
        self._argv = section.argv
        if shutil.which(section.argv[0]) is None:
            raise ValueError(f"there is no program {section.argv[0]}")

    def send(self, note: Note) -> None:
        """Run it: JSON on standard input, the main facts in the environment."""
        content = asdict(note)
        names = ("key", "severity", "state", "kind", "run", "step", "host", "summary", "title", "id")
        facts = {f"WD_{name.upper()}": str(content[name]) for name in names if content[name] is not None}
        _run(self._argv, json.dumps(content).encode(), {**os.environ, **facts})


_CHANNELS: dict[type, Callable[[Any, Mapping[str, str]], Channel]] = {
    SlackSection: SlackChannel,
    WebhookSection: WebhookChannel,
    PagerDutySection: PagerDutyChannel,
    EmailSection: EmailChannel,
    CommandSection: CommandChannel,
}


def make_channels(section: NotifySection, environment: Mapping[str, str] = os.environ) -> list[Channel]:
    """The configured channels.

    Raises:
        ConfigError: lists every secret that is missing or readable by others, and every missing program.
    """
    found: list[Channel] = []
    problems: list[str] = []
    for name, table in section:
        try:
            if isinstance(table, PingSection):
                _url(table.url_env, table.url_file, environment)
            elif type(table) in _CHANNELS:
                found.append(_CHANNELS[type(table)](table, environment))
        except ValueError as error:
            problems.append(f"watchdog.notify.{name}: {error}")
    if problems:
        raise ConfigError(
            "\n".join(["nobody could be notified of alarms:", *(f"  - {problem}" for problem in problems)]),
            remedy="correct it, or remove the channel's table from the configuration",
        )
    return found


def secret(variable: str, file: Path | None, environment: Mapping[str, str]) -> str:
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
    value, place = secret(variable, file, environment), file or variable
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and parts.hostname and not any(c.isspace() for c in value)
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{place} does not hold a URL that begins with https:// or http://")
    return value


class _ResponseTimeout:
    """Connection timeouts: short to connect and send, longer for the response."""

    sock: socket.socket

    def getresponse(self) -> http.client.HTTPResponse:
        self.sock.settimeout(_ANSWER_SECONDS)
        response: http.client.HTTPResponse = super().getresponse()  # type: ignore[misc]
        return response


class _HTTPConnection(_ResponseTimeout, http.client.HTTPConnection):
    pass


class _HTTPSConnection(_ResponseTimeout, http.client.HTTPSConnection):
    pass


class _TimeoutHandler(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_HTTPConnection, request)

    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_HTTPSConnection, request, context=ssl.create_default_context())


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a POST becomes a GET, often of a log-in page, whose 200 would look like a delivery."""

    def redirect_request(self, *args: Any) -> None:
        return None


def fetch(url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> None:
    """GET a URL, or POST a body to it, through the proxies of the environment. Raises DeliveryError."""
    host = urlsplit(url).hostname
    request = urllib.request.Request(url, data=body, headers={"User-Agent": "fsdp-pretrain", **(headers or {})})
    opener = urllib.request.build_opener(_TimeoutHandler, _NoRedirect)
    try:
        opener.open(request, timeout=CONNECT_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()
        raise DeliveryError(f"{host} answered {error.code}", refused=error.code in _REFUSED) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DeliveryError(f"{host}: {_reason(error)}") from None


def _post(url: str, content: object, headers: Mapping[str, str] | None = None, key: str | None = None) -> None:
    """POST JSON, with the HMAC of its bytes if there is a key. Raises DeliveryError."""
    body = json.dumps(content).encode()
    signed = {"X-Signature-256": f"sha256={hmac.new(key.encode(), body, hashlib.sha256).hexdigest()}"} if key else {}
    fetch(url, body, {"Content-Type": "application/json", **(headers or {}), **signed})


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


def _slack(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _sendmail() -> str | None:
    return shutil.which("sendmail", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/lib")


def _run(argv: list[str], text: bytes, environment: Mapping[str, str]) -> None:
    """Run a program with the text as its input. Raises DeliveryError."""
    try:
        code = run_program(argv, _COMMAND_SECONDS, text=text, environment=environment).returncode
    except NoAnswerError:
        raise DeliveryError(f"{argv[0]} took longer than {_COMMAND_SECONDS:g}s") from None
    except OSError as error:
        raise DeliveryError(f"{argv[0]} cannot be started: {error.strerror}") from None
    if code:
        raise DeliveryError(f"{argv[0]} ended with exit status {code}")
