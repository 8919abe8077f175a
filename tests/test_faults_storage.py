"""Faults of storage, data, GPUs and clocks, end to end: real ranks, the real watchdog, its alarms, the journal, the
exit code, and the curve afterwards. Only the times are short, by the public configuration.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traps import take_space

from data.text.tokenizer import Tokenizer

TESTS = Path(__file__).resolve().parent
STORAGE = {"interval": "0.2 s", "audit": "1 s"}
NOISE = {"gradient", "loss", "pace", "straggler", "stolen-time", "memory", "mount-slow", "data-wait", "blind"}
Disk = Callable[[str], Path]
Said = list[tuple[str, str]]
Whole = Callable[[int], list[Any]]
TOLD_AND_OVER: Said = [("CRIT", "open"), ("CRIT", "resolved")]


class Watched:
    """A run with a fast watchdog, and ranks that can be given a fault."""

    def __init__(self, lab: Any, helpers: Any, run_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lab, self.helpers, self._command, self._patch = lab, helpers, run_command, monkeypatch
        self.run: Path = lab.path / "run"
        self.ranks = 1

    def configure(self, *, ranks: int = 1, watchdog: dict[str, Any] | None = None, **sections: dict[str, Any]) -> None:
        """Settings that every start of the run shares."""
        changes = {"enabled": True, "interval": "0.1 s", "storage": STORAGE, **(watchdog or {})}
        checkpoint = {"every": "20 steps", "retry": "0.1 s", "max_failures": 1000, **sections.pop("checkpoint", {})}
        train = {"duration": "100000 steps", "micro_batch": 8 // ranks}
        self.ranks = ranks
        self._config = self.lab.config(train=train, checkpoint=checkpoint, watchdog=changes, **sections)

    def start(self, *overrides: str, trap: dict[str, Any] | None = None, fault: dict[str, Any] | None = None) -> Any:
        """Start it, without a fault or with one of storage (see traps.py) or of another kind (see faults.py)."""
        for name, content, file in (("TRAP", trap, "traps.py"), ("FAULT", fault, "faults.py")):
            if content is not None:
                self._patch.setenv(name, json.dumps(content))
                self._patch.setenv("EXECUTE_FIRST", str(TESTS / file))
        job = self.lab.start(self._config, f"run.dir={self.run}", *overrides, ranks=self.ranks)
        for name in ("TRAP", "FAULT", "EXECUTE_FIRST"):
            self._patch.delenv(name, raising=False)
        return job

    def stop(self, job: Any) -> None:
        """Ask it to stop; it saves and exits with 75."""
        job.kill(0, signal.SIGTERM)
        self.ends(job, 75)

    def ends(self, job: Any, code: int) -> None:
        """Wait for an exit code, and for the end of the watchdog."""
        assert job.wait() == [code] * self.ranks, job.output()[-3000:]
        self.helpers.wait_for(lambda: not self.helpers.agents(self.run), what="the end of the watchdog")
        self.is_consistent()

    def until(self, key: str, state: str = "open", severity: str = "") -> dict[str, Any]:
        """Wait for a state of an alarm; the transition."""

        def standing() -> Any:
            alarm = (self.helpers.alarms(self.run, key) or [{}])[-1]
            return alarm if alarm.get("state") == state and severity in ("", alarm["severity"]) else None

        found: dict[str, Any] = self.helpers.wait_for(standing, what=f"{key} {state} {severity}")
        return found

    def reaches(self, steps: int, more: bool = False) -> None:
        """Wait for a step, or for that many more."""
        begin = self.step if more else 0
        self.helpers.wait_for(lambda: self.step >= begin + steps, what=f"step {begin} + {steps}")

    @property
    def step(self) -> int:
        records = sorted(self.run.glob("segments/*/metrics.jsonl"))
        last = records[-1].read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2] if records else b""
        return json.loads(last)["step"] if last else 0

    def saved(self) -> list[int]:
        """Steps of the verified checkpoints on storage."""
        names = (path.parent.name for path in (self.run / "checkpoints").glob("step-*/verified.json"))
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{8}", name))

    def said(self, key: str) -> Said:
        """Severity and state of every transition of an alarm."""
        return [(alarm["severity"], alarm["state"]) for alarm in self.helpers.alarms(self.run, key)]

    def warnings(self) -> set[str]:
        """Keys of all alarms of WARN or worse, except those typical of a tiny model or a busy machine."""
        found = {alarm["key"] for alarm in self.helpers.alarms(self.run) if alarm["severity"] != "INFO"}
        return {key for key in found if key.partition("/")[0] not in NOISE}

    def is_consistent(self) -> None:
        """Every transition is valid and in the journal; every second is in one state; nothing half-written is left."""
        told = [(a["key"], a["severity"], a["state"]) for a in self.helpers.alarms(self.run)]
        for key in {key for key, _, _ in told}:
            mine = self.said(key)
            assert all(one != next_ for one, next_ in pairwise(mine)), (key, mine)
        by_trainer = {entry["key"] for entry in self.helpers.journal(self.run, "health")}  # these are no alarms there
        entries = [e for e in self.helpers.journal(self.run, "alarm") if e["key"] not in by_trainer]
        told = [alarm for alarm in told if alarm[0] not in by_trainer]
        assert sorted((e["key"], e["severity"], e["state"]) for e in entries) == sorted(told)
        done = self._command("fsdp_pretrain.cli", "goodput", self.run, "--json")
        found = json.loads(done.stdout)
        assert sum(found["states"].values()) == pytest.approx(found["wall_seconds"], rel=1e-3)
        assert not list((self.run / "checkpoints").glob("*.writing-*"))
        verified = self._command("fsdp_pretrain.cli", "checkpoints", self.run, "verify")
        assert verified.returncode == 0, verified.stdout

    def learned_as(self, whole: list[Any]) -> None:
        """The curve is that of an undisturbed run."""
        losses = self.helpers.losses(self.run)
        assert [step for step, _, _ in losses] == list(range(1, len(losses) + 1))
        assert losses[: len(whole)] == whole[: len(losses)]


@pytest.fixture
def watched(lab: Any, helpers: Any, run_command: Any, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(lab, helpers, run_command, monkeypatch)


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


def take(disk: Path, leave: int) -> Path:
    """Fill a file system except for `leave` bytes; the file that does."""
    take_space(str(disk / "hog"), leave)
    return disk / "hog"


def at(path: str, act: str, verb: str = "open", *, skip: int = 0, times: int = 1, **more: Any) -> dict[str, Any]:
    """A trap of rank 0."""
    return {"rank": 0, "verb": verb, "path": path, "act": act, "skip": skip, "times": times, **more}


# ---------------------------------------------------------------------- room


@pytest.mark.slow
@pytest.mark.parametrize(("size", "lacking"), [("6m", "needs"), ("32m,nr_inodes=400", "room for")])
def test_storage_that_is_full_before_a_save(watched: Watched, small_disk: Disk, size: str, lacking: str) -> None:
    """Fault matrix 1 and 39: reported before the save that would fail; nothing half-written; 93; the last one loads."""
    disk = small_disk(size)
    watched.run = disk / "run"
    saves = {"every": "100 steps", "max_failures": 2, "retry": "2 s", "keep_last": 2, "ballast": False}
    watched.configure(checkpoint=saves)  # several checks between the first failure and the end
    job = watched.start()
    watched.helpers.wait_for(watched.saved, what="a checkpoint")
    left = []
    if "inodes" in size:
        left = [disk / f"file-{number}" for number in range(os.statvfs(disk).f_favail - 6)]
        for path in left:
            path.touch()
    else:
        left = [take(disk, leave=500_000)]
    told = watched.until("disk/checkpoints", severity="CRIT")
    assert lacking in told["summary"]
    watched.ends(job, 93)
    failed = watched.helpers.journal(watched.run, "checkpoint-failed")
    assert len(failed) == 2 and all("needs" in entry["text"] for entry in failed)
    assert told["step"] < failed[0]["step"] and watched.saved() == [100]
    assert watched.said("disk/checkpoints")[-1] == ("CRIT", "open")
    assert watched.said("checkpoint-failed") == watched.said("ended") == [("CRIT", "open")]
    assert watched.helpers.intent(watched.run)["code"] == 93
    for path in left:
        path.unlink()
    job = watched.start()
    (resumed,) = watched.helpers.wait_for(lambda: watched.helpers.journal(watched.run, "resume"), what="a resume")
    assert resumed["step"] == 100
    watched.until("disk/checkpoints", "resolved")
    journal = watched.helpers.journal
    watched.helpers.wait_for(lambda: len(journal(watched.run, "ready")) == 2, what="the second start")
    watched.stop(job)


def test_a_save_that_runs_out_of_space(watched: Watched, small_disk: Disk, whole: Whole) -> None:
    """Fault matrix 2: in the middle of a shard. Training continues, one report, saved when there is space."""
    disk = small_disk("8m")
    watched.run = disk / "run"
    watched.configure()
    job = watched.start(trap=at("__0_0.distcp", "fill", skip=1, hog=str(disk / "hog"), leave=60_000))
    told = watched.until("checkpoint-failed")
    assert told["severity"] == "CRIT" and told["step"] == 40
    watched.reaches(60)  # not 20 more: the record is on the same disk, and ends when that is full
    assert watched.saved() == [20]
    (disk / "hog").unlink()
    watched.until("checkpoint-failed", "resolved")
    watched.stop(job)
    assert watched.said("checkpoint-failed") == TOLD_AND_OVER
    failures = watched.helpers.journal(watched.run, "checkpoint-failed")
    assert "failed: rank 0" in failures[0]["text"] and all("needs" in entry["text"] for entry in failures[1:])
    watched.learned_as(whole(1))


@pytest.mark.slow
def test_the_ballast_is_what_the_last_save_needs(watched: Watched, small_disk: Disk) -> None:
    """Fault matrix 36: the save at the stop fits only because space was held back."""
    disk = small_disk("20m")
    watched.run = disk / "run"
    watched.configure(checkpoint={"every": "100000 steps", "prune": False})
    control = lambda verb: watched._command("fsdp_pretrain.cli", "control", watched.run, verb)  # noqa: E731
    job = watched.start()
    watched.reaches(5)
    hog = take(disk, leave=150_000)
    control("save")
    (failed,) = watched.helpers.wait_for(lambda: watched.helpers.journal(watched.run, "checkpoint-failed")[:1])
    need = float(re.search(r"needs ([\d.]+) KiB", failed["text"])[1]) * 1024  # type: ignore[index]
    hog.unlink()
    ballast = watched.run / "checkpoints/.ballast"
    watched.helpers.wait_for(ballast.exists, what="the ballast of a first checkpoint")
    take(disk, leave=int(need) - ballast.stat().st_size // 3)
    watched.stop(job)
    (room,) = watched.helpers.journal(watched.run, "checkpoint-room")
    assert "the ballast" in room["text"] and watched.saved()[-1] == watched.step


@pytest.mark.slow
def test_a_record_that_is_full_is_written_later(watched: Watched, small_disk: Disk, whole: Whole) -> None:
    """Fault matrix 35: training and saving continue; every step, entry and alarm is there once there is space again."""
    record, checkpoints = small_disk("4m"), small_disk("16m")
    watched.run = record / "run"
    watched.run.mkdir()
    (watched.run / "checkpoints").symlink_to(checkpoints)
    watched.configure()
    job = watched.start()
    watched.helpers.wait_for(watched.saved, what="a checkpoint")
    hog = take(record, leave=0)
    begin = watched.saved()[-1]
    watched.helpers.wait_for(lambda: watched.saved()[-1] >= begin + 60, what="checkpoints of a run without a record")
    time.sleep(1)  # several checks
    hog.unlink()
    watched.until("disk/run", "resolved")
    watched.stop(job)
    assert watched.said("disk/run")[-2:] == TOLD_AND_OVER and watched.said("disk/run").count(("CRIT", "open")) == 1
    assert watched.warnings() == {"disk/run"}
    watched.learned_as(whole(1))
    saved = {entry["step"] for entry in watched.helpers.journal(watched.run, "checkpoint")}
    assert set(range(20, watched.step, 20)) <= saved


# ---------------------------------------------------------------------- storage that fails


@pytest.mark.slow
@pytest.mark.parametrize("how", ["error", "read-only"])
def test_other_storage_takes_over(watched: Watched, small_disk: Disk, whole: Whole, how: str) -> None:
    """Fault matrix 21: EIO, or the read-only state after it: reported, the fallback is used and resumed."""
    disk, other = small_disk("16m"), watched.lab.path / "other"
    watched.run.mkdir()
    (watched.run / "checkpoints").symlink_to(disk)
    watched.configure(checkpoint={"fallback_dir": str(other)})
    trap = at("run/checkpoints/step.*writing", "fail", "mkdir", skip=1, times=1000) if how == "error" else None
    job = watched.start(trap=trap)
    watched.helpers.wait_for(watched.saved, what="a checkpoint")
    if how == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert "Read-only" in watched.until(f"mount/{watched.run}/checkpoints", severity="CRIT")["summary"]
    watched.until("checkpoint-fallback")
    job.kill()
    job.wait()
    (elsewhere,) = other.iterdir()
    newest = max(int(path.parent.name[5:]) for path in elsewhere.glob("step-*/verified.json"))
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    job = watched.start()
    watched.until("checkpoint-fallback", "resolved")
    assert watched.helpers.journal(watched.run, "resume")[-1]["step"] >= newest > 20
    watched.stop(job)
    assert watched.said("checkpoint-fallback") == [("WARN", "open"), ("WARN", "resolved")]
    watched.learned_as(whole(1))


@pytest.mark.slow
def test_a_writer_that_hangs(watched: Watched, whole: Whole) -> None:
    """Fault matrix 15: reported as the writer's, never as a hang of training; another writer makes the next save."""
    watched.configure(
        checkpoint={"every": "100 steps"},
        parallel={"timeout": "10 s"},
        watchdog={"storage": {**STORAGE, "still": "0.3 s"}},
    )
    job = watched.start(trap=at("__0_0.distcp", "wait", skip=1, seconds=600))
    writer = watched.until("checkpoint-writer")
    assert writer["severity"] == "CRIT" and "step-00000200.writing" in writer["summary"]
    watched.until("checkpoint-failed", "resolved")
    (failed, _) = watched.helpers.alarms(watched.run, "checkpoint-failed")  # the watchdog may read both at once
    assert "does not end" in failed["summary"]
    watched.until("checkpoint-writer", "resolved")
    watched.stop(job)
    assert watched.said("checkpoint-writer") == watched.said("checkpoint-failed") == TOLD_AND_OVER
    assert not watched.said("hang") and len(watched.saved()) >= 2
    watched.learned_as(whole(1))


