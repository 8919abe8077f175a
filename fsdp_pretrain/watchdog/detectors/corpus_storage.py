"""Watches whether the node's fetcher gets the blocks of corpora from remote storage."""

from __future__ import annotations

import time
from pathlib import Path

from fsdp_pretrain import fetcher_status
from fsdp_pretrain.fetcher_status import FetcherStatus
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .base import Detector

_REPORTED_AFTER = 15.0
"""Seconds for which a failure that may end by itself is not reported."""
_SILENT = 30.0


class CorpusStorageDetector(Detector):
    """Alarm `corpus-storage/HOST`. `path`: status file of this node's fetcher, in local memory."""

    def __init__(self, alarms: AlarmSink, path: Path, host: str) -> None:
        super().__init__(alarms)
        self._path, self._host, self._key = path, host, f"corpus-storage/{host}"
        self._seen: float | None = None

    def tick(self, now: float) -> None:
        """Judge the status of the fetcher, or its silence."""
        status = fetcher_status.read(self._path)
        if status is not None and time.time() - status.time < _SILENT:
            self._seen = now
            self._judge(status)
        elif self._seen is not None and now - self._seen > _SILENT:
            self.open(
                self._key,
                Severity.WARN,
                f"{self._host}: the fetcher has said nothing for {human_time(now - self._seen)}",
                "no block is fetched; training continues as long as the cache reaches",
                "it is started again by itself; see the log under storage/ in the run directory",
                facts={"host": self._host},
            )

    def _judge(self, status: FetcherStatus) -> None:
        failing = time.time() - status.since
        if not status.problem:
            self.resolve(self._key, f"{self._host}: blocks are fetched again")
        elif status.lasting or failing > _REPORTED_AFTER:
            urgent = status.lasting or not status.ready
            reach = f"the cache has the next {status.ready:_} steps" if status.ready else "training waits"
            self.open(
                self._key,
                Severity.CRIT if urgent else Severity.WARN,
                f"{self._host}: {status.problem} (for {human_time(failing)}); {reach}",
                "training continues as long as the cache reaches, then ends with exit 75 after data.read_timeout",
                "check the storage, the network and the credentials: fetching continues by itself once they work",
                facts={"host": self._host, "ready": status.ready},
            )
