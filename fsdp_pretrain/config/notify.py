"""Configuration of notifications about alarms.

A channel is on when its table is present. No key holds a secret (such as the URL of a webhook): it is in an environment
variable with a fixed name, or in a file that only its owner can read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from .base import Section


def _file(path: Path) -> Path:
    if ":/" in str(path):
        raise ValueError("a secret itself, such as a URL, must not stand here; put it into a file and name that")
    return path


def _server(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("smtp", "smtps") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.password is not None or parts.path:
        raise ValueError("not of the form smtp://[USER@]HOST[:PORT] or smtps://[USER@]HOST[:PORT], without a password")
    return text


SecretFile = Annotated[Path, Field(strict=False), AfterValidator(_file)]


class ChannelSection(Section):
    """What all channels have."""

    least: Literal["INFO", "WARN", "CRIT"] = "WARN"
    """Lowest severity that is sent."""


class SlackSection(ChannelSection):
    """Messages to a Slack-compatible webhook (Slack, Mattermost, Discord's `/slack` address)."""

    url_file: SecretFile | None = None
    """File with the webhook's URL, mode 0600. Absent: it is in `SLACK_WEBHOOK_URL`."""


class WebhookSection(ChannelSection):
    """Alarms as JSON to a URL, for programs."""

    url_file: SecretFile | None = None
    """File with the URL, mode 0600. Absent: it is in `ALARM_WEBHOOK_URL`."""


class PagerDutySection(ChannelSection):
    """PagerDuty incidents (Events API v2), opened and resolved with the alarm."""

    least: Literal["INFO", "WARN", "CRIT"] = "CRIT"
    """Lowest severity that is sent."""
    key_file: SecretFile | None = None
    """File with the integration's routing key, mode 0600. Absent: it is in `PAGERDUTY_ROUTING_KEY`."""
    url: str = "https://events.pagerduty.com/v2/enqueue"
    """URL for events; `https://events.eu.pagerduty.com/v2/enqueue` in the EU."""


class EmailSection(ChannelSection):
    """An e-mail for every message."""

    to: Annotated[list[str], Field(min_length=1)]
    """Addresses of the recipients."""
    sender: str
    """Address of the sender."""
    server: Annotated[str, AfterValidator(_server)] = "smtp://localhost"
    """`smtp://[USER@]HOST[:PORT]`, with a user by STARTTLS, without one unencrypted; `smtps://...` by TLS from the
    start."""
    password_file: SecretFile | None = None
    """File with the password of a user, mode 0600. Absent: it is in `SMTP_PASSWORD`."""


class CommandSection(ChannelSection):
    """A command that is run for every message, with the message as JSON on its standard input and its main facts in
    environment variables `WD_*`."""

    argv: Annotated[list[str], Field(min_length=1)]
    """Program and arguments, without a shell. It has 10 seconds; exit status 0 means delivered."""


class PingSection(Section):
    """A dead man's switch: a URL that is fetched once a minute as long as the watchdog really observes the run. A
    monitoring service alerts you when the pings stop."""

    url_file: SecretFile | None = None
    """File with the URL, mode 0600. Absent: it is in `WATCHDOG_PING_URL`."""


class PrometheusSection(Section):
    """Metrics for Prometheus, by HTTP or through the textfile collector of node_exporter."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port for `/metrics`. Absent: none; 0: any free port."""
    host: str = "127.0.0.1"
    """Address to listen on. There is no log-in: anyone who can reach it can read it."""
    textfile: Annotated[Path, Field(strict=False)] | None = None
    """File for the textfile collector, such as `/var/lib/node_exporter/run.prom`."""

    @model_validator(mode="after")
    def _read_by_node_exporter(self) -> PrometheusSection:
        if self.textfile is not None and self.textfile.suffix != ".prom":
            raise ValueError("node_exporter reads only files that end in .prom")
        return self


class NotifySection(Section):
    """Notifications about alarms. Secrets are in environment variables or files, never here."""

    slack: SlackSection | None = None
    """A `[watchdog.notify.slack]` table."""
    webhook: WebhookSection | None = None
    """A `[watchdog.notify.webhook]` table."""
    pagerduty: PagerDutySection | None = None
    """A `[watchdog.notify.pagerduty]` table."""
    email: EmailSection | None = None
    """A `[watchdog.notify.email]` table."""
    command: CommandSection | None = None
    """A `[watchdog.notify.command]` table."""
    ping: PingSection | None = None
    """A `[watchdog.notify.ping]` table."""
    prometheus: PrometheusSection = PrometheusSection()
    """A `[watchdog.notify.prometheus]` table."""
