"""The base class of all detectors: each watches one thing, and opens, updates and resolves the alarms about it.

Detectors only observe. They receive the metrics records in order and one `tick` per pass, and report only through
`open` and `resolve`, so a detector can be replayed over an old record. Only `AlarmSink` knows which alarms are open,
because a detector would lose such a list in a restart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink


class Detector:
    """Base of all detectors.

    Attributes:
        alarms: where incidents are opened and resolved.
        last: the last record of this start; None before the first.
    """

    def __init__(self, alarms: AlarmSink) -> None:
        self.alarms = alarms
        self.last: StepRecord | None = None
        self._learning = False

    @property
    def at(self) -> int | None:
        """The last recorded step of this start; None before the first."""
        return None if self.last is None else self.last.step

    def step(self, record: StepRecord) -> None:
        """The trainer added a metrics record. Called once per record, in order."""
        self.last = record

    def learn(self, record: StepRecord) -> None:
        """Like `step`, of a record that an agent before this one has judged: it opens and resolves nothing."""
        with self.learning():
            self.step(record)

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Open and resolve nothing meanwhile: an agent before this one has done so."""
        self._learning = True
        try:
            yield
        finally:
            self._learning = False

    def tick(self, now: float) -> None:
        """A pass of the watchdog, at `now` in seconds of `time.monotonic()`. Must never block."""

    def figures(self) -> dict[str, Any]:
        """Metrics of the run that this detector knows, by keys of `notify.metrics.METRICS`."""
        return {}

    def open(
        self,
        key: str,
        severity: Severity,
        summary: str,
        effect: str = "",
        remedy: str = "",
        *,
        step: int | None = None,
        **more: Any,
    ) -> None:
        """Open the alarm, raise its severity, or update it.

        Args:
            effect, remedy: if empty, an open alarm keeps its own.
            step: step of the run; None: the last recorded one.
            more: further fields of `Alarm` (`action`, `facts`), and `revised`.
        """
        if self._learning:
            return
        more |= {name: text for name, text in (("effect", effect), ("remedy", remedy)) if text}
        self.alarms.open(key, severity, summary, step=self.at if step is None else step, **more)

    def resolve(self, key: str, summary: str, *, step: int | None = None) -> None:
        """Resolve the alarm, if it is open."""
        if not self._learning:
            self.alarms.resolve(key, summary, step=self.at if step is None else step)

    def resolve_others(self, detector: str, remaining: Collection[str], summary: str) -> None:
        """Resolve all open alarms `detector/...` whose keys are not in `remaining`."""
        for key in self.alarms.open_keys():
            if key.partition("/")[0] == detector and key not in remaining:
                self.resolve(key, summary)
