"""Storage as the watchdog sees it: real file systems that fill, hang and lose files, on a clock of the test."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machines import Disk
from records import commit
from watch import Checkpoints, Watch, record

from fsdp_pretrain.checkpoint.disk_space import Room, SpaceNeeded
from fsdp_pretrain.checkpoint.manifest import CheckpointManifest
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.detectors.base import Detector
from fsdp_pretrain.watchdog.detectors.checkpoint_store import StoreState
from fsdp_pretrain.watchdog.detectors.disk_space import DiskSpaceDetector
from fsdp_pretrain.watchdog.detectors.mounts import DataWaitDetector, MountDetector, read
from fsdp_pretrain.watchdog.detectors.periodic import PeriodicProbe, ProbeAnswer
from fsdp_pretrain.watchdog.notify.alarms import Alarms

pytestmark = pytest.mark.quick


# ---------------------------------------------------------------------- probes that hang


class Answers(Detector):
    """Collects the results of a probe."""

    def __init__(self, alarms: Alarms, probe: PeriodicProbe[Any]) -> None:
        super().__init__(alarms)
        self.probe, self.found = probe, list[ProbeAnswer[Any]]()

    def tick(self, now: float) -> None:
        if (answer := self.probe.tick(now)) is not None:
            self.found.append(answer)


@pytest.mark.promise("storage-told")
def test_a_look_that_hangs_blocks_nobody(watch: Watch, tmp_path: Path) -> None:
    """A FIFO in place of a file hangs whoever opens it, like a mount whose server went away."""
    os.mkfifo(tmp_path / "fifo")
    hangs = PeriodicProbe(partial(read, [tmp_path / "fifo"]), every=60, deadline=15)
    fine = PeriodicProbe(partial(Room.of, tmp_path), every=60, deadline=15)
    watch.detectors = [first := Answers(watch.alarms, hangs), second := Answers(watch.alarms, fine)]
    watch.advance(hanging=1)
    assert second.found[0].value.free > 0 and not first.found
    for seconds, hanging in ((16, 1), (50, 2), (16, 2)):  # one that is late is left behind, and another looks
        watch.advance(seconds, hanging)
    assert [answer.late for answer in first.found] == [1, 2]
    assert [answer.late for answer in second.found] == [0, 0]
    (tmp_path / "fifo").rename(tmp_path / "hangs")
    (tmp_path / "fifo").write_bytes(b"x" * 5000)
    watch.advance(60, hanging=2)
    assert first.found[-1].error is None and first.found[-1].late == 0
    os.close(os.open(tmp_path / "hangs", os.O_WRONLY))  # it answers, and no thread is left
    watch.advance()


# ---------------------------------------------------------------------- room


@pytest.mark.shows("D22", "F1")
def test_room_is_counted_in_checkpoints(watch: Watch, small_disk: Disk) -> None:
    """Reported three checkpoints ahead, and before the save that would fail."""
    run = small_disk("8m") / "run"
    store = Store(run / "checkpoints")
    commit(store, 1, {"data": bytes(1_000_000)})
    space = Checkpoints(watch, run).space
    watch.detectors.append(DiskSpaceDetector(watch.alarms, {"run": run}, store.directory))
    watch.advance()
    watch.advance(61)
    assert space.fit == 6 and watch.transitions() == []
    seen = []
    for hog in (4_300_000, 5_900_000, 6_900_000, 5_000_000, 2_000_000):
        with (run / "hog").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, hog)
        watch.advance(61)
        seen.append(space.fit)
    assert seen == [2, 1, 0, 2, 5]
    key = "disk/checkpoints"
    assert watch.transitions() == [(key, "WARN", "open"), (key, "CRIT", "open"), (key, "CRIT", "resolved")]
    assert "needs 977 KiB" in watch.changes[1].summary and watch.changes[1].facts["fit"] == 0
    attempt = store.begin(2)  # space used by a save in flight is not lost
    (attempt / "data").write_bytes(bytes(900_000))
    watch.advance(61)
    assert space.fit == 5


@pytest.mark.shows("F35")
def test_a_full_record_is_told_once(watch: Watch, small_disk: Disk) -> None:
    """The file system of the record, which holds no checkpoint."""
    run = small_disk("4m")
    watch.detectors = [DiskSpaceDetector(watch.alarms, {"run": run})]
    watch.advance()
    assert watch.transitions() == []
    for size in (4_170_000, 4_194_304):
        with (run / "hog").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        watch.advance(61)
        watch.advance(61)
    assert watch.transitions() == [("disk/run", "WARN", "open"), ("disk/run", "CRIT", "open")]
    (run / "hog").unlink()
    watch.advance(61)
    assert watch.transitions()[-1] == ("disk/run", "CRIT", "resolved")


def saved(step: int, free: int) -> StoreState:
    """A look after the save of a step."""
    none, room = SpaceNeeded(0, 0), Room("/data", free, 10**14)
    verified = CheckpointManifest.model_construct(step=step)
    return StoreState([], {}, None, verified, {}, room, none, [], 0)


@pytest.mark.shows("D22")
@pytest.mark.parametrize(
    ("hours", "free", "per_hour", "warns"),
    [
        (0.5, 3e12, 0, False),
        (0.5, 3e12, 20e9, False),
        (0.5, 3e12, 150e9, True),
        (0.5, 3e12, -5e9, False),
        (1 / 3600, 40e9, 3.6e9, False),  # a trend of seconds says nothing of half a day, but of half a minute
        (1 / 3600, 40e9, 3.6e12, True),
    ],
    ids=str,
)
@pytest.mark.promise("storage-told")
def test_time_to_full_is_foreseen(
    watch: Watch, tmp_path: Path, hours: float, free: float, per_hour: float, warns: bool
) -> None:
    """Shared storage with bursts of other users: warned when a day or less is left. A checkpoint every so many hours."""
    rng = np.random.default_rng(1)
    times = hours * np.arange(24)
    noise = np.where(rng.random(24) < 0.1, free / 100, 0) + rng.normal(0, free / 1500, 24)
    space = Checkpoints(watch, tmp_path).space
    for step, (hour, left) in enumerate(zip(times, free - per_hour * times + noise, strict=True), 1):
        space.judge(saved(step, int(left)), hour * 3600)
    assert bool(watch.transitions()) is warns
    if warns:
        assert space.seconds_to_full is not None
        assert {alarm.severity for alarm in watch.changes} == {Severity.WARN}
        left = (free - per_hour * times[-1]) / per_hour
        assert space.seconds_to_full / 3600 == pytest.approx(left, rel=0.3)


# ---------------------------------------------------------------------- mounts and data


@pytest.mark.shows("F40")
def test_shards_that_go_and_mounts_that_hang(watch: Watch, tmp_path: Path, shared_corpus: Path) -> None:
    """Also a mount that does not answer: reported by name, while the watchdog continues."""
    copy = tmp_path / "corpus"
    shutil.copytree(shared_corpus / "corpus", copy)
    shard = next((copy / "shards").glob("*.bin"))
    mounts = MountDetector(watch.alarms, [tmp_path], {"text": copy})
    watch.detectors = [mounts]
    watch.advance()
    watch.advance(61)
    assert watch.transitions() == []
    shard.rename(tmp_path / "kept")
    watch.advance(61)
    (gone,) = watch.changes
    assert gone.key == "data-shard/text" and gone.severity is Severity.CRIT and str(shard) in gone.summary
    assert "set the path to a copy" in gone.remedy
    shutil.copy(tmp_path / "kept", shard)
    watch.advance(10_000)
    assert watch.transitions()[1:] == [("data-shard/text", "CRIT", "resolved")]
    shard.unlink()
    os.mkfifo(shard)
    for late in range(1, 5):
        watch.advance(61, hanging=late)
        watch.advance(16, hanging=late)
    hangs = watch.changes[-1]
    assert hangs.key == f"mount/{copy}" and hangs.severity is Severity.CRIT and "does not answer" in hangs.summary


def test_steps_that_wait_for_data(watch: Watch) -> None:
    """Three long waits in fifty steps are reported, with the file; one is not, nor is a first step."""
    waits = DataWaitDetector(watch.alarms)
    for step in range(1, 200):
        waits.step(record(step, data=6.0 if step == 1 else 0.02))
    waits.step(record(200, data=8.0))
    assert watch.transitions() == []
    for step in range(201, 230):
        waits.step(record(step, data=8.0 if step % 10 == 0 else 0.02))
    assert watch.transitions() == [("data-wait", "WARN", "open")] and "shard-7.bin" in watch.changes[0].remedy
    for step in range(230, 300):
        waits.step(record(step, data=0.02))
    assert watch.transitions()[1:] == [("data-wait", "WARN", "resolved")]
