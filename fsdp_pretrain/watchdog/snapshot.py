"""What the watchdog knows of a run at one instant, as plain values: for metrics, for messages. No torch."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from ..severity import Severity

_BOUNDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


@dataclass
class Histogram:
    """Seconds, counted by size.

    Attributes:
        counts: how many were at most as long as each of `bounds`, and longer than the one before; the last: longer.
        total: sum of all, seconds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(_BOUNDS, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound as Prometheus writes it, how many were at most as long)."""
        return list(zip((*map(str, _BOUNDS), "+Inf"), accumulate(self.counts), strict=True))


@dataclass
class Snapshot:
    """A run at one instant. None and empty: not known, and then not shown. Ages and times are seconds.

    Attributes:
        run: name of the run.
        segment: number of the present start.
        pass_age: since the last full pass of the watchdog; set by who shows the snapshot.
        pass_due: age from which a pass is overdue.
        step, total_steps, segment_steps: of the run, of its plan, of the present start.
        tokens: trained so far.
        step_seconds: of the steps of the present start.
        step_drift: present step time over the baseline, 1.0: as it was.
        world: ranks.
        verified_step, verified_age: newest verified checkpoint.
        unprotected_tokens: tokens trained since it.
        checkpoint_failures: failed saves of the run.
        checkpoint_bytes_per_second: of the last save.
        next_checkpoint_fits: how many more checkpoints fit onto the disk.
        disk_full_in: until the disk is full.
        heartbeat_ages: by rank.
        own_ratios: a rank's own time over the median of all, by rank.
        loss, loss_z, grad_norm: of the last step that was read; loss_z in robust deviations.
        skipped_steps: steps of the run whose update was skipped.
        goodput, ettr: shares of the run's wall clock, 0 to 1.
        badput_seconds: lost, by state.
        open: how many alarms are open, by severity name.
    """

    run: str
    segment: int | None = None
    pass_age: float = 0.0
    pass_due: float = 60.0
    step: int | None = None
    total_steps: int | None = None
    segment_steps: int | None = None
    tokens: int | None = None
    step_seconds: Histogram = field(default_factory=Histogram)
    step_drift: float | None = None
    world: int | None = None
    verified_step: int | None = None
    verified_age: float | None = None
    unprotected_tokens: int | None = None
    checkpoint_failures: int | None = None
    checkpoint_bytes_per_second: float | None = None
    next_checkpoint_fits: float | None = None
    disk_full_in: float | None = None
    heartbeat_ages: dict[int, float] = field(default_factory=dict)
    own_ratios: dict[int, float] = field(default_factory=dict)
    loss: float | None = None
    loss_z: float | None = None
    grad_norm: float | None = None
    skipped_steps: int | None = None
    goodput: float | None = None
    ettr: float | None = None
    badput_seconds: dict[str, float] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Severity.__members__, 0))

    def to_json(self) -> dict[str, Any]:
        """JSON values; what is not known is left out, and so is what JSON cannot say (a loss that is no number)."""
        known = {key: value for key, value in asdict(self).items() if value is not None and value != {}}
        return {key: value for key, value in known.items() if not isinstance(value, float) or math.isfinite(value)}
