"""Metrics of a run for Prometheus: by HTTP, and as a file for node_exporter's textfile collector. No torch.

`/metrics` in Prometheus' text format, `/healthz` (503 when passes of the watchdog are overdue), `/status` as JSON.
Unknown values are left out: an alert rule sees a missing series, never a made-up zero.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from fsdp_pretrain.config.notify import PrometheusSection
from fsdp_pretrain.record.files import replace_file

from .snapshot import METRICS, Snapshot

if TYPE_CHECKING:
    from prometheus_client import Metric

_TEXTFILE_SECONDS = 15.0


def render(snapshot: Snapshot) -> str:
    """The text format of Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest  # most runs export no metrics

    registry = CollectorRegistry()
    registry.register(_Collector(snapshot))
    return generate_latest(registry).decode()


class _Collector:
    """A snapshot as a prometheus_client collector. Its Gauge and Counter would keep series that are no longer known,
    and add creation times."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """What is known."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        run = self._snapshot.run
        for source, attribute in METRICS.items():
            family = CounterMetricFamily if source.name.endswith("_total") else GaugeMetricFamily
            metric = family(source.name, source.help, labels=["run", *([source.label] if source.label else [])])
            value = getattr(self._snapshot, attribute)
            known = value.items() if source.label else [] if value is None else [(None, value)]
            for key, one in sorted(known):
                metric.add_metric([run, *([str(key)] if source.label else [])], one)
            if metric.samples:
                yield metric
        steps = self._snapshot.step_seconds
        times = HistogramMetricFamily("train_step_seconds", "Time of a step of the present start.", labels=["run"])
        times.add_metric([run], steps.cumulative(), steps.total)
        yield times


class Exporter:
    """Exports snapshots. A port in use or an unwritable file does no harm, see `problem`.

    Attributes:
        port: of the HTTP server; None if there is none.
        problem: why it does not export, empty if it does.
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

    def update(self, snapshot: Snapshot) -> None:
        """Export the result of a pass. The snapshot must not be changed afterwards."""
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
        """The last snapshot, with its present age."""
        if self._shown is None:
            return None
        snapshot, at = self._shown
        return replace(snapshot, pass_age=snapshot.pass_age + time.monotonic() - at)

    def close(self) -> None:
        """Stop the server; remove the text file, or its last values would be scraped indefinitely."""
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
        """Bind without HTTPServer's reverse lookup of the host name, which may hang and is not needed."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do not log clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 5
    server: _Server

    def do_GET(self) -> None:
        """`/metrics`, `/healthz` and `/status`."""
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
        """Do not log requests."""
