"""Configuration of what guards a run: the watchdog, the verdicts on its numbers, the launcher.

`docs/config.md` is generated from the docstrings here.
"""

from __future__ import annotations

from .notify_sections import NotifySection
from .section import Section
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
