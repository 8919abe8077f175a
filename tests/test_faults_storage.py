"""Faults of storage and clocks, end to end: real ranks, the real watchdog, its alarms, the journal, the exit code, and
the curve afterwards. Only the times are short, by the public configuration.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from machines import Disk
from processes import SET_CONSTANTS
from watch import CRIT_AND_RESOLVED, Watched

Whole = Callable[[int], list[Any]]


@pytest.fixture(scope="module")
def whole(module_lab: Any, helpers: Any) -> Callable[[int], list[Any]]:
    """`whole(ranks)`: the first 100 steps of an undisturbed run."""
    known: dict[int, list[Any]] = {}

    def train(ranks: int) -> list[Any]:
        if ranks not in known:
            config = module_lab.config(f"whole-{ranks}", train={"duration": "100000 steps", "micro_batch": 8 // ranks})
            shorter = ("train.duration=100 steps", "optimizer.decay=100000 steps", "checkpoint.every=100 steps")
            module_lab.train(config, *shorter, ranks=ranks)
            known[ranks] = helpers.losses(module_lab.path / f"whole-{ranks}")
        return known[ranks]

    return train


def at(path: str, act: str, verb: str = "open", *, skip: int = 0, times: int = 1, **more: Any) -> dict[str, Any]:
    """A trap of rank 0."""
    return {"rank": 0, "verb": verb, "path": path, "act": act, "skip": skip, "times": times, **more}


# ---------------------------------------------------------------------- room


@pytest.mark.shows("F2")
def test_a_save_that_runs_out_of_space(watched: Watched, small_disk: Disk, whole: Whole, constants: Any) -> None:
    """In the middle of a shard. Training continues, one report, saved when there is space.

    What is left has room for some hundred records: where they filled it first, the alarm could not be written.
    """
    disk = small_disk("8m")
    watched.run = disk / "run"
    constants("fsdp_pretrain.checkpoint.upcoming", _TOO_LATE=50)  # a busy test ends the fault after many intervals
    watched.configure()
    job = watched.start(trap=at("__0_0.distcp", "fill", skip=1, hog=str(disk / "hog"), leave=500_000))
    alarm = watched.until("checkpoint-failed")
    assert alarm["severity"] == "CRIT" and alarm["step"] == 40
    watched.reaches(60)  # not 20 more: the record is on the same disk, and ends when that is full
    assert watched.saved() == [20]
    (disk / "hog").unlink()
    watched.until("checkpoint-failed", "resolved")
    watched.stop(job)
    assert watched.transitions("checkpoint-failed") == CRIT_AND_RESOLVED
    failures = watched.helpers.journal(watched.run, "checkpoint-failed")
    assert "failed: rank 0" in failures[0]["text"] and all("needs" in entry["text"] for entry in failures[1:])
    watched.learned_as(whole(1))


# ---------------------------------------------------------------------- storage that fails


@pytest.mark.shows("F21")
@pytest.mark.slow
def test_storage_that_fails_and_comes_back(watched: Watched, small_disk: Disk, whole: Whole, constants: Any) -> None:
    """The read-only state after EIO: reported, training continues, and saves once it is repaired."""
    disk = small_disk("16m")
    watched.run.mkdir()
    (watched.run / "checkpoints").symlink_to(disk)
    constants("fsdp_pretrain.checkpoint.upcoming", _TOO_LATE=50)  # as above
    watched.configure()
    job = watched.start()
    watched.helpers.wait_for(watched.saved, what="a checkpoint")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert "Read-only" in watched.until(f"mount/{watched.run}/checkpoints", severity="CRIT")["summary"]
    assert watched.until("checkpoint-failed")["severity"] == "CRIT"
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    watched.until("checkpoint-failed", "resolved")
    watched.stop(job)
    watched.learned_as(whole(1))


@pytest.mark.shows("F15")
@pytest.mark.slow
@pytest.mark.promise("failed-saves")
def test_a_writer_that_hangs(watched: Watched, whole: Whole, constants: Any) -> None:
    """Reported as the writer's, never as a hang of training; another writer makes the next save."""
    constants("fsdp_pretrain.watchdog.detectors.checkpoint_saves", _STILL_SECONDS=0.3)
    watched.configure(checkpoint={"every": "100 steps"}, parallel={"timeout": "10 s"})
    job = watched.start(trap=at("__0_0.distcp", "wait", skip=1, seconds=600))
    writer = watched.until("checkpoint-writer")
    assert writer["severity"] == "CRIT" and "step-00000200.writing" in writer["summary"]
    watched.until("checkpoint-failed", "resolved")
    (failed, _) = watched.helpers.alarms(watched.run, "checkpoint-failed")  # the watchdog may read both at once
    assert "timed out" in failed["summary"]
    watched.until("checkpoint-writer", "resolved")
    watched.stop(job)
    assert watched.transitions("checkpoint-writer") == watched.transitions("checkpoint-failed") == CRIT_AND_RESOLVED
    assert not watched.transitions("hang") and len(watched.saved()) >= 2
    watched.learned_as(whole(1))


