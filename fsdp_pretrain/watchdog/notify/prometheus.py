"""Metrics of a run for Prometheus, by HTTP or in a file for node_exporter.

Unknown values are left out: an alert rule sees a missing series, never a made-up zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from .snapshot import METRICS, Snapshot

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import Metric


class Exporter:
    """Exports snapshots, as a collector of prometheus_client: its Gauge and Counter would keep series that are no
    longer known. A port in use does no harm, see `problem`.

    Args:
        address: `HOST:PORT`, or the path of a file `*.prom`; None: nothing is exported.

    Attributes:
        port: of the HTTP server; None if there is none.
        problem: why it does not export, empty if it does.
    """

    def __init__(self, address: str | None) -> None:
        self._shown: Snapshot | None = None
        self._at = 0.0
        self._server: WSGIServer | None = None
        self._write: Callable[[], None] | None = None
        self.port: int | None = None
        self.problem = ""
        if address is None:
            return
        import prometheus_client  # most runs export no metrics

        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        if address.endswith(".prom"):
            self._write = partial(prometheus_client.write_to_textfile, address, registry)
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

    def collect(self) -> Iterator[Metric]:
        """What is known, in prometheus_client's classes."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._shown is None:
            return
        snapshot = {**self._shown, "pass_age": time.monotonic() - self._at}
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
        """Stop the server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
