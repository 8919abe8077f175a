"""Configuration of what guards a run: the watchdog, the verdicts on its numbers, the launcher.

`docs/config.md` is generated from the docstrings here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from .notify_sections import NotifySection
from .section import Positive, Section, Share
from .sections import FilePath
from .units import Seconds, Steps

Limit = Annotated[float, Field(strict=False, gt=0)]


class HealthSection(Section):
    """What the trainer does about numbers that go wrong; see health.md. What it notices is always reported."""

    skip_nonfinite: bool = True
    """Skip a step whose loss or gradients are not finite on any rank, on all ranks. Off: such a step ends the run with
    exit 93, since its weights are spoilt (fp16 always skips)."""
    rollback: bool = True
    """Go back to a clean checkpoint and skip the samples of an incident when the loss does not recover by itself. Off:
    only report; but numbers that stay non-finite end the run with exit 93."""
    stop_on_mismatch: bool = True
    """End the run with exit 93 when replicas hold different parameters, or a resumed run does not repeat what it had
    recorded. Off: only report."""
    nonfinite_in_a_row: Positive = 2
    """This many non-finite steps in a row are no accident of one batch."""
    nonfinite_in_20: Positive = 3
    """Nor are this many of the last 20 steps."""
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
    """Nats by which the level of the loss, over 64 steps, rises above its best of 512 before it is reported (or five
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
    """When a run that makes no progress on any rank is reported, and ended. These are the least times: steps that take
    long get longer ones, from their median (soft 8 and hard 30 times it; saves and loads 3 and 6 times)."""

    soft: Seconds = Seconds(30)
    """Time without progress in a step after which stacks of all ranks are collected and an alarm is raised."""
    hard: Seconds = Seconds(180)
    """Time without progress in a step after which the ranks are ended, to be started again (exit 75)."""
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
    connect: Seconds = Seconds(900)
    """As `hard`, until the ranks have met."""
    act: bool = True
    """Off: only report, never end the ranks."""


class PaceSection(Section):
    """When a run that has become slower is reported: by whole blocks of steps, against the beginning of the start."""

    enabled: bool = True
    """Off: nothing is reported."""
    settle: Annotated[int, Field(ge=0)] = 20
    """First steps of a start that are not judged."""
    worse: Share = 0.10
    """Slowdown that makes the warning an alert, when it lasts."""
    worse_after: Seconds = Seconds(1800)
    """How long it has to last."""
    restart: Share = 0.03
    """Slowdown against the best earlier start on as many ranks that is reported after a restart."""
    straggler: Share = 0.02
    """Own time of a rank over the median of all from which it is reported, if that goes on."""
    window: Positive = 50
    """Steps over which own times are compared."""


class StorageSection(Section):
    """Disk space, the age of the newest verified checkpoint, and mounts."""

    interval: Seconds = Seconds(60)
    """Time between two looks at a file system."""
    deadline: Seconds = Seconds(15)
    """How long a look may take; a mount that misses it twice in a row is an alarm."""
    reserve: Share = 0.01
    """Share of a file system, at most 20 GiB, that does not count as room for checkpoints."""
    audit: Seconds = Seconds(3600)
    """Time between two audits: every shard of every corpus exists with its size, and one file of the newest verified
    checkpoint still has the bytes that were written."""
    still: Seconds = Seconds(60)
    """A save in flight that has not grown for this time, and for as long as saves take, has a writer that hangs. Five
    times as long before any save was timed."""
    max_unprotected: Seconds = Seconds(6 * 3600)
    """Age of the newest verified checkpoint at which the run is asked to stop, if it is overdue as well."""
    act: bool = True
    """Ask for a save when the newest verified checkpoint is 2.5 intervals old, and for a stop when it is 4 intervals or
    `max_unprotected` old (exit 93 if the last save fails too). Off: only report."""


class SentinelSection(Section):
    """What must hold of the data that is trained."""

    separator_rate: Annotated[float, Field(strict=False, gt=0)] = 0.2
    """How far the rate of separators may be from the manifests' documents per token, as a share of it."""
    share: Share = 0.02
    """How far a source's share of the targets may be from the planned one over 100 steps, at least."""
    learn: Positive = 50
    """Steps of a run that show what its tokens look like, and as many again that show how much that varies. Later steps
    are compared with them. Changed shares of the sources start it again."""


class HardwareSection(Section):
    """The state of GPUs and hosts."""

    provider: Annotated[str, Field(pattern=r"^(auto|none|nvml|file:.+)$")] = "auto"
    """Source of the state of GPUs: `nvml` (NVIDIA's library, through the package `nvidia-ml-py`), `file:PATH` (a JSON
    file that something else keeps current, see docs/watchdog.md), `none`; `auto` is `nvml` where there is a driver."""
    interval: Seconds = Seconds(15)
    """Time between two looks at the GPUs."""
    deadline: Seconds = Seconds(10)
    """How long such a look may take; two in a row that take longer are a warning."""
    hosts: FilePath | None = None
    """File that remembers the incidents of every host, for several runs to share. Default: `watchdog/hosts.json` in the
    run directory."""
    act: bool = True
    """When a device is broken for good, save, stop, and name its host in `avoid_hosts` (exit 76). Off: only report."""
    lemon: Positive = 3
    """Incidents of a host in 14 days after which it is proposed for exclusion."""


class WatchdogSection(Section):
    """The process beside the ranks of every node that notices what goes wrong."""

    enabled: bool = True
    """Off: no watchdog runs, and nothing is reported."""
    interval: Seconds = Seconds(2)
    """Time between two looks; the end of a process is seen at once, and during a stall looks are more frequent."""
    beat: Seconds = Seconds(5)
    """Time between two signs of life that the watchdog of a node leaves for those of the other nodes."""
    silent: Seconds = Seconds(60)
    """Time without a sign after which a node's watchdog counts as gone: that is reported, and if it led the job, the
    next node's takes over. Three times `beat` at least."""
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

    @model_validator(mode="after")
    def _check_silent(self) -> WatchdogSection:
        if self.silent.value < 3 * self.beat.value:
            raise ValueError(
                f"silent = {self.silent} is less than three times beat = {self.beat}: one late sign would be a failure"
            )
        return self


class LaunchSection(Section):
    """What `fsdp-pretrain launch` does when a run ends before its time."""

    attempts: Positive = 3
    """Starts in a row that may end without a newer verified checkpoint; then a person must look (exit 93)."""
    restarts: Positive = 5
    """More restarts than this within `restart_window` end the launcher, with or without progress (exit 93)."""
    restart_window: Seconds = Seconds(1800)
    """See `restarts`."""
    pauses: Annotated[list[Seconds], Field(min_length=1)] = [Seconds(10), Seconds(60), Seconds(300)]
    """Wait before the first, second, ... restart that follows a start without progress; the last for all further."""
    join_timeout: Seconds = Seconds(300)
    """How long the nodes of a start wait for each other. If some do not come, the others end with exit 75."""
    end_timeout: Seconds = Seconds(60)
    """How long processes may take to end after SIGTERM before they are killed; also how long a node goes on after
    another node's part has ended."""
    stop_timeout: Seconds = Seconds(600)
    """How long a stop on request (agreeing on a step, saving, verifying) may take before the processes are ended."""
    grace: Seconds | None = None
    """How long before a time limit the ranks are asked to stop. Default: what the record of the run shows is needed,
    at least 2 minutes. A value smaller than that need is refused."""