@pytest.mark.slow
def test_writers_that_die(watched: Watched, whole: Whole) -> None:
    """Fault matrix 22: the writing thread dies, twice. Each is a failed save, and the next one works."""
    watched.configure(ranks=2, checkpoint={"every": "40 steps"}, parallel={"timeout": "10 s"})
    # 1: fine; 2: dies; 3: made while training waits; 4: dies; 5: as 3
    job = watched.start(trap=at(r"\.train_state", "end_thread", skip=1, times=3))
    watched.helpers.wait_for(lambda: len(watched.said("checkpoint-failed")) == 4, what="two failures, two successes")
    watched.reaches(60, more=True)
    watched.stop(job)
    assert watched.said("checkpoint-failed") == 2 * TOLD_AND_OVER
    assert len(watched.helpers.journal(watched.run, "checkpoint-failed")) == 2
    watched.learned_as(whole(2))


@pytest.mark.slow
def test_a_writer_that_is_slow(watched: Watched) -> None:
    """Fault matrix 37: reported as slow; at most one save in flight; the newest checkpoint is not late yet."""
    watched.configure(watchdog={"storage": {"interval": "10 s"}})
    job = watched.start(trap=at("__0_0.distcp", "wait", skip=8, seconds=7))
    flying = 0

    def fast_again() -> bool:
        nonlocal flying
        flying = max(flying, len(list((watched.run / "checkpoints").glob("*.writing-*"))))
        assert job.codes() == [None], job.output()
        return ("WARN", "resolved") in watched.said("checkpoint-speed")

    watched.helpers.wait_for(fast_again, what="saves that are fast again", every=0.01)
    watched.stop(job)
    assert watched.said("checkpoint-speed") == [("WARN", "open"), ("WARN", "resolved")]
    assert flying == 1 and watched.warnings() == {"checkpoint-speed"}


