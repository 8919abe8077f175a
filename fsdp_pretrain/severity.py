"""Severity scale of health findings, alarms and notifications."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer


class Severity(IntEnum):
    """INFO: recorded only. WARN: somebody should know. CRIT: somebody should act now."""

    INFO = 0
    WARN = 1
    CRIT = 2


def _by_name(value: object) -> object:
    return Severity.__members__.get(value, value) if isinstance(value, str) else value


SeverityName = Annotated[Severity, BeforeValidator(_by_name), PlainSerializer(lambda severity: severity.name)]
"""A `Severity` that is serialized as its name."""
