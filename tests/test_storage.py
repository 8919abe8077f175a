"""Storage as the watchdog sees it: real file systems that fill, hang and lose files, on a clock of the test."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records
from records import commit
from sight import until
from traps import take_space

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.operations import StorageSection
from fsdp_pretrain.record.files import RunDir, now
from fsdp_pretrain.record.metrics import records as metric_records
from fsdp_pretrain.record.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import Progress, Seconds
from fsdp_pretrain.watchdog.agent.registry import build_detectors
from fsdp_pretrain.watchdog.detectors.base import Detector
from fsdp_pretrain.watchdog.detectors.checkpoint_age import CheckpointDetector
from fsdp_pretrain.watchdog.detectors.disk_space import DiskSpaceDetector
from fsdp_pretrain.watchdog.detectors.mounts import DataWaitDetector, MountDetector
from fsdp_pretrain.watchdog.notify.alarms import Alarm, Alarms
from fsdp_pretrain.watchdog.probes.client import PeriodicProbe, ProbeAnswer, ProbeServer

pytestmark = pytest.mark.quick
Disk = Callable[[str], Path]


class Watch:
    """Detectors, and a clock that only the test moves. Probes are real, so they get time to answer after a move."""

    def __init__(self, path: Path) -> None:
        self.alarms = Alarms(path / "alarms.jsonl", lambda alarm, before: self.told.append(alarm))
        self.told: list[Alarm] = []
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

    def said(self) -> list[tuple[str, str, str]]:
        return [(alarm.key, alarm.severity.name, alarm.state) for alarm in self.told]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    made = Watch(tmp_path)
    yield made
    made.probes.replace()


def record(step: int, seconds: float = 1.0, data: float = 0.0, batch: int = 8) -> StepRecord:
    return records.step_record(step, batch=batch, seconds={"iteration": seconds, "data": data, "checkpoint": 0.0})


def saves(
    watch: Watch,
    run: Path,
    every: str = "100 steps",
    reached: Callable[[], int] = int,
    prune: bool = True,
    **section: Any,
) -> CheckpointDetector:
    for name in ("segments", "control"):
        (run / name).mkdir(parents=True, exist_ok=True)
    values = {"interval": Seconds(60), **section}
    return CheckpointDetector(
        watch.alarms,
        StorageSection(**values),
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


# ---------------------------------------------------------------------- probes that hang


class Answers(Detector):
    """Collects the results of a probe."""

    def __init__(self, alarms: Alarms, probe: PeriodicProbe) -> None:
        super().__init__(alarms)
        self.probe, self.found = probe, list[ProbeAnswer]()

    def tick(self, now: float) -> None:
        if (answer := self.probe.tick(now)) is not None:
            self.found.append(answer)


def test_a_look_that_hangs_blocks_nobody(watch: Watch, tmp_path: Path) -> None:
    """A FIFO in place of a file hangs whoever opens it, like a mount whose server went away."""
    os.mkfifo(tmp_path / "fifo")
    hangs = PeriodicProbe(watch.probes, "read", every=60, deadline=15, paths=[str(tmp_path / "fifo")])
    fine = PeriodicProbe(watch.probes, "space", every=60, deadline=15, path=str(tmp_path))
    watch.detectors = [first := Answers(watch.alarms, hangs), second := Answers(watch.alarms, fine)]
    watch.advance(hanging=1)
    assert second.found[0].value["free"] > 0 and not first.found
    for seconds, hanging in ((16, 0), (50, 1), (16, 0)):  # a killed one is restarted
        watch.advance(seconds, hanging)
    assert [answer.late for answer in first.found] == [1, 2]
    assert [answer.late for answer in second.found] == [0, 0]
    (tmp_path / "fifo").unlink()
    (tmp_path / "fifo").write_bytes(b"x" * 5000)
    watch.advance(60)
    assert first.found[-1].error is None and first.found[-1].late == 0


def test_a_helper_that_stopped_is_replaced(watch: Watch, tmp_path: Path) -> None:
    probe = PeriodicProbe(watch.probes, "space", every=60, deadline=15, path=str(tmp_path))
    watch.detectors = [answers := Answers(watch.alarms, probe)]
    watch.advance()
    assert answers.found.pop().error is None
    stopped = watch.probes.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    watch.advance(61, hanging=1)
    watch.advance(16, hanging=1)
    assert [answer.late for answer in answers.found] == [1]
    watch.advance(6)
    watch.advance(60)
    assert answers.found[-1].error is None and watch.probes.pid != stopped


# ---------------------------------------------------------------------- room


def test_room_is_counted_in_checkpoints(watch: Watch, small_disk: Disk) -> None:
    """Fault matrix 1: reported three checkpoints ahead, and before the save that would fail."""
    run = small_disk("8m") / "run"
    store = Store(run / "checkpoints")
    commit(store, 1, {"data": bytes(1_000_000)})
    section = StorageSection(interval=Seconds(60))
    checkpoints = saves(watch, run)
    places = [("checkpoints", store.directory, True), ("run", run, False)]
    space = DiskSpaceDetector(watch.alarms, section, watch.probes, places, checkpoints)
    watch.detectors = [checkpoints, space]
    watch.advance()
    watch.advance(61)
    assert space.fit == {"checkpoints": 6} and watch.said() == []
    seen = []
    for hog in (4_300_000, 5_900_000, 6_900_000, 5_000_000, 2_000_000):
        with (run / "hog").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, hog)
        watch.advance(61)
        seen.append(space.fit["checkpoints"])
    assert seen == [2, 1, 0, 2, 5]
    key = "disk/checkpoints"
    assert watch.said() == [(key, "WARN", "open"), (key, "CRIT", "open"), (key, "CRIT", "resolved")]
    assert "needs 977 KiB" in watch.told[1].summary and watch.told[1].facts["fit"] == 0
    attempt = store.begin(2)  # space used by a save in flight is not lost
    (attempt / "data").write_bytes(bytes(900_000))
    watch.advance(61)
    assert space.fit["checkpoints"] == 5


def test_a_full_record_is_told_once(watch: Watch, small_disk: Disk) -> None:
    """Fault matrix 35: the file system of the record, which holds no checkpoint."""
    run = small_disk("4m")
    watch.detectors = [DiskSpaceDetector(watch.alarms, StorageSection(), watch.probes, [("run", run, False)])]
    watch.advance()
    assert watch.said() == []
    for size in (4_170_000, 4_194_304):
        with (run / "hog").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        watch.advance(61)
        watch.advance(61)
    assert watch.said() == [("disk/run", "WARN", "open"), ("disk/run", "CRIT", "open")]
    (run / "hog").unlink()
    watch.advance(61)
    assert watch.said()[-1] == ("disk/run", "CRIT", "resolved")


class Scripted:
    """Results of a probe as a series: one at every tick."""

    def __init__(self, free: list[float]) -> None:
        self._free = iter(free)

    def tick(self, now: float) -> ProbeAnswer:
        found = {"path": "/data", "free": int(next(self._free)), "total": 10**14, "files": 0, "files_free": 0}
        return ProbeAnswer({**found, "writing": 0, "device": 1})


@pytest.mark.parametrize(
    ("per_hour", "warns"), [(0, False), (1e9, False), (20e9, False), (150e9, True), (-5e9, False)], ids=str
)
def test_time_to_full_is_foreseen(watch: Watch, tmp_path: Path, per_hour: float, warns: bool) -> None:
    """3 TB free on shared storage with bursts of other users: warned when a day or less is left."""
    rng = np.random.default_rng(1)
    hours = np.arange(0, 12, 0.5)
    noise = np.where(rng.random(len(hours)) < 0.1, 30e9, 0) + rng.normal(0, 2e9, len(hours))
    checkpoints = saves(watch, tmp_path)
    space = DiskSpaceDetector(
        watch.alarms, StorageSection(), watch.probes, [("checkpoints", tmp_path, True)], checkpoints
    )
    space.places[0].probe = Scripted(list(3e12 - per_hour * hours + noise))  # type: ignore[assignment]
    for hour in hours:
        checkpoints.completed += 1
        space.tick(hour * 3600)
    assert bool(watch.said()) is warns
    if warns:
        left = space.seconds_to_full["checkpoints"] / 3600
        assert {alarm.severity for alarm in watch.told} == {Severity.WARN}
        assert left == pytest.approx((3e12 - per_hour * hours[-1]) / per_hour, rel=0.3)


@pytest.mark.parametrize(("per_second", "warns"), [(1e6, False), (1e9, True)], ids=str)
def test_what_seconds_show_says_nothing_of_tomorrow(
    watch: Watch, tmp_path: Path, per_second: float, warns: bool
) -> None:
    """A checkpoint every second and 40 GB free: full in half a minute is reported, a trend to half a day is not."""
    checkpoints = saves(watch, tmp_path)
    space = DiskSpaceDetector(
        watch.alarms, StorageSection(), watch.probes, [("checkpoints", tmp_path, True)], checkpoints
    )
    space.places[0].probe = Scripted([40e9 - per_second * second for second in range(12)])  # type: ignore[assignment]
    for second in range(12):
        checkpoints.completed += 1
        space.tick(second)
    assert bool(watch.said()) is warns and bool(space.seconds_to_full) is warns


# ---------------------------------------------------------------------- checkpoints


def test_age_of_the_newest_verified_checkpoint(watch: Watch, tmp_path: Path) -> None:
    """100 s between checkpoints: alarm after 150 s, a save requested after 250 s, a stop after 400 s; each once."""
    run = tmp_path / "run"
    store = Store(run / "checkpoints")
    checkpoints = saves(watch, run, every="100 steps")
    watch.detectors = [checkpoints]
    write_journal(run, {"kind": "start", "world": 64, "parameters": 1000})

    def train(steps: range) -> None:
        for step in steps:
            checkpoints.step(record(step))
        watch.advance(len(steps))

    for start in range(0, 500, 100):  # healthy
        train(range(start + 1, start + 101))
        commit(store, start + 100)
        watch.advance(1)
    watch.advance(60)
    assert watch.said() == [] and checkpoints.protected == 500
    commit(store, 550, verified=False)  # does not count
    seen = []
    for start in range(500, 1000, 70):
        train(range(start + 1, start + 71))
        verbs = sorted(json.loads(path.read_text())["verb"] for path in (run / "control").iterdir())
        seen.append((round(checkpoints.age), [alarm.severity.name for alarm in watch.told], verbs))
    levels = [seen[n][1:] for n in (1, 2, 4, 7)]
    assert levels == [([], []), (["WARN"], []), (["WARN", "CRIT"], ["save"]), (["WARN", "CRIT"], ["save", "stop"])]
    assert "GPU-hours" in watch.told[1].effect and "tokens" in watch.told[1].effect
    commit(store, 1060)
    train(range(1061, 1130))
    assert watch.said()[-1] == ("checkpoint-age", "CRIT", "resolved")


@pytest.mark.parametrize(
    ("seconds", "age", "said"),
    [
        (432.0, 7 * 3600, []),  # an interval of 12 hours: 6 hours are no reason to stop
        (432.0, 19 * 3600, ["stop"]),  # ... but one and a half of it are
        (0.01, 50, []),  # shorter than the time between two passes: nothing can be said
    ],
)
def test_age_in_slow_and_fast_runs(watch: Watch, tmp_path: Path, seconds: float, age: float, said: list[str]) -> None:
    checkpoints = saves(watch, tmp_path / "run")
    watch.detectors = [checkpoints]
    for step in range(1, 50):
        checkpoints.step(record(step, seconds))
    watch.advance()
    watch.advance(age)
    checkpoints.step(record(50 + int(age / seconds) if age > 100 else 50, seconds))
    watch.advance(61 if age > 100 else 0)
    assert [json.loads(path.read_text())["verb"] for path in (tmp_path / "run/control").iterdir()] == said
    assert bool(watch.told) is bool(said)


@pytest.mark.parametrize("written", [True, False])
def test_steps_that_take_long_are_not_lost(watch: Watch, tmp_path: Path, written: bool) -> None:
    """A standstill of many intervals in which no checkpoint was due; steps trained since count, recorded or not."""
    reached = 50
    checkpoints = saves(watch, tmp_path / "run", reached=lambda: reached)
    watch.detectors = [checkpoints]
    for step in range(1, 51):
        checkpoints.step(record(step))
    watch.advance()
    for _ in range(10):
        watch.advance(100)
        reached += 5
        if written:
            checkpoints.step(record(reached))
    assert not watch.told
    reached += 400
    if written:
        checkpoints.step(record(reached))
    watch.advance(61)
    assert [json.loads(path.read_text())["verb"] for path in (tmp_path / "run/control").iterdir()] == ["stop"]
    (told,) = watch.told
    assert told.severity is Severity.CRIT and told.effect.startswith("500 steps")


def test_a_request_that_a_full_disk_does_not_take_becomes_a_signal(watch: Watch, small_disk: Disk) -> None:
    run = small_disk("1m")
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        checkpoints = saves(watch, run)
        checkpoints._pids = lambda: [os.getpid()]
        watch.detectors = [checkpoints]
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


def test_failed_saves_and_slow_ones(watch: Watch, tmp_path: Path) -> None:
    """Fault matrix 2 and 37: a failure is reported until the next success; ten times slower is reported."""
    run = tmp_path / "run"
    checkpoints = saves(watch, run)
    watch.detectors = [checkpoints]
    fine = [
        {"kind": "checkpoint", "step": n, "bytes": 10**9, "seconds": 20.0 + n % 3, "segment": 1 + n // 6}
        for n in range(1, 12)
    ]
    write_journal(run, {"kind": "checkpoint-failed", "segment": 1, "step": 1}, *fine)
    watch.advance()
    assert watch.said() == []
    failed = {"kind": "checkpoint-failed", "step": 12, "failures": 1, "text": "attempt 1 of 3: No space left"}
    write_journal(run, failed, {**failed, "failures": 2})
    watch.advance(61)
    assert watch.said() == [("checkpoint-failed", "CRIT", "open")] and "No space left" in watch.told[0].summary
    write_journal(run, {"kind": "checkpoint", "step": 13, "bytes": 10**9, "seconds": 210.0})
    watch.advance(61)
    assert watch.said()[1:] == [("checkpoint-speed", "WARN", "open"), ("checkpoint-failed", "CRIT", "resolved")]
    write_journal(run, {"kind": "checkpoint", "step": 14, "bytes": 10**9, "seconds": 21.0})
    watch.advance(61)
    assert watch.said()[3:] == [("checkpoint-speed", "WARN", "resolved")]


def test_a_writer_that_does_not_write(watch: Watch, tmp_path: Path) -> None:
    """Fault matrix 15: reported as the writer's, whether or not training continues. A slow writer is only slow."""
    run = tmp_path / "run"
    store = Store(run / "checkpoints")
    watch.detectors = [saves(watch, run)]
    write_journal(run, *[{"kind": "checkpoint", "step": n, "bytes": 10**9, "seconds": 30.0} for n in range(1, 8)])
    attempt = store.begin(8)
    for size in range(1, 6):
        (attempt / "data").write_bytes(bytes(size))
        watch.advance(16)
    assert watch.said() == []
    for size in range(6, 9):
        (attempt / "data").write_bytes(bytes(size))
        watch.advance(16)
    assert watch.said() == [("checkpoint-speed", "WARN", "open")]
    for _ in range(5):
        watch.advance(16)
    assert watch.said()[1:] == [("checkpoint-writer", "CRIT", "open")]
    shutil.rmtree(attempt)
    watch.advance(61)
    assert watch.said()[2:] == [("checkpoint-writer", "CRIT", "resolved")]


