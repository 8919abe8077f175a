"""Exports metrics of a run: for Prometheus, by HTTP or in a file for node_exporter, and in a JSON file.

Unknown values are left out, so that an alert rule sees a missing series instead of a made-up zero.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir, now

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import Metric as Family

Snapshot = dict[str, Any]
"""Values of a run at one instant, by the keys of `METRICS`; unknown values are None or missing, and not exported."""


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


def snapshot_file(run: RunDir) -> Path:
    """The file of a run's last snapshot, with its time: for `fsdp-pretrain status`, on any machine."""
    return run.path / "watchdog/snapshot.json"


def write_snapshot(run: RunDir, snapshot: Snapshot) -> None:
    """Write the values that are known and that JSON can hold. Raises OSError."""
    known = {key: value for key, value in snapshot.items() if value is not None and value != {}}
    numbers = {key: value for key, value in known.items() if not isinstance(value, float) or math.isfinite(value)}
    state_files.write(snapshot_file(run), {"time": now(), "host": socket.gethostname(), **numbers})


class Exporter:
    """Exports snapshots, as a collector of prometheus_client: its Gauge and Counter would keep series that are no
    longer known. If the port is in use, nothing is exported, see `problem`.

    Args:
        address: `HOST:PORT`, or the path of a file `*.prom`; None: nothing is exported.

    Attributes:
        port: port of the HTTP server; None if there is none.
        problem: why it does not export; empty if it does.
    """

    def __init__(self, address: str | None) -> None:
        self._shown: Snapshot | None = None
        self._at = 0.0
        self._server: WSGIServer | None = None
        self._write: Callable[[], None] | None = None
        self._file: Path | None = None
        self.port: int | None = None
        self.problem = ""
        if address is None:
            return
        import prometheus_client  # most runs export no metrics

        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        if address.endswith(".prom"):
            self._write = partial(prometheus_client.write_to_textfile, address, registry)
            self._file = Path(address)
            return
        host, _, port = address.rpartition(":")
        try:
            self._server, _ = prometheus_client.start_http_server(int(port), host, registry)
            self.port = self._server.server_port
        except OSError as error:
            self.problem = f"cannot listen on {address}: {error.strerror}"

    def update(self, snapshot: Snapshot) -> None:
        """Export the result of a pass: the values of `METRICS`, and the `run`."""
        self._shown, self._at = {**snapshot}, time.monotonic()
        if self._write is not None:
            try:
                self._write()
                self.problem = ""
            except OSError as error:
                self.problem = f"cannot write {error.filename}: {error.strerror}"

    def collect(self) -> Iterator[Family]:
        """The known values, as metrics of prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._shown is None:
            return
        # In a file it would always be new; node_exporter tells how old the file is.
        snapshot = {**self._shown, "pass_age": None if self._file else time.monotonic() - self._at}
        for key, source in METRICS.items():
            family = CounterMetricFamily if source.name.endswith("_total") else GaugeMetricFamily
            metric = family(source.name, source.help, labels=["run", *([source.label] if source.label else [])])
            value = snapshot.get(key)
            known = value.items() if source.label and value else [] if value is None else [(None, value)]
            for label, one in sorted(known):
                metric.add_metric([snapshot["run"], *([str(label)] if source.label else [])], one)
            if metric.samples:
                yield metric

    def close(self) -> None:
        """Stop the server, or remove the file: its values would be taken for those of a run that stands."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)
