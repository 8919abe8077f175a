"""Notifications about real runs: hangs, hanging evaluations, and numeric faults."""

from __future__ import annotations

import json
import signal
from typing import Any

import psutil
import pytest
from endpoint import SECRET, Endpoint
from records import parsed, step_record
from sight import CALM, steps

from fsdp_pretrain.record.step_record import StepRecord


def heard(endpoint: Endpoint, key: str) -> list[tuple[str, str]]:
    """(state, severity) of the messages about an alarm."""
    return [(body["state"], body["severity"]) for body in endpoint.bodies() if body["key"] == key]


@pytest.mark.shows("F33", "F48")
def test_a_hang_is_told_once_and_its_end_through_an_endpoint_that_was_down(
    lab: Any, helpers: Any, endpoint: Endpoint
) -> None:
    """Delivered once when the endpoint is back; training continues; the secret is nowhere."""
    hang = {"soft": "4 s", "hard": "600 s"}
    watchdog = {"enabled": True, "hang": hang, "pace": CALM, "notify": {"webhook": True}}
    config = lab.config(train={"duration": "100_000 steps"}, checkpoint={"every": "10_000 steps"}, watchdog=watchdog)
    run = lab.path / "run"
    job = lab.start(config, ranks=2)
    helpers.wait_for(lambda: steps(run) > 30, what="steps")
    job.kill(1, signal.SIGSTOP)
    helpers.wait_for(lambda: helpers.alarms(run, "hang"), what="the alarm")
    helpers.wait_for(lambda: helpers.alarms(run, "notify/webhook"), what="a try that has failed")
    assert not endpoint.requests
    endpoint.up()
    helpers.wait_for(lambda: heard(endpoint, "hang"), what="the message")
    job.kill(1, signal.SIGCONT)
    helpers.wait_for(lambda: len(heard(endpoint, "hang")) > 1, what="its end")
    before = steps(run)
    processes = [psutil.Process(pid) for pid in [*helpers.agents(run), *(rank.pid for rank in job.ranks)]]
    shown = " ".join(part for process in processes for part in process.cmdline())
    helpers.wait_for(lambda: steps(run) > before + 20, what="more steps")
    job.kill(0, signal.SIGTERM)
    assert job.wait() == [75, 75]
    helpers.wait_for(lambda: not helpers.agents(run), what="the end of the agent")
    assert heard(endpoint, "hang") == [("open", "CRIT"), ("resolved", "CRIT")]
    assert {body["key"] for body in endpoint.bodies()} <= {"hang", "notify/webhook"}
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert SECRET not in shown and SECRET.encode() not in written and SECRET not in job.output()


# ---------------------------------------------------------------- numbers


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
