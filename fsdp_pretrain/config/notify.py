"""Configuration of notifications about alarms.

Secrets (such as the URL of a webhook) are in environment variables with fixed names, never in a key.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from .base import Section


def _address(text: str) -> str:
    match = re.fullmatch(r"[^\s:/]+:(\d{1,5})", text)
    if not text.endswith(".prom") and (match is None or int(match[1]) > 65535):
        raise ValueError("neither of the form HOST:PORT nor the path of a file that ends in .prom")
    return text


class NotifySection(Section):
    """Notifications about alarms of WARN and above. Secrets are in environment variables, never here."""

    slack: bool = False
    """Messages to the Slack-compatible webhook (Slack, Mattermost, Discord's `/slack` address) in
    `$SLACK_WEBHOOK_URL`."""
    webhook: bool = False
    """Alarms as JSON to the URL in `$ALARM_WEBHOOK_URL`, for programs."""
    pagerduty: Literal["us", "eu"] | None = None
    """PagerDuty incidents (Events API v2) of that region, opened and resolved with critical alarms. The integration's
    routing key is in `$PAGERDUTY_ROUTING_KEY`."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Program and arguments, without a shell, run for every message, which is JSON on its standard input; the main
    facts are in environment variables `WD_*`. It has 10 seconds; exit status 0 means delivered."""
    ping: bool = False
    """A dead man's switch: the URL in `$WATCHDOG_PING_URL` is fetched once a minute as long as the watchdog really
    observes the run. A monitoring service alerts you when the pings stop."""
    metrics: Annotated[str, AfterValidator(_address)] | None = None
    """`HOST:PORT` to serve `/metrics` for Prometheus on, such as `127.0.0.1:9464`; port 0: any. There is no log-in:
    anyone who can reach it can read it. Or the path of a file `*.prom` for node_exporter's textfile collector."""