@pytest.mark.slow
def test_two_verified_checkpoints_stay_while_verification_fails(watched: Watched) -> None:
    """Fault matrix 23: what reads back wrong is moved aside and reported, and nothing older is deleted for it."""
    watched.configure(checkpoint={"keep_last": 2})
    job = watched.start(trap=at(r"/step-\d{8}$", "flip", "rename", skip=3, times=4))
    watched.helpers.wait_for(lambda: len(watched.saved()) >= 2, what="two checkpoints")
    fewest = 2

    def sound_again() -> bool:
        nonlocal fewest
        fewest = min(fewest, len(watched.saved()))
        assert job.codes() == [None], job.output()
        return watched.said("checkpoint-failed")[-1:] == [("CRIT", "resolved")]

    watched.helpers.wait_for(sound_again, what="a save that reads back well", every=0.001)
    watched.stop(job)
    assert fewest == 2
    failures = watched.helpers.journal(watched.run, "checkpoint-failed")
    assert len(failures) == 4 and all("reads back wrong" in entry["text"] for entry in failures)
    assert watched.said("checkpoint-failed") == TOLD_AND_OVER
    assert len(list((watched.run / "checkpoints/abandoned").iterdir())) == 4


# ---------------------------------------------------------------------- data


@pytest.mark.slow
def test_doubled_separators(watched: Watched, run_command: Any) -> None:
    """Fault matrix 18: refused by `validate` and training; without the packer's check an alarm in the first step."""
    tokenizer = Tokenizer.load(watched.lab.tokenizer)
    rng = np.random.default_rng(1)
    documents = [
        [*rng.integers(5, tokenizer.vocab_size, rng.integers(5, 60)).tolist(), tokenizer.eod] for _ in range(400)
    ]
    corpus = watched.helpers.corpus(watched.lab.path / "doubled", documents, tokenizer)  # declared to have none
    assert run_command("data.cli", "validate", corpus).returncode == 2
    watched.configure(data={"sources": [{"name": "text", "path": str(corpus)}]})
    job = watched.start()
    watched.ends(job, 78)
    assert "failed the packer's checks" in job.output() and "data-specials" not in watched.warnings()
    watched.run = watched.lab.path / "blind"
    job = watched.start(fault={"rank": "all", "step": 0, "kind": "trust"})
    told = watched.until("data-specials")
    assert told["severity"] == "CRIT" and told["step"] == 1 and watched.until("data-separators")["step"] == 1
    watched.stop(job)