@pytest.mark.shows("F22")
@pytest.mark.slow
def test_writers_that_die(watched: Watched, whole: Whole) -> None:
    """The writing thread dies, twice. Each is a failed save, and the next one works."""
    watched.configure(ranks=2, checkpoint={"every": "40 steps"}, parallel={"timeout": "10 s"})
    # 1: fine; 2: dies; 3: made while training waits; 4: dies; 5: as 3
    job = watched.start(trap=at(r"\.train_state", "end_thread", skip=1, times=3))
    watched.helpers.wait_for(
        lambda: len(watched.transitions("checkpoint-failed")) == 4, what="two failures, two successes"
    )
    watched.reaches(60, more=True)
    watched.stop(job)
    assert watched.transitions("checkpoint-failed") == 2 * CRIT_AND_RESOLVED
    assert len(watched.helpers.journal(watched.run, "checkpoint-failed")) == 2
    watched.learned_as(whole(2))


@pytest.mark.shows("F23")
@pytest.mark.slow
@pytest.mark.promise("successor-first")
def test_two_verified_checkpoints_stay_while_verification_fails(watched: Watched) -> None:
    """What reads back wrong is moved aside and reported, and nothing older is deleted for it."""
    watched.configure(checkpoint={"keep_last": 2})
    job = watched.start(trap=at(r"/step-\d{8}$", "flip", "rename", skip=3, times=4))
    watched.helpers.wait_for(lambda: len(watched.saved()) >= 2, what="two checkpoints")
    fewest = 2

    def sound_again() -> bool:
        nonlocal fewest
        fewest = min(fewest, len(watched.saved()))
        assert job.codes() == [None], job.output()
        return watched.transitions("checkpoint-failed")[-1:] == [("CRIT", "resolved")]

    watched.helpers.wait_for(sound_again, what="a save that reads back well", every=0.001)
    watched.stop(job)
    assert fewest == 2
    failures = watched.helpers.journal(watched.run, "checkpoint-failed")
    assert len(failures) == 4 and all("reads back wrong" in entry["text"] for entry in failures)
    assert watched.transitions("checkpoint-failed") == CRIT_AND_RESOLVED
    assert len(list((watched.run / "checkpoints/abandoned").iterdir())) == 4


# ---------------------------------------------------------------------- clocks

# Executed first by ranks, and as `sitecustomize` by the watchdog that they start.
CLOCK = """
import datetime, os, sys, time
folder = os.path.dirname(__file__)
os.environ["PYTHONPATH"] = folder + os.pathsep + os.environ["PYTHONPATH"]
wall, real = time.time, datetime.datetime

def ahead():
    try:
        return float(open({jump!r}).read())
    except (OSError, ValueError):
        return 0.0

class Jumping(real):
    @classmethod
    def now(cls, zone=None):
        return real.now(zone) + datetime.timedelta(seconds=ahead())

time.time = lambda: wall() + ahead()
datetime.datetime = Jumping
for module in list(sys.modules.values()):
    if getattr(module, "datetime", None) is real:
        module.datetime = Jumping
"""


@pytest.mark.shows("F47")
@pytest.mark.slow
def test_a_clock_that_jumps(watched: Watched, monkeypatch: pytest.MonkeyPatch, constants: Any, whole: Whole) -> None:
    """The wall clock of ranks and watchdog jumps an hour ahead, then two back: no effect."""
    constants("fsdp_pretrain.checkpoint.upcoming", CHECK_SECONDS=5.0)  # a save on a full machine is not late
    jump, first = watched.lab.path / "jump", watched.lab.path / "clock/sitecustomize.py"
    first.parent.mkdir()
    first.write_text(SET_CONSTANTS + CLOCK.format(jump=str(jump)))
    watched.configure(watchdog={"hang": {"soft": "20 s", "hard": "40 s"}})
    monkeypatch.setenv("EXECUTE_FIRST", str(first))
    job = watched.start()
    for seconds in (3600, -3600):
        watched.reaches(40, more=True)
        jump.write_text(str(seconds))
    watched.reaches(60, more=True)
    time.sleep(3)
    watched.stop(job)
    assert not watched.warnings()
    watched.learned_as(whole(1))
