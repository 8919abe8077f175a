"""Configuration of what guards a run: the watchdog, the verdicts on its numbers, the launcher.

`docs/config.md` is generated from the docstrings here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .section import Positive, Section
from .units import Seconds, Steps

Limit = Annotated[float, Field(strict=False, gt=0)]


class HealthSection(Section):
    """What the trainer does about numbers that go wrong; see health.md. What it notices it always tells."""

    skip_nonfinite: bool = True
    """Skip a step whose loss or gradients are not finite on any rank, on all ranks. Off: such a step ends the run with
    exit 93, since its weights are spoilt (fp16 always skips)."""
    rollback: bool = True
    """Go back to a clean checkpoint and skip the samples of an incident when the loss does not recover by itself. Off:
    only tell; but numbers that go on not being finite end the run with exit 93."""
    stop_on_mismatch: bool = True
    """End the run with exit 93 when replicas hold different parameters, or a resumed run does not repeat what it had
    recorded. Off: only tell."""
    nonfinite_in_a_row: Positive = 2
    """So many steps in a row that are not finite are no accident of one batch."""
    nonfinite_in_20: Positive = 3
    """So many of the last 20 steps neither."""
    window: Steps = Steps(128, "step")
    """Steps whose median and spread a loss and a gradient norm are compared with."""
    floor: Limit = 0.02
    """Smallest spread of the loss, in nats, that a deviation is measured in."""
    outlier: Limit = 6.0
    """Deviations, in spreads, of a single loss that are noted."""
    spike: Limit = 4.0
    """Deviations that make a spike when three of the last five losses have them: a warning, and checkpoints are marked
    `suspect` until the loss has been quiet."""
    patience: Steps = Steps(50, "step")
    """Time that a spike has to recover by itself."""
    patience_with_norm: Steps = Steps(10, "step")
    """The same if the gradient norm stands out as well."""
    rise: Limit = 0.1
    """Nats above the median before it at which a spike has not recovered (or five times the noise of the level)."""
    quiet: Steps = Steps(100, "step")
    """Steps without another deviation after which an incident is over."""
    level: Limit = 0.02
    """Nats by which the level of the loss, over 64 steps, rises above its best of 512 before it is told of (or five
    times its noise)."""
    norm: Limit = 6.0
    """Deviations of the logarithm of the gradient norm that are noted; two in a row or three of ten are a warning."""
    halvings: Positive = 4
    """Halvings of the fp16 loss scale within 20 steps that are a collapse."""
    distance: Steps = Steps(50, "step")
    """How far before an incident the checkpoint should be that a rollback goes to."""
    margin: Steps = Steps(20, "step")
    """Steps before and after an incident whose samples are skipped as well."""
    rollbacks_a_day: Positive = 3
    """Automatic rollbacks within 24 hours; one more would be exit 93."""
    rollbacks_nearby: Positive = 2
    """Automatic rollbacks of incidents within 1000 steps of each other; one more would be exit 93."""
    compare_every: Steps = Steps(1000, "step")
    """Steps between comparisons of the replicas' parameters; also after each start."""
    replay_tolerance: Limit = 1e-3
    """Largest relative difference between the loss of a step and that recorded by the start before, where the same bits
    cannot be expected: on another mesh, on GPUs, with other software."""


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