def test_data_from_the_beginning_after_a_restart(watched: Watched) -> None:
    """Fault matrix 19: an alarm at the first step that reads old data again."""
    watched.configure()
    job = watched.start()
    watched.reaches(30)
    watched.stop(job)
    at_ = watched.step
    job = watched.start(fault={"rank": "all", "step": 0, "kind": "rewind"})
    assert [watched.until(key)["step"] for key in ("data-cursor",)] == [at_ + 1]
    watched.stop(job)
    assert watched.said("data-cursor") == [("CRIT", "open")]


@pytest.mark.slow
def test_sources_that_are_swapped(watched: Watched) -> None:
    """Fault matrix 41: the shares are not the planned ones any more: both alarm within 100 steps."""
    source = {"path": str(watched.lab.corpus)}
    sources = [{"name": "a", "weight": 3, **source}, {"name": "b", "weight": 1, **source}]
    watched.configure(data={"sources": sources})
    job = watched.start(fault={"rank": "all", "step": 120, "kind": "swap"})
    for name in "ab":
        told = watched.until(f"data-share/{name}")
        assert told["severity"] == "WARN" and 120 < told["step"] <= 220
    watched.stop(job)
    assert watched.warnings() == {"data-share/a", "data-share/b"}


@pytest.mark.slow
def test_a_shard_that_is_deleted(watched: Watched) -> None:
    """Fault matrix 40: reported by name at the next audit; open files work on; starts are refused until it is back."""
    corpus = watched.lab.path / "corpus"
    shutil.copytree(watched.lab.corpus, corpus)
    watched.configure(data={"sources": [{"name": "text", "path": str(corpus)}]})
    job = watched.start()
    watched.reaches(10)
    shard = min(corpus.glob("shards/*.bin"))
    shard.rename(watched.lab.path / "kept")
    told = watched.until("data-shard/text")
    assert told["severity"] == "CRIT" and str(shard) in told["summary"]
    watched.stop(job)
    again = watched.start()
    assert again.wait() == [78] and again.output().count("error:") == 1 and shard.name in again.output()
    shutil.copy(watched.lab.path / "kept", shard)
    job = watched.start()
    watched.until("data-shard/text", "resolved")
    watched.stop(job)
    assert watched.said("data-shard/text") == TOLD_AND_OVER


