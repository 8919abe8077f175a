"""Metrics of a run for Prometheus: by HTTP, and as a file for node_exporter's textfile collector. No torch.

Unknown values are left out: an alert rule sees a missing series, never a made-up zero.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from fsdp_pretrain.config.notify import PrometheusSection

from .snapshot import METRICS, Snapshot

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Metric

_TEXTFILE_SECONDS = 15.0


class Exporter:
    """Exports snapshots, as a collector of prometheus_client: its Gauge and Counter would keep series that are no
    longer known. A port in use or an unwritable file does no harm, see `problem`.

    Attributes:
        port: of the HTTP server; None if there is none.
        problem: why it does not export, empty if it does.
    """

    def __init__(self, section: PrometheusSection) -> None:
        self._textfile, self._written = section.textfile, -float("inf")
        self._shown: Snapshot | None = None
        self._at = 0.0
        self._registry: CollectorRegistry | None = None
        self._server: WSGIServer | None = None
        self.port: int | None = None
        self._refused = self.problem = ""
        if section.port is None and section.textfile is None:
            return
        import prometheus_client  # most runs export no metrics

        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        if section.port is not None:
            try:
                self._server, _ = prometheus_client.start_http_server(section.port, section.host, self._registry)
                self.port = self._server.server_port
            except OSError as error:
                self._refused = f"cannot listen on {section.host}:{section.port}: {error.strerror}"
        self.problem = self._refused

    def update(self, snapshot: Snapshot) -> None:
        """Export the result of a pass. The snapshot must not be changed afterwards."""
        self._shown, self._at = snapshot, time.monotonic()
        if self._registry is None or self._textfile is None or self._at - self._written < _TEXTFILE_SECONDS:
            return
        from prometheus_client import write_to_textfile

        self._written = self._at
        try:
            write_to_textfile(str(self._textfile), self._registry)
            self.problem = self._refused
        except OSError as error:
            self.problem = f"cannot write {self._textfile}: {error.strerror}"

    def collect(self) -> Iterator[Metric]:
        """What is known, in prometheus_client's classes."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._shown is None:
            return
        snapshot = replace(self._shown, pass_age=time.monotonic() - self._at)
        for source, attribute in METRICS.items():
            family = CounterMetricFamily if source.name.endswith("_total") else GaugeMetricFamily
            metric = family(source.name, source.help, labels=["run", *([source.label] if source.label else [])])
            value = getattr(snapshot, attribute)
            known = value.items() if source.label else [] if value is None else [(None, value)]
            for key, one in sorted(known):
                metric.add_metric([snapshot.run, *([str(key)] if source.label else [])], one)
            if metric.samples:
                yield metric

    def close(self) -> None:
        """Stop the server; remove the text file, or its last values would be scraped indefinitely."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._textfile is not None:
            with contextlib.suppress(OSError):
                self._textfile.unlink(missing_ok=True)
