"""Configuration of the watchdog, the health checks of training, and the launcher.

`docs/config.md` is generated from the docstrings here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fsdp_pretrain.units import Seconds

from .base import AboveZero, Positive, Section
from .notify import NotifySection


class HealthSection(Section):
    """What the trainer does when losses, gradients or parameters go wrong, see health.md. It always reports them."""

    rollback: bool = True
    """When the loss does not recover, go back to a clean checkpoint and skip the samples of the incident. Off: only
    report a loss that stays up; steps that are not finite, several in a row, then end the run with exit 93."""
    stop_on_mismatch: bool = True
    """Exit 93 when replicas have different parameters, or a resumed run does not reproduce its recorded steps. Off:
    only report."""
    repeat_every: Seconds | None = None
    """How often all ranks compute a micro-batch twice and compare their gradients to the bit, such as `"1 hour"`; a
    host that gets other bits is left (exit 76). Absent: never."""
    tolerance: AboveZero = 1.0
    """Factor of the thresholds for losses and gradient norms."""


class HangSection(Section):
    """When a run without progress on any rank is reported, and ended. These times are minimums: slow steps get longer
    limits, from their median (`soft` 8 times, `hard` 30 times). While training waits for a checkpoint they are four
    times as long, and longer still as long as the usual duration of a phase is not known."""

    soft: Seconds = Seconds(30)
    """After this long without progress, collect the stacks of all ranks and raise an alarm."""
    hard: Seconds = Seconds(180)
    """After this long without progress, end the ranks, to be restarted (exit 75)."""


class WatchdogSection(Section):
    """The process on every node, beside the ranks, that notices problems."""

    enabled: bool = True
    """Off: there is no watchdog and there are no alarms."""
    act: bool = True
    """End ranks without progress (exit 75). Ask for a save when the newest verified checkpoint is 2.5 intervals old,
    and for a stop when it is 4 intervals, or 6 hours and overdue (exit 93 if the last save fails too). Stop when a
    device is permanently broken, and add its host to `avoid_hosts` (exit 76). Off: only report."""
    pace: bool = True
    """Report steps that became slower, and ranks that are slower than the others."""
    gpus: Annotated[str, Field(pattern=r"^(auto|none|nvml|file:.+)$")] = "auto"
    """Source of the state of GPUs: `nvml` (NVIDIA's library, through the package `nvidia-ml-py`), `file:PATH` (a JSON
    file that another program keeps current, see watchdog.md), `none`; `auto` is `nvml` where there is a driver."""
    hang: HangSection = HangSection()
    """A `[watchdog.hang]` table."""
    notify: NotifySection = NotifySection()
    """A `[watchdog.notify]` table."""


class LaunchSection(Section):
    """What `fsdp-pretrain launch` does when a run ends early."""

    attempts: Positive = 3
    """Starts in a row without a newer verified checkpoint; then exit 93."""
    join_timeout: Seconds = Seconds(300)
    """How long the nodes of a start wait for each other; then exit 75."""
    stop_timeout: Seconds = Seconds(600)
    """How long a stop on request may take before the processes are ended."""
