"""The figures of a run for Prometheus: by HTTP, and as a file for node_exporter's textfile collector. No torch.

`/metrics` in Prometheus' text format, `/healthz` (503 when the watchdog stopped passing), `/status` as JSON. What is
not known is left out: an alert rule sees a missing series, never a made-up zero.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from ..notify_sections import PrometheusSection
from ..record.files import replace_file
from ..severity import Severity
from .snapshot import Snapshot

_TEXTFILE_SECONDS = 15.0
Samples = Iterable[tuple[dict[str, Any], float | None]]


def _one(name: str) -> Callable[[Snapshot], Samples]:
    return lambda snapshot: [({}, getattr(snapshot, name))]


def _many(name: str, label: str) -> Callable[[Snapshot], Samples]:
    return lambda snapshot: [({label: key}, value) for key, value in sorted(getattr(snapshot, name).items())]


def _open(snapshot: Snapshot) -> Samples:
    return [({"severity": severity.name}, snapshot.open.get(severity.name, 0)) for severity in Severity]


METRICS: dict[str, tuple[str, str, Callable[[Snapshot], Samples]]] = {
    "train_step": ("gauge", "Optimiser steps of the run.", _one("step")),
    "train_steps_planned": ("gauge", "Optimiser steps that the run will have.", _one("total_steps")),
    "train_tokens_total": ("counter", "Tokens trained.", _one("tokens")),
    "train_step_drift_ratio": ("gauge", "Step time over its baseline.", _one("step_drift")),
    "ckpt_last_verified_step": ("gauge", "Step of the newest verified checkpoint.", _one("verified_step")),
    "ckpt_last_verified_age_seconds": ("gauge", "Age of the newest verified checkpoint.", _one("verified_age")),
    "ckpt_unprotected_tokens": ("gauge", "Tokens trained since it.", _one("unprotected_tokens")),
    "ckpt_failures_total": ("counter", "Failed saves.", _one("checkpoint_failures")),
    "ckpt_write_bytes_per_second": ("gauge", "Speed of the last save.", _one("checkpoint_bytes_per_second")),
    "disk_next_checkpoint_fits": ("gauge", "How many more checkpoints fit.", _one("next_checkpoint_fits")),
    "disk_seconds_to_full": ("gauge", "Forecast of a full disk.", _one("disk_full_in")),
    "rank_heartbeat_age_seconds": ("gauge", "Since a rank's last beat.", _many("heartbeat_ages", "rank")),
    "rank_own_ratio": ("gauge", "A rank's own time over the median of all.", _many("own_ratios", "rank")),
    "loss": ("gauge", "Training loss of the last step read.", _one("loss")),
    "loss_zscore": ("gauge", "Its distance from what was expected, robust deviations.", _one("loss_z")),
    "grad_norm": ("gauge", "Gradient norm before clipping.", _one("grad_norm")),
    "skipped_steps_total": ("counter", "Steps whose update was skipped.", _one("skipped_steps")),
    "goodput_ratio": ("gauge", "Share of the wall clock spent on steps that were kept.", _one("goodput")),
    "ettr_ratio": ("gauge", "Productive time over available time.", _one("ettr")),
    "badput_seconds_total": ("counter", "Wall clock lost, by state.", _many("badput_seconds", "state")),
    "incidents_open": ("gauge", "Open alarms, by severity.", _open),
    "watchdog_pass_age_seconds": ("gauge", "Since the watchdog's last full pass.", _one("pass_age")),
}
"""Name -> (type, help, samples). `train_step_seconds`, a histogram, comes beside them."""


def render(snapshot: Snapshot) -> str:
    """The text format of Prometheus."""
    lines = []
    for name, (kind, text, samples) in METRICS.items():
        known = [(labels, value) for labels, value in samples(snapshot) if value is not None]
        if known:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [_line(name, snapshot, labels, value) for labels, value in known]
    rows = snapshot.step_seconds.cumulative()
    name = "train_step_seconds"
    lines += [f"# HELP {name} Time of a step of the present start.", f"# TYPE {name} histogram"]
    lines += [_line(f"{name}_bucket", snapshot, {"le": bound}, count) for bound, count in rows]
    lines += [_line(f"{name}_sum", snapshot, {}, snapshot.step_seconds.total)]
    lines += [_line(f"{name}_count", snapshot, {}, rows[-1][1])]
    return "\n".join(lines) + "\n"


def _line(name: str, snapshot: Snapshot, labels: dict[str, Any], value: float) -> str:
    pairs = ",".join(f'{key}="{_escape(str(text))}"' for key, text in {"run": snapshot.run, **labels}.items())
    shown = ("+Inf" if value > 0 else "-Inf" if value < 0 else "NaN") if not math.isfinite(value) else repr(value)
    return f"{name}{{{pairs}}} {shown}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Exporter:
    """Shows snapshots. A port that is taken or a file that cannot be written harms nothing, see `problem`.

    Args:
        section: where to show them.

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
        """End the server; remove the text file, or its last figures would be scraped for ever."""
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
        """Without the name of the address, which HTTPServer looks up, and nobody reads."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away is no news."""


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
