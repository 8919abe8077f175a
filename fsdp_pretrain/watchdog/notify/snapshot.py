"""What the watchdog exports of a run: for Prometheus, and in `RUN/watchdog/snapshot.json`."""

from __future__ import annotations

from typing import Any, NamedTuple

Snapshot = dict[str, Any]
"""A run at one instant, by the keys of `METRICS`; a value that is not known is None or missing, and not exported."""


class Metric(NamedTuple):
    """How a value is exported: name (a counter's ends in `_total`), help, and the label for the keys of a
    dictionary."""

    name: str
    help: str
    label: str | None = None


METRICS = {
    "pass_age": Metric("watchdog_pass_age_seconds", "Since the watchdog's last full pass."),
    "step": Metric("train_step", "Optimiser steps of the run."),
    "total_steps": Metric("train_steps_planned", "Optimiser steps that the run will have."),
    "tokens": Metric("train_tokens_total", "Tokens trained."),
    "step_seconds": Metric("train_step_seconds", "Time of the last step."),
    "step_drift": Metric("train_step_drift_ratio", "Step time over its baseline."),
    "verified_step": Metric("ckpt_last_verified_step", "Step of the newest verified checkpoint."),
    "verified_age": Metric("ckpt_last_verified_age_seconds", "Age of the newest verified checkpoint."),
    "unprotected_tokens": Metric("ckpt_unprotected_tokens", "Tokens trained since it."),
    "checkpoint_failures": Metric("ckpt_failures_total", "Failed saves."),
    "checkpoint_bytes_per_second": Metric("ckpt_write_bytes_per_second", "Speed of the last save."),
    "next_checkpoint_fits": Metric("disk_next_checkpoint_fits", "How many more checkpoints fit."),
    "disk_full_in": Metric("disk_seconds_to_full", "Forecast of a full disk."),
    "heartbeat_ages": Metric("rank_heartbeat_age_seconds", "Since a rank's last beat.", "rank"),
    "loss": Metric("loss", "Training loss of the last step read."),
    "grad_norm": Metric("grad_norm", "Gradient norm before clipping."),
    "skipped_steps": Metric("skipped_steps_total", "Steps whose update was skipped."),
    "open": Metric("incidents_open", "Open alarms, by severity.", "severity"),
}