@pytest.mark.parametrize("fault", ["cut", "flip", "missing"])
def test_a_checkpoint_that_decays(watch: Watch, tmp_path: Path, fault: str) -> None:
    """Fault matrix 4: a checkpoint that was verified and is damaged afterwards."""
    run = tmp_path / "run"
    store = Store(run / "checkpoints")
    commit(store, 1)
    path = commit(store, 2, {"data": bytes(200_000)}).path
    watch.detectors = [saves(watch, run, audit=Seconds(100))]
    watch.advance()
    assert watch.said() == []
    content = bytearray((path / "data").read_bytes())
    content[1000] ^= 1
    if fault == "missing":
        (path / "data").unlink()
    else:
        (path / "data").write_bytes(content[:-1] if fault == "cut" else content)
    watch.advance(101)
    watch.advance(1)
    key = f"checkpoint-damaged/{path.name}"
    assert watch.said() == [(key, "CRIT", "open")]
    assert "checksum" in watch.told[0].summary or fault != "flip"
    shutil.rmtree(path)
    watch.advance(61)
    assert watch.said()[1:] == [(key, "CRIT", "resolved")]


def test_a_checkpoint_in_the_fallback(watch: Watch, tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoints = saves(watch, run)
    watch.detectors = [checkpoints]
    checkpoints.step(record(1))
    commit(Store(run / "elsewhere"), 5)
    watch.advance()
    assert watch.said() == [("checkpoint-fallback", "WARN", "open")] and checkpoints.protected == 5
    commit(Store(run / "checkpoints"), 6)
    watch.advance(61)
    assert watch.said()[1:] == [("checkpoint-fallback", "WARN", "resolved")]


def follow(watch: Watch, job: Any, run: RunDir, meanwhile: Callable[[], None] = lambda: None) -> list[int | None]:
    """What the watchdog's process does beside a real run, to its end; the exit codes."""
    found = build_detectors(load(run.config), watch.alarms, segment=1, pids=lambda: [job.ranks[0].pid])
    offset = 0

    def ended() -> bool:
        nonlocal offset
        codes = job.codes()
        for record, behind in metric_records(run.segment(1) / "metrics.jsonl", offset):
            offset = behind
            for detector in found:
                detector.step(record)
        for detector in found:
            detector.tick(time.monotonic())
        meanwhile()
        return None not in codes

    until(ended, what="the end of the run")
    return list(job.codes())


@pytest.mark.slow
def test_a_sound_run_is_left_in_peace(watch: Watch, lab: Any, helpers: Any) -> None:
    """Every detector beside a run that saves every few steps: no alarm. Requests would be in the journal."""
    config = lab.config(
        train={"duration": "120 steps"},
        checkpoint={"every": "25 steps"},
        watchdog={"storage": {"interval": "0.2 s"}, "sentinels": {"learn": 20}},
    )
    job, run = lab.start(config), RunDir(lab.path / "run")
    helpers.wait_for(run.config.exists)
    assert follow(watch, job, run) == [0], job.output()
    assert watch.said() == []


@pytest.mark.slow
def test_a_run_that_cannot_save_is_stopped(watch: Watch, lab: Any, helpers: Any, small_disk: Disk) -> None:
    """Fault matrix 1 and 2, on a real run: its storage fills, it trains on, and ends with 93 without intervention."""
    config = lab.config(
        train={"duration": "100000 steps"},
        checkpoint={"every": "10 steps", "max_failures": 100, "retry": "0.01 s", "ballast": False},
        watchdog={"storage": {"interval": "0.2 s"}},
    )
    disk = small_disk("4m")
    job, run, hog = lab.start(config, f"run.dir={disk / 'run'}"), RunDir(disk / "run"), disk / "hog"
    helpers.wait_for(lambda: Store(run.checkpoints).newest())

    def fill() -> None:
        if not hog.exists():
            take_space(str(hog), 200_000)

    assert follow(watch, job, run, fill) == [93], job.output()[-2000:]
    said = [(key, severity) for key, severity, _ in watch.said()]
    assert ("disk/checkpoints", "CRIT") in said and ("checkpoint-age", "CRIT") in said
    assert any(alarm.action == "asked the run to stop" for alarm in watch.alarms)
    newest = Store(run.checkpoints).newest()
    assert newest is not None and newest.verified


# ---------------------------------------------------------------------- mounts and data


def test_shards_that_go_and_mounts_that_hang(watch: Watch, tmp_path: Path, shared_corpus: Path) -> None:
    """Fault matrix 40, and a mount that does not answer: reported by name, while the watchdog continues."""
    copy = tmp_path / "corpus"
    shutil.copytree(shared_corpus / "corpus", copy)
    shard = next((copy / "shards").glob("*.bin"))
    mounts = MountDetector(watch.alarms, StorageSection(audit=Seconds(600)), watch.probes, [tmp_path], {"text": copy})
    watch.detectors = [mounts]
    watch.advance()
    manifest = json.loads((copy / "manifest.json").read_text())
    assert mounts.rates["text"] == pytest.approx(manifest["documents"] / (manifest["tokens"] + manifest["documents"]))
    watch.advance(61)
    assert watch.said() == []
    shard.rename(tmp_path / "kept")
    watch.advance(61)
    (gone,) = watch.told
    assert (
        gone.key == "data-shard/text"
        and gone.severity is Severity.CRIT
        and str(shard) in gone.summary
        and "mirror" in gone.remedy
    )
    shutil.copy(tmp_path / "kept", shard)
    watch.advance(10_000)
    assert watch.said()[1:] == [("data-shard/text", "CRIT", "resolved")]
    shard.unlink()
    os.mkfifo(shard)
    for _ in range(4):
        watch.advance(61, hanging=1)
        watch.advance(16)
    hangs = watch.told[-1]
    assert hangs.key == f"mount/{copy}" and hangs.severity is Severity.CRIT and "does not answer" in hangs.summary


def test_steps_that_wait_for_data(watch: Watch) -> None:
    """Three long waits in fifty steps are reported, with the file; one is not, nor is a first step."""
    waits = DataWaitDetector(watch.alarms)
    for step in range(1, 200):
        waits.step(record(step, data=6.0 if step == 1 else 0.02))
    waits.step(record(200, data=8.0))
    assert watch.said() == []
    for step in range(201, 230):
        waits.step(record(step, data=8.0 if step % 10 == 0 else 0.02))
    assert watch.said() == [("data-wait", "WARN", "open")] and "shard-7.bin" in watch.told[0].remedy
    for step in range(230, 300):
        waits.step(record(step, data=0.02))
    assert watch.said()[1:] == [("data-wait", "WARN", "resolved")]