# ---------------------------------------------------------------------- GPUs and clocks

GPUS = [{"index": index, "clock": 1900, "busy": 0.99} for index in range(8)]


def show(path: Path, devices: list[dict[str, Any]]) -> None:
    """Write the file as a provider does: by replacing it."""
    path.with_suffix(".new").write_text(json.dumps({"devices": devices}))
    path.with_suffix(".new").rename(path)


def test_a_gpu_that_breaks(watched: Watched) -> None:
    """Fault matrix 45, as the file provider reports it: saves, stops, exit 76, and names the host to avoid."""
    gpus = watched.lab.path / "gpus.json"
    show(gpus, GPUS)
    hardware = {"provider": f"file:{gpus}", "interval": "0.2 s"}
    watched.configure(checkpoint={"every": "10000 steps"}, watchdog={"hardware": hardware})
    job = watched.start()
    watched.reaches(10)
    assert not watched.warnings()
    show(gpus, [*GPUS[:-1], {"index": 7, "xids": [79]}])
    watched.ends(job, 76)
    host = os.uname().nodename
    intent = watched.helpers.intent(watched.run)
    assert intent["code"] == 76 and intent["avoid_hosts"] == [host]
    assert watched.said(f"gpu/{host}") == [("CRIT", "open")] and watched.warnings() == {f"gpu/{host}"}
    assert watched.saved()[-1] == watched.step


