"""A watchdog that was killed and restarted while the ranks went on: it repeats nothing, and misses nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from laboratory import tiny
from records import step_record

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.step_record import HealthFinding, StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog import leader as leader_module
from fsdp_pretrain.watchdog.detectors.base import Detector
from fsdp_pretrain.watchdog.hang.peers import PeerNodes
from fsdp_pretrain.watchdog.hang.rank_monitor import RankMonitor
from fsdp_pretrain.watchdog.leader import Leader
from fsdp_pretrain.watchdog.notify.alarms import alarms_file
from fsdp_pretrain.watchdog.registry import build_detectors

pytestmark = pytest.mark.quick
LEVEL, SPIKE = "loss/level", "loss/spike"


class Started:
    """A start of a run, whose record the test writes, and the agents that judge it one after the other."""

    def __init__(self, path: Path) -> None:
        self.run, self._path = RunDir(path / "run"), path
        self._segment = self.run.new_segment()
        self._config = Config.model_validate(tiny("x", self.run.path, "/nowhere"))
        self._ranks = RankMonitor(range(1), path / "pages", os.getpid())

    def train(self, steps: range, **findings: HealthFinding) -> None:
        """Write the records of these steps, with findings by the step: `at_50`."""
        with (self._segment / "metrics.jsonl").open("a") as file:
            for step in steps:
                health = [findings[f"at_{step}"]] if f"at_{step}" in findings else []
                waited: dict[str, Any] = {
                    "iteration": 60.0,
                    "data": 59.0 if 60 <= step < 80 else 0.0,
                    "checkpoint": 0.0,
                }
                file.write(step_record(step, health=health, seconds=waited).to_line() + "\n")

    def watch(self, *more: Detector, acknowledge: str = "") -> list[str]:
        """What another agent adds to the alarms until it is killed: `state key`."""
        known = len(self._told())
        leader = Leader(self._config, self._ranks, 1)
        nodes = PeerNodes(self._path, 0, 1, "")
        detectors = [*build_detectors(self._config, leader.alarms, self._ranks, nodes, 1, leader.judged), *more]
        leader.teach(detectors)
        for record in leader.new_records():
            for detector in detectors:
                detector.step(record)
        leader.alarms.acknowledge(acknowledge)
        leader.end_pass(detectors)
        return [line for line in self._told()[known:] if "gpu-blind" not in line]

    def _told(self) -> list[str]:
        return list(_transitions(alarms_file(self.run)))


def _transitions(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines() if path.exists() else ():
        alarm = json.loads(line)
        yield f"{alarm['state']} {alarm['key']}"


def finding(key: str, *, resolved: bool = False) -> HealthFinding:
    return HealthFinding(key=key, severity=Severity.WARN, summary="up", resolved=resolved)


@pytest.fixture
def started(tmp_path: Path) -> Started:
    return Started(tmp_path)


def test_what_was_judged_is_not_told_again(started: Started) -> None:
    """Open alarms stay as they are, acknowledged ones too; what came while no agent ran is judged."""
    started.train(range(1, 201), at_50=finding(LEVEL), at_60=finding(SPIKE), at_160=finding(SPIKE, resolved=True))
    told = started.watch(acknowledge=LEVEL)
    waited = {"open data-wait", "resolved data-wait"}
    findings = {f"open {LEVEL}", f"acknowledged {LEVEL}", f"open {SPIKE}", f"resolved {SPIKE}"}
    assert len(told) == 6 and {*told} == findings | waited
    assert started.watch() == []
    started.train(range(201, 210), at_203=finding(SPIKE))
    assert started.watch() == [f"open {SPIKE}"]
    assert started.watch() == []


def test_a_long_history_is_not_read_again(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detectors learn from the first and the last records; they are given the new ones once."""

    class Steps(Detector):
        def __init__(self) -> None:
            self.learned, self.judged = list[int](), list[int]()

        def learn(self, record: StepRecord) -> None:
            self.learned.append(record.step)

        def step(self, record: StepRecord) -> None:
            self.judged.append(record.step)

    started.train(range(1, 201), at_50=finding(LEVEL))
    assert started.watch() == [f"open {LEVEL}", "open data-wait", "resolved data-wait"]
    started.train(range(201, 204))
    length = len(step_record(150).to_line())
    monkeypatch.setattr(leader_module, "_LEARNED", 10 * length)
    steps = Steps()
    assert started.watch(steps) == []
    assert steps.learned[0] == 1 and steps.learned[1:] == list(range(steps.learned[1], 201))
    assert 191 <= steps.learned[1] <= 193 and steps.judged == [201, 202, 203]
