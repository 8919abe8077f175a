"""Numeric faults in the record of a run, through the trainer's verdicts, become alarms."""

from __future__ import annotations

import json
from typing import Any

import pytest
from records import parsed, step_record

from fsdp_pretrain.record.step_record import StepRecord


def record(step: int, **changes: Any) -> StepRecord:
    """The record of a step; no two losses are bitwise equal."""
    return step_record(step, **{"loss": {"sum": 512 + step * 1e-9, "count": 256}, "grad_norm": 1.0, **changes})


def scales(overflows: str) -> list[StepRecord]:
    """Steps of a run in fp16; O overflows and halves the scale."""
    found, scale = [], 2.0**16
    for step, event in enumerate(overflows, 1):
        found.append(record(step, loss_scale=scale, skipped=event == "O"))
        scale /= 2 if event == "O" else 1
    return found


CASES: dict[str, tuple[list[StepRecord], list[tuple[str, str, str]]]] = {
    "scale collapses": (scales("." * 200 + "O.O.O.O.O.O" + "." * 20), [("scale/collapse", "open", "CRIT")]),
    "scale falls now and then": (scales(("." * 60 + "O") * 5), []),
    "norm stands out in single steps": (
        [record(n, grad_norm=1 + 0.1 * ((n * 7919) % 97 / 97) + (19 if n % 150 == 149 else 0)) for n in range(1, 900)],
        [],
    ),
}


@pytest.mark.shows("F44", "F49")
@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
def test_numbers_become_alarms(lab: Any, case: str) -> None:
    """Through the trainer's verdicts and the watchdog's reading of them, from WARN on."""
    from fsdp_pretrain.config.config import load
    from fsdp_pretrain.health.monitor import Health
    from fsdp_pretrain.severity import Severity
    from fsdp_pretrain.watchdog.agent.leader import HealthAlarms
    from fsdp_pretrain.watchdog.notify.alarms import Alarm, Alarms

    records, expected = CASES[case]
    config = load(lab.config(optimizer={"lr": 1e-3, "min_lr": None, "warmup": None, "curve": "constant"}))
    health, reported = Health(config), list[tuple[str, str, str]]()

    def tell(alarm: Alarm) -> None:
        if alarm.severity > Severity.INFO:
            reported.append((alarm.key, alarm.state, alarm.severity.name))
            assert numbers.is_written_by_trainer(alarm)  # whose line in the journal is the only one

    alarms = Alarms(lab.path / "alarms.jsonl", tell)
    numbers = HealthAlarms(alarms)
    for entry in records:
        found = entry.model_copy(update={"health": health.step(entry).findings})
        numbers.step(parsed(json.loads(found.to_line())))
    assert reported == expected
