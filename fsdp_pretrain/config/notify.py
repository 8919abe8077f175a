"""Configuration of notifications about alarms. No key holds a secret: keys name where one is found.

A channel is on when its table is present. A secret (such as the URL of a webhook) is in an environment variable, or in
a file that only its owner can read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from fsdp_pretrain.units import Seconds

from .base import Positive, Section


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name):
        raise ValueError("not the name of an environment variable; name one here and put the secret into it")
    return name


Variable = Annotated[str, AfterValidator(_variable)]
SecretFile = Annotated[Path, Field(strict=False)]
Level = Literal["INFO", "WARN", "CRIT"]


class SlackSection(Section):
    """Messages to a Slack-compatible webhook (Slack, Mattermost, Discord's `/slack` address)."""

    url_env: Variable = "SLACK_WEBHOOK_URL"
    """Environment variable with the webhook's URL."""
    url_file: SecretFile | None = None
    """File with the URL instead, mode 0600."""
    least: Level = "WARN"
    """Lowest severity that is sent."""


class WebhookSection(Section):
    """Alarms as JSON to a URL, for programs."""

    url_env: Variable = "ALARM_WEBHOOK_URL"
    """Environment variable with the URL."""
    url_file: SecretFile | None = None
    """File with the URL instead, mode 0600."""
    hmac_env: Variable | None = None
    """Environment variable with a key: requests then carry `X-Signature-256: sha256=HEX`, the HMAC of the body."""
    least: Level = "WARN"
    """Lowest severity that is sent."""


class PagerDutySection(Section):
    """PagerDuty incidents (Events API v2), opened and resolved with the alarm."""

    key_env: Variable = "PAGERDUTY_ROUTING_KEY"
    """Environment variable with the integration's routing key."""
    key_file: SecretFile | None = None
    """File with the key instead, mode 0600."""
    url: str = "https://events.pagerduty.com/v2/enqueue"
    """URL for events; `https://events.eu.pagerduty.com/v2/enqueue` in the EU."""
    least: Level = "CRIT"
    """Lowest severity that is sent."""


class EmailSection(Section):
    """An e-mail for every message, by SMTP or the local sendmail."""

    to: Annotated[list[str], Field(min_length=1)]
    """Addresses of the recipients."""
    sender: str
    """Address of the sender."""
    host: str | None = None
    """SMTP server. Absent: the local `sendmail`."""
    port: Positive = 587
    """Port of the SMTP server."""
    tls: Literal["starttls", "tls", "none"] = "starttls"
    """Encryption: `starttls` after connecting, `tls` from the start, or `none`."""
    user: str | None = None
    """User name for the log-in. Absent: no log-in."""
    password_env: Variable = "SMTP_PASSWORD"
    """Environment variable with the password, if there is a `user`."""
    password_file: SecretFile | None = None
    """File with the password instead, mode 0600."""
    least: Level = "WARN"
    """Lowest severity that is sent."""

    @model_validator(mode="after")
    def _no_open_password(self) -> EmailSection:
        if self.user is not None and self.tls == "none":
            raise ValueError("a log-in over an unencrypted connection would show the password; set tls")
        return self


class CommandSection(Section):
    """A command that is run for every message, with the message as JSON on its standard input and its main facts in
    environment variables `WD_*`."""

    argv: Annotated[list[str], Field(min_length=1)]
    """Program and arguments, without a shell. It has 10 seconds; exit status 0 means delivered."""
    least: Level = "WARN"
    """Lowest severity that is sent."""


class PingSection(Section):
    """A dead man's switch: a URL that is fetched as long as the watchdog really observes the run. A monitoring service
    alerts you when the pings stop."""

    url_env: Variable = "WATCHDOG_PING_URL"
    """Environment variable with the URL."""
    url_file: SecretFile | None = None
    """File with the URL instead, mode 0600."""
    interval: Seconds = Seconds(60)
    """Time between two pings."""


class PrometheusSection(Section):
    """Metrics for Prometheus, by HTTP or through the textfile collector of node_exporter."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port for `/metrics`, `/healthz` and `/status`. Absent: none; 0: any free port."""
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