@pytest.mark.slow
def test_a_gpu_helper_that_hangs(watched: Watched) -> None:
    """Fault matrix 45: only a warning, resolved when it answers."""
    gpus, host = watched.lab.path / "gpus.json", os.uname().nodename
    show(gpus, GPUS)
    hardware = {"provider": f"file:{gpus}", "interval": "0.2 s", "deadline": "0.5 s"}
    watched.configure(watchdog={"hardware": hardware})
    job = watched.start()
    watched.reaches(10)
    gpus.unlink()
    os.mkfifo(gpus)
    watched.until(f"gpu-blind/{host}")
    watched.reaches(20, more=True)
    show(gpus, GPUS)
    watched.until(f"gpu-blind/{host}", "resolved")
    watched.stop(job)
    assert watched.said(f"gpu-blind/{host}") == [("WARN", "open"), ("WARN", "resolved")]
    assert watched.warnings() == {f"gpu-blind/{host}"}


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


@pytest.mark.slow
def test_a_clock_that_jumps(watched: Watched, monkeypatch: pytest.MonkeyPatch, whole: Whole) -> None:
    """Fault matrix 47: the wall clock of ranks and watchdog jumps an hour ahead, then two back: reported, no effect."""
    jump, first = watched.lab.path / "jump", watched.lab.path / "clock/sitecustomize.py"
    first.parent.mkdir()
    first.write_text(CLOCK.format(jump=str(jump)))
    watched.configure(checkpoint={"max_age": "30 s"}, watchdog={"hang": {"soft": "20 s", "hard": "40 s"}})
    monkeypatch.setenv("EXECUTE_FIRST", str(first))
    job = watched.start()
    for seconds in (3600, -3600):
        watched.reaches(40, more=True)
        jump.write_text(str(seconds))
    watched.reaches(60, more=True)
    time.sleep(3)
    watched.stop(job)
    assert watched.said(f"clock/{os.uname().nodename}") == [("WARN", "open")]
    assert watched.warnings() == {f"clock/{os.uname().nodename}"}
    watched.learned_as(whole(1))
