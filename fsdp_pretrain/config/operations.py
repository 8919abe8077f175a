"""Configuration of what protects a run: the watchdog, the verdicts on its numbers, the launcher.

`docs/config.md` is generated from the docstrings here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from fsdp_pretrain.units import Pause, Seconds, Steps

from .base import AboveZero, FilePath, Positive, Section, Share, ShareAboveZero
from .notify import NotifySection


class HealthSection(Section):
    """What the trainer does when losses, gradients or parameters go wrong, see health.md. It always reports them."""

    skip_nonfinite: bool = True
    """Skip a step on all ranks if the loss or gradients of any rank are not finite. Off: such a step ends the run with
    exit 93, since the weights are spoilt (fp16 always skips)."""
    rollback: bool = True
    """Go back to a clean checkpoint and skip the samples of an incident when the loss does not recover. Off: only
    report; but repeated non-finite steps end the run with exit 93."""
    stop_on_mismatch: bool = True
    """End the run with exit 93 when replicas have different parameters, or a resumed run does not reproduce its
    recorded steps. Off: only report."""
    nonfinite_in_a_row: Positive = 2
    """Alarm, and roll back, if this many steps in a row are non-finite."""
    nonfinite_in_20: Positive = 3
    """Alarm, and roll back, if this many of the last 20 steps are non-finite."""
    window: Steps = Steps(128, "step")
    """Number of previous steps whose median and spread each loss and gradient norm is compared with."""
    floor: AboveZero = 0.02
    """Smallest spread of the loss, in nats: a smaller measured spread counts as this."""
    outlier: AboveZero = 6.0
    """Report a single loss that is more than this many spreads above the median."""
    spike: AboveZero = 4.0
    """Warn of a spike if three of the last five losses are more than this many spreads above the median. Checkpoints
    are marked `suspect` until the loss is quiet again."""
    patience: Steps = Steps(50, "step")
    """Steps that a spike has to recover."""
    patience_with_norm: Steps = Steps(10, "step")
    """Steps that a spike has to recover if the gradient norm is unusual as well."""
    rise: AboveZero = 0.1
    """A spike has not recovered while the loss is this many nats (or five times the noise of its level, if more) above
    the median from before the spike."""
    quiet: Steps = Steps(100, "step")
    """An incident is over after this many steps without another deviation."""
    level: AboveZero = 0.02
    """Warn if the level of the loss (a median over 64 steps) is this many nats, or five times its noise if more, above
    its lowest of the last 512 steps."""
    norm: AboveZero = 6.0
    """Report a gradient norm whose logarithm is more than this many spreads above the median; warn at two in a row or
    three of ten."""
    halvings: Positive = 4
    """Alarm if the fp16 loss scale is halved this many times within 20 steps."""
    distance: Steps = Steps(50, "step")
    """A rollback goes to a checkpoint at least this many steps before the incident, if there is one."""
    margin: Steps = Steps(20, "step")
    """A rollback also skips the samples of this many steps before and after the incident."""
    rollbacks_a_day: Positive = 3
    """Automatic rollbacks allowed within 24 hours; instead of another one the run ends with exit 93."""
    rollbacks_nearby: Positive = 2
    """Automatic rollbacks allowed within 1000 steps; instead of another one the run ends with exit 93."""
    compare_every: Steps = Steps(1000, "step")
    """Interval at which the parameters of the replicas are compared; also done after each start."""
    replay_tolerance: AboveZero = 1e-3
    """Largest relative difference between the loss of a repeated step and its recorded loss, where identical bits
    cannot be expected: on another mesh, on GPUs, with other software."""


class HangSection(Section):
    """When a run without progress on any rank is reported, and ended. These times are minimums: slow steps get longer
    limits, from their median (`soft` 8 times, `hard` 30 times; saves and loads 3 and 6 times)."""

    soft: Seconds = Seconds(30)
    """After this long without progress in a step, collect the stacks of all ranks and raise an alarm."""
    hard: Seconds = Seconds(180)
    """After this long without progress in a step, end the ranks, to be restarted (exit 75)."""
    longest: Seconds = Seconds(1800)
    """Upper limit of `hard` for slow steps."""
    save_soft: Seconds = Seconds(120)
    """Like `soft`, while training waits for a checkpoint to be written or read."""
    save_hard: Seconds = Seconds(600)
    """Like `hard`, while training waits for a checkpoint to be written or read."""
    unknown_soft: Seconds = Seconds(1800)
    """Like `soft`, for saves, loads and first steps (which compile) as long as their usual duration is not known."""
    unknown_hard: Seconds = Seconds(3600)
    """Like `hard`, for saves, loads and first steps as long as their usual duration is not known."""
    connect: Seconds = Seconds(900)
    """Like `hard`, until all ranks have connected."""
    act: bool = True
    """Off: only report, never end the ranks."""


class PaceSection(Section):
    """When a run that has become slower is reported. Whole blocks of steps are compared with the beginning of the
    start."""

    enabled: bool = True
    """Off: slow runs are not reported."""
    settle: Annotated[int, Field(ge=0)] = 20
    """Number of first steps of a start that are not judged."""
    worse: ShareAboveZero = 0.10
    """A slowdown of this share becomes an alert if it lasts for `worse_after`."""
    worse_after: Seconds = Seconds(1800)
    """See `worse`."""
    restart: ShareAboveZero = 0.03
    """After a restart, report a slowdown of this share against the best earlier start on the same number of ranks."""
    straggler: ShareAboveZero = 0.02
    """Report a rank whose own time stays above the median of all ranks by this share."""
    window: Positive = 50
    """Number of steps over which the own times of ranks are compared."""


class StorageSection(Section):
    """Disk space, the age of the newest verified checkpoint, and mounts."""

    interval: Seconds = Seconds(60)
    """Time between two checks of a file system."""
    deadline: Seconds = Seconds(15)
    """How long a check may take; if a mount misses it twice in a row, an alarm is raised."""
    reserve: Share = 0.01
    """Share of a file system, at most 20 GiB, that is not counted as room for checkpoints."""
    audit: Seconds = Seconds(3600)
    """Time between two audits, which check that every shard of every corpus exists with the right size, and that one
    file of the newest verified checkpoint still has the bytes that were written."""
    still: Seconds = Seconds(60)
    """A save that has not grown for this long, and for as long as saves usually take, has a writer that hangs. Five
    times this long before the first save was timed."""
    max_unprotected: Seconds = Seconds(6 * 3600)
    """The run is asked to stop when its newest verified checkpoint is this old and the next one is overdue."""
    act: bool = True
    """Ask for a save when the newest verified checkpoint is 2.5 intervals old, and for a stop when it is 4 intervals or
    `max_unprotected` old (exit 93 if the last save fails too). Off: only report."""


class SentinelSection(Section):
    """Checks of the data during training."""

    separator_rate: AboveZero = 0.2
    """Warn if the rate of separators differs by more than this share from the documents per token in the manifests."""
    share: ShareAboveZero = 0.02
    """Smallest difference between the actual and the planned share of a source over 100 steps that is a warning."""
    learn: Positive = 50
    """Number of steps from which the usual tokens of the run are learned; as many again show their variation. Later
    steps are compared with them. Changed shares of the sources restart it."""


class HardwareSection(Section):
    """The state of GPUs and hosts."""

    provider: Annotated[str, Field(pattern=r"^(auto|none|nvml|file:.+)$")] = "auto"
    """Source of the state of GPUs: `nvml` (NVIDIA's library, through the package `nvidia-ml-py`), `file:PATH` (a JSON
    file that another program keeps current, see watchdog.md), `none`; `auto` is `nvml` where there is a driver."""
    interval: Seconds = Seconds(15)
    """Time between two checks of the GPUs."""
    deadline: Seconds = Seconds(10)
    """How long a check may take; two longer ones in a row are a warning."""
    hosts: FilePath | None = None
    """File with the incidents of every host, which several runs may share. Default: `watchdog/hosts.json` in the run
    directory."""
    act: bool = True
    """When a device is permanently broken, save, stop, and add its host to `avoid_hosts` (exit 76). Off: only
    report."""
    lemon: Positive = 3
    """Propose a host for exclusion after this many incidents in 14 days."""


class WatchdogSection(Section):
    """The process on every node, beside the ranks, that notices problems."""

    enabled: bool = True
    """Off: there is no watchdog and there are no alarms."""
    interval: Seconds = Seconds(2)
    """Time between two checks. The end of a process is noticed at once; during a stall, checks are more frequent."""
    beat: Seconds = Seconds(5)
    """Time between two heartbeats of a node's watchdog to those of the other nodes."""
    silent: Seconds = Seconds(60)
    """After this long without a heartbeat, a node's watchdog counts as gone: an alarm is raised, and if it was the
    leader, the next node's watchdog takes over. At least three times `beat`."""
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
                f"silent = {self.silent} is less than three times beat = {self.beat}: one late beat would be a failure"
            )
        return self


class LaunchSection(Section):
    """What `fsdp-pretrain launch` does when a run ends early."""

    attempts: Positive = 3
    """After this many starts in a row without a newer verified checkpoint, give up: a person must look (exit 93)."""
    restarts: Positive = 5
    """Restarts allowed within `restart_window`, with or without progress; then give up (exit 93)."""
    restart_window: Seconds = Seconds(1800)
    """See `restarts`."""
    pauses: Annotated[list[Pause], Field(min_length=1)] = [Pause(10), Pause(60), Pause(300)]
    """Pauses before the first, second, ... restart after starts without progress; the last one is repeated."""
    join_timeout: Seconds = Seconds(300)
    """How long the nodes of a start wait for each other. If a node is missing, the others end with exit 75."""
    end_timeout: Seconds = Seconds(60)
    """How long processes may take to end after SIGTERM before they are killed; also how long a node continues after
    another node has ended."""
    stop_timeout: Seconds = Seconds(600)
    """How long a stop on request (agreeing on a step, saving, verifying) may take before the processes are ended."""
    grace: Seconds | None = None
    """How long before a time limit the ranks are asked to stop. Default: the time needed according to the record of the
    run, at least 2 minutes. A smaller value than needed is refused."""
