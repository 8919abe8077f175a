"""Whether the next checkpoint fits or is late: `plan`, `launch`, `status` and the watchdog agree on the same run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from machines import Disk
from records import commit, step_record
from traps import take_space
from watch import Checkpoints, Watch, write_journal

from fsdp_pretrain.checkpoint.store import MANIFEST, Store
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.launch.preflight import preflight
from fsdp_pretrain.plan import plan
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir, now
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.views.status import inspect

pytestmark = pytest.mark.quick
WARN, CRIT = Severity.WARN, Severity.CRIT


def begin(config: Path, **status: Any) -> tuple[Config, RunDir]:
    """A run directory as a start leaves it, with a job that lives on another host."""
    loaded = load(config)
    run = RunDir(loaded.run.dir)
    for name in ("segments", "control", "watchdog"):
        (run.path / name).mkdir(parents=True)
    run.config.write_text(loaded.to_toml())
    long_ago = (datetime.now(UTC) - timedelta(days=9)).isoformat().replace("+00:00", "Z")
    state_files.write(
        run.status, {"state": "running", "host": "elsewhere", "started": long_ago, "heartbeat": now(), **status}
    )
    return loaded, run


@dataclass(frozen=True)
class State:
    """Contents of a disk of 8 MiB: checkpoints of 1 MB, a save in flight, and free bytes."""

    leave: int | None = None
    checkpoints: int = 1
    writing: int = 0
    inodes: int = 0


@pytest.mark.parametrize(
    ("state", "severity", "says"),
    [
        (State(), None, ""),
        (State(leave=2_500_000), WARN, "2 more checkpoints fit"),
        (State(leave=900_000), CRIT, "the next checkpoint does not fit"),
        (State(leave=1_060_000), CRIT, "the next checkpoint does not fit"),  # by bytes it would fit
        (State(leave=300_000, writing=900_000), WARN, "1 more checkpoint fits"),
        (State(leave=500_000, checkpoints=4), WARN, "fits only when older ones are deleted"),
        (State(inodes=104), CRIT, "the next checkpoint does not fit"),
    ],
    ids=str,
)
def test_whether_it_fits(
    lab: Any, watch: Watch, small_disk: Disk, state: State, severity: Severity | None, says: str
) -> None:
    disk = small_disk(f"8m,nr_inodes={state.inodes or 1000}")
    config, run = begin(lab.config())
    run.checkpoints.symlink_to(disk)  # further writes go elsewhere
    write_journal(run.path, {"kind": "start", "checkpoint_bytes": 12 * 100_000, "world": 1})
    store = Store(run.checkpoints)
    for step in range(1, state.checkpoints + 1):
        commit(store, step, {"data": bytes(1_000_000)})
    if state.writing:
        (store.begin(9) / "data").write_bytes(bytes(state.writing))
    if state.leave is not None:
        take_space(str(disk / "hog"), state.leave)

    Checkpoints(watch, run.path)
    watch.advance()
    watch.advance(61)
    reported = {alarm.summary: alarm.severity for alarm in watch.alarms}
    assert list(reported.values()) == ([severity] if severity else []) and says in "".join(reported)
    assert {text: level for level, text in inspect(run).problems if "checkpoint" in text} == reported
    assert [text for text in plan.plan(config).warnings if "checkpoint" in text] == list(reported)
    if severity is CRIT:
        with pytest.raises(ConfigError) as refused:
            preflight(config, run, "2")
        assert refused.value.cause in reported
    else:
        assert [text for text in preflight(config, run, "2") if "fit" in text] == list(reported)


@pytest.mark.parametrize(
    ("every", "steps", "age", "severity"),
    [
        ("100 steps", 160, 200, WARN),
        ("100 steps", 160, 110, None),  # many steps in a short time
        ("100 steps", 120, 900, None),  # few in a long one
        ("10 steps", 45, 20, None),  # the watchdog checks once a minute
        ("800 samples", 260, 260, CRIT),
        ("25_600 tokens", 450, 450, CRIT),
        ("10_000 steps", 22_000, 22_000, CRIT),  # older than six hours
    ],
)
def test_whether_it_is_late(
    lab: Any, watch: Watch, every: str, steps: int, age: float, severity: Severity | None
) -> None:
    """One second per step, 8 samples of 32 tokens each, since the checkpoint of step 100."""
    counters = {"step": 100 + steps, "consumed": 8 * (100 + steps), "tokens": 256 * (100 + steps)}
    config = lab.config(checkpoint={"every": every}, train={"duration": "90_000 steps"})
    _, run = begin(config, **counters, iteration_seconds=1.0)
    path = commit(Store(run.checkpoints), 100).path / MANIFEST
    committed = (datetime.now(UTC) - timedelta(seconds=age)).isoformat().replace("+00:00", "Z")
    state_files.write(path, {**json.loads(path.read_text()), "committed": committed})

    seconds = {"iteration": 1.0, "data": 0.0, "checkpoint": 0.0}
    checkpoints = Checkpoints(watch, run.path, every=every).age
    checkpoints.step(step_record(100, seconds=seconds))
    watch.advance()
    for step in (*range(101, 165), 100 + steps):
        checkpoints.step(step_record(step, seconds=seconds))
    watch.advance(age)
    reported = [alarm.severity for alarm in watch.alarms if alarm.key == "checkpoint-age"]
    assert reported == ([severity] if severity else [])
    assert [
        level for level, text in inspect(run).problems if text.startswith("no checkpoint was verified for")
    ] == reported
