"""Configuration of what guards a run: the watchdog, the verdicts on its numbers, the launcher.

`docs/config.md` is generated from the docstrings here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .notify_sections import NotifySection
from .section import Positive, Section, Share
from .units import Seconds


class HealthSection(Section):
    """What the trainer does about numbers that go wrong."""


class HangSection(Section):
    """When a run that makes no progress on any rank is told of, and ended. These are the least times: steps that take
    long get longer ones, from their median (soft 8 and hard 30 times it; saves and loads 3 and 6 times)."""

    soft: Seconds = Seconds(30)
    """Without progress for so long in a step: stacks of all ranks are collected, and an alarm is raised."""
    hard: Seconds = Seconds(180)
    """Without progress for so long in a step: the ranks are ended, to be started again (exit 75)."""
    longest: Seconds = Seconds(1800)
    """Most that `hard` grows to."""
    save_soft: Seconds = Seconds(120)
    """As `soft`, where training waits for a checkpoint to be written or read."""
    save_hard: Seconds = Seconds(600)
    """As `hard`, where training waits for a checkpoint to be written or read."""
    unknown_soft: Seconds = Seconds(1800)
    """As `soft`, for saves, loads and first steps (which compile) while it is not known how long they take."""
    unknown_hard: Seconds = Seconds(3600)
    """As `hard`, for saves, loads and first steps while it is not known how long they take."""
    start: Seconds = Seconds(900)
    """As `hard`, until the ranks have met."""
    end: bool = True
    """Off: only tell, never end the ranks."""


class PaceSection(Section):
    """When a run that has become slower is told of: by whole blocks of steps, against the beginning of the start."""

    enabled: bool = True
    """Off: nobody is told."""
    settle: Annotated[int, Field(ge=0)] = 20
    """First steps of a start that are not judged."""
    worse: Share = 0.10
    """Slowdown that makes the warning an alert, when it lasts."""
    worse_after: Seconds = Seconds(1800)
    """How long it has to last."""
    restart: Share = 0.03
    """Slowdown against the best earlier start on as many ranks that is told after a restart."""
    straggler: Share = 0.02
    """Own time of a rank over the median of all from which it is told, if that goes on."""
    window: Positive = 50
    """Steps over which own times are compared."""


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
