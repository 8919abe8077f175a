"""The figures of a run for Prometheus: by HTTP, and as a file for node_exporter's textfile collector. No torch.

`/metrics` in Prometheus' text format, `/healthz` (503 when the watchdog stopped passing), `/status` as JSON. What is
not known is left out: an alert rule sees a missing series, never a made-up zero.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from ..notify_sections import PrometheusSection
from ..record.files import replace_file
from .snapshot import Snapshot

if TYPE_CHECKING:
    from prometheus_client import Metric

_TEXTFILE_SECONDS = 15.0


@dataclass(frozen=True)
class _Source:
    """Where a metric comes from: its help, the attribute of `Snapshot`, and the label that tells the values of a
    dictionary apart."""

    help: str
    attribute: str
    label: str | None = None


METRICS = {
    "train_step": _Source("Optimiser steps of the run.", "step"),
    "train_steps_planned": _Source("Optimiser steps that the run will have.", "total_steps"),
    "train_tokens_total": _Source("Tokens trained.", "tokens"),
    "train_step_drift_ratio": _Source("Step time over its baseline.", "step_drift"),
    "ckpt_last_verified_step": _Source("Step of the newest verified checkpoint.", "verified_step"),
    "ckpt_last_verified_age_seconds": _Source("Age of the newest verified checkpoint.", "verified_age"),
    "ckpt_unprotected_tokens": _Source("Tokens trained since it.", "unprotected_tokens"),
    "ckpt_failures_total": _Source("Failed saves.", "checkpoint_failures"),
    "ckpt_write_bytes_per_second": _Source("Speed of the last save.", "checkpoint_bytes_per_second"),
    "disk_next_checkpoint_fits": _Source("How many more checkpoints fit.", "next_checkpoint_fits"),
    "disk_seconds_to_full": _Source("Forecast of a full disk.", "disk_full_in"),
    "rank_heartbeat_age_seconds": _Source("Since a rank's last beat.", "heartbeat_ages", "rank"),
    "rank_own_ratio": _Source("A rank's own time over the median of all.", "own_ratios", "rank"),
    "loss": _Source("Training loss of the last step read.", "loss"),
    "loss_zscore": _Source("Its distance from what was expected, robust deviations.", "loss_z"),
    "grad_norm": _Source("Gradient norm before clipping.", "grad_norm"),
    "skipped_steps_total": _Source("Steps whose update was skipped.", "skipped_steps"),
    "goodput_ratio": _Source("Share of the wall clock spent on steps that were kept.", "goodput"),
    "ettr_ratio": _Source("Productive time over available time.", "ettr"),
    "badput_seconds_total": _Source("Wall clock lost, by state.", "badput_seconds", "state"),
    "incidents_open": _Source("Open alarms, by severity.", "open", "severity"),
    "watchdog_pass_age_seconds": _Source("Since the watchdog's last full pass.", "pass_age"),
}
"""By name, which ends in `_total` for a counter. `train_step_seconds`, a histogram, comes beside them."""


def render(snapshot: Snapshot) -> str:
    """The text format of Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest  # most watchdogs have nobody who reads metrics

    registry = CollectorRegistry()
    registry.register(_Collector(snapshot))
    return generate_latest(registry).decode()


class _Collector:
    """A snapshot as prometheus_client reads it. Its own Gauge and Counter would keep series that are not known any
    more, and add the times at which they were made."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """What is known."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for name, source in METRICS.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(name, source.help, labels=["run", source.label] if source.label else ["run"])
            value = getattr(self._snapshot, source.attribute)
            if source.label:
                for key, one in sorted(value.items()):
                    metric.add_metric([self._snapshot.run, str(key)], one)
            elif value is not None:
                metric.add_metric([self._snapshot.run], value)
            if metric.samples:
                yield metric
        steps = self._snapshot.step_seconds
        times = HistogramMetricFamily("train_step_seconds", "Time of a step of the present start.", labels=["run"])
        times.add_metric([self._snapshot.run], steps.cumulative(), steps.total)
        yield times


class Exporter:
    """Shows snapshots. A port that is taken or a file that cannot be written harms nothing, see `problem`.

    Attributes:
        port: of the HTTP server; None if there is none.
        problem: why it does not show them, empty if it does.
    """

    def __init__(self, section: PrometheusSection) -> None:
        self._section, self.problem = section, ""
        self._shown: tuple[Snapshot, float] | None = None
        self._written: float | None = None
        self._server: ThreadingHTTPServer | None = None
        self.port: int | None = None
        if section.port is not None:
            try:
                self._server = _Server((section.host, section.port), self)
            except OSError as error:
                self.problem = f"cannot listen on {section.host}:{section.port}: {error.strerror}"
                return
            self.port = int(self._server.server_address[1])
            threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def show(self, snapshot: Snapshot) -> None:
        """After every pass: what it found. The snapshot must not be changed any more."""
        at = time.monotonic()
        self._shown = snapshot, at
        if self._section.textfile is None or (self._written is not None and at - self._written < _TEXTFILE_SECONDS):
            return
        self._written = at
        try:
            replace_file(self._section.textfile, render(snapshot))
            if self._server is not None or self._section.port is None:
                self.problem = ""
        except OSError as error:
            self.problem = f"cannot write {self._section.textfile}: {error.strerror}"

    def snapshot(self) -> Snapshot | None:
        """What was shown last, with the age it has by now."""
        if self._shown is None:
            return None
        snapshot, at = self._shown
        return replace(snapshot, pass_age=snapshot.pass_age + time.monotonic() - at)

    def close(self) -> None:
        """End the server; remove the text file, or its last figures would be scraped on and on."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._section.textfile is not None:
            with contextlib.suppress(OSError):
                self._section.textfile.unlink(missing_ok=True)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], exporter: Exporter) -> None:
        self.exporter = exporter
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of the host's name, which may hang and which nobody reads."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away is not logged."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 5
    server: _Server

    def do_GET(self) -> None:
        """Answer one request."""
        snapshot = self.server.exporter.snapshot()
        if self.path not in ("/metrics", "/healthz", "/status"):
            self._answer(404, "text/plain", "there are /metrics, /healthz and /status\n")
        elif snapshot is None:
            self._answer(503, "text/plain", "no pass yet\n")
        elif self.path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", render(snapshot))
        elif self.path == "/status":
            self._answer(200, "application/json", json.dumps(snapshot.to_json()) + "\n")
        else:
            late = snapshot.pass_age > snapshot.pass_due
            text = f"last pass {snapshot.pass_age:.1f}s ago\n"
            self._answer(503 if late else 200, "text/plain", text)

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is http.server's)
        """Requests are not logged."""
