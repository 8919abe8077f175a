"""Configuration of what guards a run: the watchdog, the verdicts on its numbers, the launcher.

`docs/config.md` is generated from the docstrings here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .section import Positive, Section
from .units import Seconds


class HealthSection(Section):
    """What the trainer does about numbers that go wrong."""


class HangSection(Section):
    """When a run that makes no progress is told of, and ended."""


class PaceSection(Section):
    """When a run that has become slower is told of."""


class StorageSection(Section):
    """Disk space, and the age of the newest verified checkpoint."""


class SentinelSection(Section):
    """What must hold of the data that is trained."""


class HardwareSection(Section):
    """The state of GPUs, hosts and mounts."""


class NotifySection(Section):
    """Who is told of alarms, and how. Secrets stand in environment variables, never here."""


class WatchdogSection(Section):
    """The process beside the ranks of every node that notices what goes wrong."""

    enabled: bool = True
    """Off: no watchdog runs, and nobody is told of anything."""
    interval: Seconds = Seconds(1)
    """Time between two looks."""
    hang: HangSection = HangSection()
    """A `[watchdog.hang]` table."""
    pace: PaceSection = PaceSection()
    """A `[watchdog.pace]` table."""
    storage: StorageSection = StorageSection()
    """A `[watchdog.storage]` table."""
    sentinels: SentinelSection = SentinelSection()
    """A `[watchdog.sentinels]` table."""
    hardware: HardwareSection = HardwareSection()
    """A `[watchdog.hardware]` table."""
    notify: NotifySection = NotifySection()
    """A `[watchdog.notify]` table."""


class LaunchSection(Section):
    """What `fsdp-pretrain launch` does when a run ends before its time."""

    attempts: Positive = 3
    """Starts in a row that may end without a newer verified checkpoint; then a person must look (exit 93)."""
    restarts: Positive = 5
    """So many restarts within `restart_window` are too many, with or without progress (exit 93)."""
    restart_window: Seconds = Seconds(1800)
    """See `restarts`."""
    pauses: Annotated[list[Seconds], Field(min_length=1)] = [Seconds(10), Seconds(60), Seconds(300)]
    """Wait before the first, second, ... restart that follows a start without progress; the last for all further."""
    end_timeout: Seconds = Seconds(60)
    """How long processes may take to end after SIGTERM before they are killed; also how long a node goes on after
    another node's part has ended."""
    stop_timeout: Seconds = Seconds(600)
    """How long a stop on request (agreeing on a step, saving, verifying) may take before the processes are ended."""
    grace: Seconds | None = None
    """How long before a time limit the ranks are asked to stop. Default: what the record of the run shows is needed,
    at least 2 minutes. A value smaller than that need is refused."""
