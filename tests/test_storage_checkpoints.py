"""Checkpoints as the watchdog sees them: late, failed, slow, damaged, elsewhere; on a clock of the test."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from machines import Disk
from records import commit, step_record
from watch import Checkpoints, Watch, record, write_journal

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.run.requests import take
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.detectors import checkpoint_store
from fsdp_pretrain.watchdog.detectors.checkpoint_age import TrainedCounts
from fsdp_pretrain.watchdog.detectors.judged import Judged

pytestmark = pytest.mark.quick


@pytest.mark.promise("storage-told")
def test_age_of_the_newest_verified_checkpoint(watch: Watch, tmp_path: Path) -> None:
    """100 s between checkpoints: alarm after 150 s, a save requested after 250 s, a stop after 400 s; each once."""
    run = tmp_path / "run"
    store = Store(run / "checkpoints")
    checkpoints = Checkpoints(watch, run, every="100 steps").age
    write_journal(run, {"kind": "start", "world": 64, "checkpoint_bytes": 12 * 1000})

    def train(steps: range) -> None:
        for step in steps:
            checkpoints.step(record(step))
        watch.advance(len(steps))

    for start in range(0, 500, 100):  # healthy
        train(range(start + 1, start + 101))
        commit(store, start + 100)
        watch.advance(1)
    watch.advance(60)
    assert watch.transitions() == [] and checkpoints.protected == 500
    commit(store, 550, verified=False)  # does not count
    seen = []
    for start in range(500, 1000, 70):
        train(range(start + 1, start + 71))
        verbs = sorted(json.loads(path.read_text())["verb"] for path in (run / "control").iterdir())
        seen.append((round(checkpoints.age), [alarm.severity.name for alarm in watch.changes], verbs))
    levels = [seen[n][1:] for n in (1, 2, 4, 7)]
    assert levels == [([], []), (["WARN"], []), (["WARN", "CRIT"], ["save"]), (["WARN", "CRIT"], ["save", "stop"])]
    assert "GPU-hours" in watch.changes[1].effect and "tokens" in watch.changes[1].effect
    asked = {(request.by, request.reason) for request in take(run / "control")}
    assert asked == {("the watchdog", "no new verified checkpoint")}
    commit(store, 1060)
    train(range(1061, 1130))
    assert watch.transitions()[-1] == ("checkpoint-age", "CRIT", "resolved")


def test_a_shorter_interval_counts_from_the_next_save(watch: Watch, tmp_path: Path) -> None:
    """Set 900 steps after a save, it makes nothing late that is saved within 100."""
    run = tmp_path / "run"
    checkpoints = Checkpoints(watch, run, every="1000 steps").age
    write_journal(run, {"kind": "start", "world": 64, "checkpoint_bytes": 12 * 1000})

    def train(steps: range) -> list[str]:
        for step in steps:
            checkpoints.step(record(step))
        watch.advance(len(steps))
        return [alarm.severity.name for alarm in watch.changes]

    assert train(range(1, 901)) == []
    write_journal(run, {"kind": "control", "consumed": 900 * 8, "entry": {"checkpoint": {"every": "100 steps"}}})
    assert train(range(901, 1000)) == [] and not list((run / "control").iterdir())
    commit(Store(run / "checkpoints"), 1000, consumed=1000 * 8)
    watch.advance(61)
    assert train(range(1001, 1061)) == [] and train(range(1061, 1161)) == ["WARN"]


def test_a_repaired_save_is_not_told_again_by_a_restarted_watchdog(watch: Watch, tmp_path: Path) -> None:
    """It judges only what the one before it had not: here a second failure."""
    run, judged = tmp_path / "run", Judged(2)
    failed, saved = {"kind": "checkpoint-failed"}, {"kind": "checkpoint", "seconds": 1.0, "bytes": 12000}
    Checkpoints(watch, run, judged=judged)
    write_journal(run, {**failed, "step": 100}, *({**saved, "step": step} for step in range(101, 111)))
    watch.advance(61)
    assert watch.transitions() == [("checkpoint-failed", "CRIT", "open"), ("checkpoint-failed", "CRIT", "resolved")]
    write_journal(run, {**failed, "step": 200})
    again = Checkpoints(watch, run, judged=judged).saves
    watch.advance(61)
    assert watch.transitions()[2:] == [("checkpoint-failed", "CRIT", "open")]
    assert again.figures()["checkpoint_failures"] == 2 and again.longest_save() == pytest.approx(1.0)


def test_a_longer_interval_stays_known_after_many_saves(watch: Watch, tmp_path: Path) -> None:
    """To a watchdog that was restarted, with the configuration of the start."""
    run = tmp_path / "run"
    run.mkdir()
    write_journal(
        run,
        {"kind": "start", "world": 64, "checkpoint_bytes": 12 * 1000},
        {"kind": "control", "consumed": 0, "entry": {"checkpoint": {"every": "1000 steps"}}},
        *({"kind": "checkpoint", "step": step, "seconds": 1.0, "bytes": 12000} for step in range(45)),
    )
    checkpoints = Checkpoints(watch, run, every="100 steps").age
    for step in range(1, 401):
        checkpoints.step(record(step))
        if step % 80 == 0:
            watch.advance(80)
    assert watch.changes == [] and not list((run / "control").iterdir())


@pytest.mark.parametrize(
    ("key", "severity", "is_cause"),
    [
        ("checkpoint-failed", Severity.CRIT, True),
        ("disk/run", Severity.CRIT, True),
        ("disk/tmp", Severity.CRIT, False),
        ("disk/run", Severity.WARN, False),
    ],
)
def test_a_cause_that_has_paged_is_not_paged_again(
    watch: Watch, tmp_path: Path, key: str, severity: Severity, is_cause: bool
) -> None:
    """While it is known, a late checkpoint is a warning, until the run must stop; what is no cause changes nothing."""
    run = tmp_path / "run"
    checkpoints = Checkpoints(watch, run, every="100 steps").age
    write_journal(run, {"kind": "start", "world": 64, "checkpoint_bytes": 12 * 1000})
    watch.alarms.open(key, severity, "the cause")
    levels = []
    for start in range(0, 500, 70):
        for step in range(start + 1, start + 71):
            checkpoints.step(record(step))
        watch.advance(70)
        late = [alarm.severity.name for alarm in watch.changes if alarm.key == "checkpoint-age"]
        asked = sorted(json.loads(path.read_text())["verb"] for path in (run / "control").glob("*"))
        levels.append((late, asked))
    assert levels[4] == (["WARN"] if is_cause else ["WARN", "CRIT"], ["save"])
    assert levels[-1] == (["WARN", "CRIT"], ["save", "stop"])


@pytest.mark.parametrize(("every", "late"), [("4_000 tokens", True), ("6_000 tokens", False)])
def test_what_is_at_risk_is_counted_not_extrapolated(watch: Watch, tmp_path: Path, every: str, late: bool) -> None:
    """Steps 11 to 15 as before, 16 to 20 with twice as many samples of twice the length, and two that began since."""
    run = tmp_path / "run"
    checkpoints = Checkpoints(watch, run, every=every, reached=lambda: 22).age
    for step in range(1, 11):
        checkpoints.step(record(step))
    commit(Store(run / "checkpoints"), 10)
    watch.advance(1)
    for step in range(11, 21):
        large = {"batch": 16, "length": 64, "consumed": 16 * step - 120, "tokens": 1024 * step - 11_520}
        checkpoints.step(step_record(step, **(large if step > 15 else {})))
    assert checkpoints.last is not None and checkpoints.last.tokens == (15 * 8 + 5 * 2 * 16) * 32
    watch.advance(3600)
    watch.advance(3600)
    at_risk = (5 * 8 + 7 * 2 * 16) * 32
    assert checkpoints.unprotected == TrainedCounts(step=12, consumed=5 * 8 + 7 * 16, tokens=at_risk)
    assert [alarm.facts["tokens"] for alarm in watch.changes] == ([at_risk] if late else [])


def test_a_request_that_a_full_disk_does_not_take_becomes_a_signal(watch: Watch, small_disk: Disk) -> None:
    run = small_disk("1m")
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        checkpoints = Checkpoints(watch, run, pids=lambda: [os.getpid()]).age
        with (run / "hog").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 20)
        for step in range(1, 500):
            checkpoints.step(record(step))
        watch.advance()
        watch.advance(600)
        watch.advance()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got == [signal.SIGUSR1]


@pytest.mark.shows("F2", "F37")
def test_failed_saves_and_slow_ones(watch: Watch, tmp_path: Path) -> None:
    """A failure is reported until the next success; ten times slower is reported."""
    run = tmp_path / "run"
    Checkpoints(watch, run)
    fine = [
        {"kind": "checkpoint", "step": n, "bytes": 10**9, "seconds": 20.0 + n % 3, "segment": 1 + n // 6}
        for n in range(1, 12)
    ]
    write_journal(run, {"kind": "checkpoint-failed", "segment": 1, "step": 1}, *fine)
    watch.advance()
    assert watch.transitions() == []
    failed = {"kind": "checkpoint-failed", "step": 12, "failures": 1, "text": "attempt 1 of 3: No space left"}
    write_journal(run, failed, {**failed, "failures": 2})
    watch.advance(61)
    assert watch.transitions() == [("checkpoint-failed", "CRIT", "open")]
    assert "No space left" in watch.changes[0].summary
    write_journal(run, {"kind": "checkpoint", "step": 13, "bytes": 10**9, "seconds": 210.0})
    watch.advance(61)
    assert watch.transitions()[1:] == [("checkpoint-speed", "WARN", "open"), ("checkpoint-failed", "CRIT", "resolved")]
    write_journal(run, {"kind": "checkpoint", "step": 14, "bytes": 10**9, "seconds": 21.0})
    watch.advance(61)
    assert watch.transitions()[3:] == [("checkpoint-speed", "WARN", "resolved")]


@pytest.mark.shows("F15")
def test_a_writer_that_does_not_write(watch: Watch, tmp_path: Path) -> None:
    """Reported as the writer's, whether or not training continues; a slow one is not."""
    run = tmp_path / "run"
    store = Store(run / "checkpoints")
    Checkpoints(watch, run)
    write_journal(run, *[{"kind": "checkpoint", "step": n, "bytes": 10**9, "seconds": 30.0} for n in range(1, 8)])
    attempt = store.begin(8)
    for size in range(1, 6):
        (attempt / "data").write_bytes(bytes(size))
        watch.advance(16)
    assert watch.transitions() == []
    for size in range(6, 9):
        (attempt / "data").write_bytes(bytes(size))
        watch.advance(16)
    assert watch.transitions() == []
    for _ in range(5):
        watch.advance(16)
    assert watch.transitions() == [("checkpoint-writer", "CRIT", "open")]
    shutil.rmtree(attempt)
    watch.advance(61)
    assert watch.transitions()[1:] == [("checkpoint-writer", "CRIT", "resolved")]


@pytest.mark.shows("F4")
@pytest.mark.parametrize("fault", ["flip", "missing"])
def test_a_checkpoint_that_decays(watch: Watch, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that was verified and is damaged afterwards."""
    monkeypatch.setattr(checkpoint_store, "AUDIT_SECONDS", 100.0)
    run = tmp_path / "run"
    store = Store(run / "checkpoints")
    commit(store, 1)
    path = commit(store, 2, {"data": bytes(200_000)}).path
    Checkpoints(watch, run)
    watch.advance()
    assert watch.transitions() == []
    content = bytearray((path / "data").read_bytes())
    content[1000] ^= 1
    if fault == "missing":
        (path / "data").unlink()
    else:
        (path / "data").write_bytes(content)
    watch.advance(101)
    watch.advance(1)
    key = f"checkpoint-damaged/{path.name}"
    assert watch.transitions() == [(key, "CRIT", "open")]
    assert "checksum" in watch.changes[0].summary or fault != "flip"
    shutil.rmtree(path)
    watch.advance(61)
    assert watch.transitions()[1:] == [(key, "CRIT", "resolved")]
