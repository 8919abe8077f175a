"""Detectors of storage with real probes, on a clock of the test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import records
from sight import until

from fsdp_pretrain.config.operations import StorageSection
from fsdp_pretrain.record.files import now
from fsdp_pretrain.record.step_record import StepRecord
from fsdp_pretrain.units import Progress, Seconds
from fsdp_pretrain.watchdog.detectors.base import Detector
from fsdp_pretrain.watchdog.detectors.checkpoint_age import Checkpoints
from fsdp_pretrain.watchdog.notify.alarms import Alarm, Alarms
from fsdp_pretrain.watchdog.probes.client import ProbeServer


class Watch:
    """Detectors, the changes of their alarms, and a clock that only the test moves. Probes are real, so they get time to
    answer after a move."""

    def __init__(self, path: Path) -> None:
        self.alarms = Alarms(path / "alarms.jsonl", lambda alarm, before: self.changes.append(alarm))
        self.changes: list[Alarm] = []
        self.probes, self.now = ProbeServer(), 1000.0
        self.detectors: list[Detector] = []

    def advance(self, seconds: float = 0.0, hanging: int = 0) -> None:
        """Move the clock, and wait until only `hanging` probes are under way."""
        self.now += seconds
        quiet = 0

        def settled() -> bool:
            nonlocal quiet
            for detector in self.detectors:
                detector.tick(self.now)
            quiet = quiet + 1 if self.probes.waiting <= hanging else 0
            return quiet == 2

        until(settled, what=lambda: f"the answers of {self.probes.waiting} probes", every=0.002)

    def transitions(self) -> list[tuple[str, str, str]]:
        return [(alarm.key, alarm.severity.name, alarm.state) for alarm in self.changes]


def record(step: int, seconds: float = 1.0, data: float = 0.0) -> StepRecord:
    return records.step_record(step, seconds={"iteration": seconds, "data": data, "checkpoint": 0.0})


def saves(
    watch: Watch,
    run: Path,
    every: str = "100 steps",
    reached: Callable[[], int] = int,
    prune: bool = True,
    **section: Any,
) -> Checkpoints:
    for name in ("segments", "control"):
        (run / name).mkdir(parents=True, exist_ok=True)
    return Checkpoints(
        watch.alarms,
        StorageSection(**{"interval": Seconds(60), **section}),
        watch.probes,
        run=run,
        segment=2,
        stores=[run / "checkpoints", run / "elsewhere"],
        every=Progress.parse(every),
        prune=prune,
        reached=reached,
    )


def write_journal(run: Path, *entries: dict[str, Any]) -> None:
    with (run / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": now(), "text": "", "segment": 2, **entry}) + "\n" for entry in entries)
