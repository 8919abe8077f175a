"""What the watchdog knows of a run at one instant, as plain values: for metrics, for messages. No torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from fsdp_pretrain.severity import Severity

if TYPE_CHECKING:
    from fsdp_pretrain.record.step_record import StepRecord


@dataclass(frozen=True)
class Metric:
    """How an attribute of a snapshot is exported: name (a counter's ends in `_total`), help, and the label for the keys
    of a dictionary."""

    name: str
    help: str
    label: str | None = None


def _metric(name: str, text: str, label: str | None = None) -> dict[str, Metric]:
    return {"metric": Metric(name, text, label)}


def _scalar(name: str, text: str) -> Any:
    return field(default=None, metadata=_metric(name, text))


@dataclass
class Snapshot:
    """A run at one instant. None and empty: not known, and not exported. Ages and times are seconds.

    Attributes:
        segment, segment_steps: number of the present start, and its steps.
        world: ranks.
    """

    run: str
    segment: int | None = None
    pass_age: float = field(
        default=0.0, metadata=_metric("watchdog_pass_age_seconds", "Since the watchdog's last full pass.")
    )
    step: int | None = _scalar("train_step", "Optimiser steps of the run.")
    total_steps: int | None = _scalar("train_steps_planned", "Optimiser steps that the run will have.")
    segment_steps: int | None = None
    tokens: int | None = _scalar("train_tokens_total", "Tokens trained.")
    step_seconds: float | None = _scalar("train_step_seconds", "Time of the last step.")
    step_drift: float | None = _scalar("train_step_drift_ratio", "Step time over its baseline.")
    world: int | None = None
    verified_step: int | None = _scalar("ckpt_last_verified_step", "Step of the newest verified checkpoint.")
    verified_age: float | None = _scalar("ckpt_last_verified_age_seconds", "Age of the newest verified checkpoint.")
    unprotected_tokens: int | None = _scalar("ckpt_unprotected_tokens", "Tokens trained since it.")
    checkpoint_failures: int | None = _scalar("ckpt_failures_total", "Failed saves.")
    checkpoint_bytes_per_second: float | None = _scalar("ckpt_write_bytes_per_second", "Speed of the last save.")
    next_checkpoint_fits: float | None = _scalar("disk_next_checkpoint_fits", "How many more checkpoints fit.")
    disk_full_in: float | None = _scalar("disk_seconds_to_full", "Forecast of a full disk.")
    heartbeat_ages: dict[int, float] = field(
        default_factory=dict, metadata=_metric("rank_heartbeat_age_seconds", "Since a rank's last beat.", "rank")
    )
    own_ratios: dict[int, float] = field(
        default_factory=dict, metadata=_metric("rank_own_ratio", "A rank's own time over the median of all.", "rank")
    )
    loss: float | None = _scalar("loss", "Training loss of the last step read.")
    loss_z: float | None = _scalar("loss_zscore", "Its distance from what was expected, robust deviations.")
    grad_norm: float | None = _scalar("grad_norm", "Gradient norm before clipping.")
    group_grad_norms: dict[str, float] = field(
        default_factory=dict, metadata=_metric("group_grad_norm", "The same by group of parameters.", "group")
    )
    skipped_steps: int | None = _scalar("skipped_steps_total", "Steps whose update was skipped.")
    open: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(Severity.__members__, 0),
        metadata=_metric("incidents_open", "Open alarms, by severity.", "severity"),
    )

    def see_groups(self, record: StepRecord) -> None:
        """Take over the statistics of groups, if a record has them."""
        if record.groups is not None:
            norms = {name: group.grad_norm for name, group in record.groups.items()}
            self.group_grad_norms = {name: value for name, value in norms.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """JSON values, without unknown values and those that JSON cannot hold (a non-finite loss)."""
        known = {key: value for key, value in asdict(self).items() if value is not None and value != {}}
        return {key: value for key, value in known.items() if not isinstance(value, float) or math.isfinite(value)}


METRICS: dict[Metric, str] = {each.metadata["metric"]: each.name for each in fields(Snapshot) if each.metadata}
"""Metric -> attribute of a snapshot."""
