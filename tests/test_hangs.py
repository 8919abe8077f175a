"""Hanging runs, dying ranks, killed agents and launchers: what the watchdog detects, reports and does."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import TORCHRUN, python, spawn
from sight import PATIENT, WATCHED, agents, family, hang, steps, until

from fsdp_pretrain.config.operations import WatchdogSection
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.parallel import mesh
from fsdp_pretrain.ranks import RankInfo
from fsdp_pretrain.watchdog.hang.diagnosis import diagnose
from fsdp_pretrain.watchdog.hang.monitor import HangMonitor
from fsdp_pretrain.watchdog.hang.page import Page, Reader
from fsdp_pretrain.watchdog.hang.peers import PeerNodes
from fsdp_pretrain.watchdog.hang.rank_monitor import RankMonitor, RankSnapshot
from fsdp_pretrain.watchdog.hang.stacks import Frame, Stack

FAULTS = Path(__file__).resolve().parent / "faults.py"


@pytest.fixture
def watched(lab: Any) -> Callable[..., Path]:
    """A configuration of a run long enough to be broken, with a fast watchdog."""

    def make(name: str = "run", **sections: dict[str, Any]) -> Path:
        sections.setdefault("train", {"duration": "4000 steps"})
        sections.setdefault("checkpoint", {"every": "1000 steps"})  # how long a save may take is unknown at first
        config: Path = lab.config(name, **{"watchdog": WATCHED, **sections})
        return config

    return make


FAILS = """
import sys, threading, time
import torch.distributed as dist
from fsdp_pretrain.processes import run_rank
def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    threading.Thread(target=time.sleep, args=(600,)).start()  # in place of NCCL's destructor, which waits for peers
    if sys.argv[1] == "raises":
        raise ZeroDivisionError("of this rank alone")
    return 93
run_rank(main)
"""
BUSY = """
import sys, threading
from fsdp_pretrain.config.config import load
from fsdp_pretrain.ranks import RankInfo
from fsdp_pretrain.watchdog.hang.rank_client import PageHeartbeat, folder
def deep(depth):
    return depth and deep(depth - 1)
def work():
    while True:
        for depth in range(30):
            deep(depth)
        exec("def new(x): return x\\n[new(x) for x in range(5)]", {})
config = load(sys.argv[1], [])
PageHeartbeat(config, RankInfo(1, 2, 1, 2), {})
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
print(folder(config.run.dir), flush=True)
while True:
    deep(20)
"""
"""A rank whose threads all run Python, as those do that run hooks in a backward pass."""


@pytest.mark.promise("watchdog-harmless")
def test_a_rank_survives_any_number_of_questions_for_its_stacks(lab: Any, helpers: Any) -> None:
    """A signal handler in its place would read frames while they change, and crash once in a hundred dumps."""
    line, environment = [sys.executable, "-c", BUSY, lab.config()], helpers.environment()
    busy = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True)
    assert busy.stdout is not None
    (rank,) = RankMonitor(range(1, 2), Path(busy.stdout.readline().strip()), os.getpid()).all
    rank.read_page()

    def stack() -> Stack | None:
        assert busy.poll() is None, f"the rank ended with {busy.returncode}"
        return rank.dumps.latest()

    try:
        for _ in range(300):
            rank.ask_stack()
            assert rank.owes_stack
            until(stack, every=0.002)
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.shows("A8", "A25", "F6")
@pytest.mark.promise("hang-named")
def test_a_stopped_rank_is_named_and_the_job_ended(lab: Any, helpers: Any, watched: Callable[..., Path]) -> None:
    """SIGSTOP. Alarm at the soft deadline with the rank, stacks of all, end at the hard one."""
    config, run = watched(), lab.path / "run"
    job = lab.start(config, ranks=2)
    until(lambda: steps(run) > 30)
    job.kill(1, signal.SIGSTOP)
    alarm = hang(run, suspects=[1])
    assert alarm["severity"] == "CRIT" and alarm["facts"]["verdict"] == "stopped" and alarm["facts"]["seconds"] >= 2.0
    assert f"rank 1 ({os.uname().nodename}, pid {job.ranks[1].pid}) is stopped" in alarm["summary"]
    assert job.wait() == [-signal.SIGKILL] * 2
    found = helpers.intent(run)
    assert found["code"] == 75 and found["restart"] and found["suspects"] == [1]
    stacks = sorted(path.name for path in (run / "watchdog/stacks").iterdir())
    assert stacks == ["0001-rank-00000.txt", "0001-rank-00001.txt"]
    assert all("most recent call first" in (run / "watchdog/stacks" / name).read_text() for name in stacks)
    until(lambda: not helpers.agents(run))


CASES: dict[str, tuple[dict[str, Any], str, list[int], str]] = {
    "held": ({"kind": "hold"}, "wedged", [1], "has a wedged interpreter: faults.py"),
    "lost step": ({"kind": "desync"}, "desync", [], "they are out of step"),
}


@pytest.mark.shows("A25", "F7", "F28")
@pytest.mark.parametrize("case", ["held", pytest.param("lost step", marks=pytest.mark.slow)])
@pytest.mark.promise("hang-named")
def test_hangs_are_told_apart(
    lab: Any, helpers: Any, watched: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The interpreter lock held in C, another collective."""
    fault, verdict, suspects, words = CASES[case]
    monkeypatch.setenv("EXECUTE_FIRST", str(FAULTS))
    monkeypatch.setenv("FAULT", json.dumps({"rank": 1, "step": 30, **fault}))
    deadlines = {"soft": "6 s", "hard": "9 s"}  # a blocked interpreter shows after five seconds
    job = lab.start(watched(watchdog={**WATCHED, "hang": deadlines}), ranks=2)
    run = lab.path / "run"
    alarm = hang(run, verdict=verdict)
    assert alarm["facts"]["suspects"] == suspects and words in alarm["summary"] and alarm["step"] == 30, alarm
    assert job.wait() == [-signal.SIGKILL] * 2
    assert helpers.intent(run)["code"] == 75 and helpers.intent(run)["verdict"] == verdict


@pytest.mark.promise("hang-named")
def test_an_error_that_a_rank_reported_outlives_the_death_of_its_peers(
    lab: Any, helpers: Any, watched: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that waits in NCCL handles no signal, and is killed."""
    run = lab.path / "run"
    reported = {"rank": 0, "step": 30, "kind": "await_file", "path": str(run / "segments/0001/exit_intent.json")}
    faults = [reported, {"rank": 0, "step": 30, "kind": "die"}, {"rank": 1, "step": 30, "kind": "fail"}]
    monkeypatch.setenv("EXECUTE_FIRST", str(FAULTS))
    monkeypatch.setenv("FAULT", json.dumps(faults))
    job = lab.start(watched(watchdog=PATIENT), ranks=2)
    assert job.wait() == [-signal.SIGKILL, 1]
    until(lambda: not helpers.agents(run))
    found = helpers.intent(run)
    assert (found["code"], found["rank"], found["reason"]) == (1, 1, "MemoryError: of this rank alone")
    assert not helpers.alarms(run, "rank-died")
    (alarm,) = helpers.alarms(run, "ended")
    assert "exit 1: rank 1: MemoryError: of this rank alone" in alarm["summary"]


def snapshot(rank: int, host: str, **changes: Any) -> RankSnapshot:
    """Snapshot of a rank; unchanged, it waits in the operation in which all do."""
    known: dict[str, Any] = {
        "collective": "all_reduce", "place": "distributed_c10d.py:9 all_reduce", "group": ("all_reduce", "mesh.py:sum_"),
        **changes,
    }  # fmt: skip
    return RankSnapshot(rank, host, 100 + rank, 30, "reduce", 999, 5.0, known.pop("state", "S"), False, **known)


NO_STACK: dict[str, Any] = {"collective": None, "place": "", "group": ()}
"""Its stack was requested, without an answer yet."""
STUCK: dict[str, Any] = {**NO_STACK, "place": "threading.py:9 wait", "group": ("", "saves.py:finish")}
VICTIM, STOPPED = snapshot(0, "n0"), snapshot(1, "n1", state="T", **NO_STACK)
OTHER = {"group": ("all_gather", "parallel.py:gather")}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("snapshots", "quiet", "unreported", "kind", "suspects", "hosts", "said"),
    [
        ([VICTIM, snapshot(1, "n1")], {}, [], "network", (), (), "all ranks wait in all_reduce"),
        ([VICTIM], {}, ["n1"], "unknown", (), (), "not all ranks of n1 have reported their position yet"),
        ([VICTIM, snapshot(1, "n1", **NO_STACK)], {}, [], "unknown", (), (), "n1"),
        ([VICTIM, snapshot(1, "n0", **OTHER)], {}, ["n1"], "unknown", (), (), "n1"),
        ([VICTIM, snapshot(1, "n0", **OTHER)], {}, [], "desync", (), (), "different operations"),
        ([VICTIM], {"n1": 20.0}, [], "silent", (), ("n1",), "no heartbeat from n1 for 20s"),
        ([VICTIM, STOPPED], {}, ["n2"], "stopped", (1,), ("n1",), "rank 1 (n1, pid 101) is stopped"),
        ([VICTIM, STOPPED], {"n2": 20.0}, [], "stopped", (1,), ("n1", "n2"), "no heartbeat from n2"),
        ([snapshot(0, "n0", state="D"), STOPPED], {}, [], "stopped", (1, 0), ("n1", "n0"), "waits in the kernel"),
        ([snapshot(0, "n0", **STUCK), STOPPED], {}, [], "stopped", (1,), ("n1",), "rank 1"),
        ([VICTIM, snapshot(1, "n1", **STUCK)], {}, [], "stuck", (1,), ("n1",), "is stuck in threading.py:9 wait"),
    ],
)
def test_a_verdict_is_as_good_as_what_is_known(
    snapshots: list[RankSnapshot],
    quiet: dict[str, float],
    unreported: list[str],
    kind: str,
    suspects: tuple[int, ...],
    hosts: tuple[str, ...],
    said: str,
) -> None:
    """Nothing is concluded from missing answers of a node or a rank, and two causes are both reported."""
    verdict = diagnose(snapshots, quiet, unreported)
    assert (verdict.kind, verdict.suspects, verdict.hosts) == (kind, suspects, hosts) and said in verdict.text
    assert verdict.silent == tuple(quiet) and set(unreported) <= set(verdict.unknown)


_TORCH = "/venv/lib/python3.12/site-packages/torch/"
_STEP = (
    Frame("/here/fsdp_pretrain/train/trainer.py", 140, "read"),
    Frame("/here/fsdp_pretrain/train/loop.py", 90, "run"),
)
WAITS = (
    Frame(_TORCH + "cuda/streams.py", 231, "synchronize"),
    Frame("/here/fsdp_pretrain/train/ledger.py", 70, "settle"),
    *_STEP,
)
LOOPS = (Frame("/here/fsdp_pretrain/data/packing/packer.py", 40, "_fill"), *_STEP)
GATHERS = (Frame(_TORCH + "distributed/distributed_c10d.py", 3200, "all_gather_object"), *_STEP)


@pytest.mark.quick
@pytest.mark.parametrize("ranks", [2, 16])
@pytest.mark.parametrize(
    ("others", "kind", "said"),
    [
        ({}, "network", "all ranks wait in a collective on the device"),
        ({1: LOOPS}, "stuck", "rank 1 (n0, pid 101) is stuck in packer.py:40 _fill"),
        ({1: LOOPS, 9: LOOPS}, "stuck", "rank 9 (n1, pid 109)"),
        ({1: GATHERS}, "desync", "out of step"),
    ],
    ids=["dead network", "one", "two", "another collective"],
)
def test_ranks_that_wait_for_their_gpus_are_victims(
    ranks: int, others: dict[int, tuple[Frame, ...]], kind: str, said: str
) -> None:
    """The stacks of NCCL: the host waits for an event of the step two before, wherever the device is."""
    others = {rank: frames for rank, frames in others.items() if rank < ranks}
    snapshots = []
    for rank in range(ranks):
        stack = Stack(others.get(rank, WAITS), "/here/")
        known = {"collective": stack.collective, "place": stack.place, "group": stack.group}
        snapshots.append(snapshot(rank, f"n{rank // 8}", **known))
    verdict = diagnose(snapshots, {}, [])
    assert verdict.kind == kind and (said in verdict.text or (len(others) == 1 and 9 not in others))
    expected = tuple(others) if kind == "stuck" or (kind == "desync" and ranks > 2) else ()
    assert verdict.suspects == expected


@pytest.mark.quick
def test_files_of_others_are_not_taken_for_ours() -> None:
    """A library below a folder `data`: ranks in it are told apart only by where this project called it."""
    theirs, ours = Frame("/lib/data/corpus/reading.py", 3, "_read"), Frame("/here/fsdp_pretrain/units.py", 9, "_scaled")
    alone, called = Stack((theirs,), "/here/"), Stack((theirs, ours), "/here/")
    assert (alone.group, alone.place) == (("", ""), "reading.py:3 _read")
    assert (called.group, called.place) == (("", "units.py:_scaled"), "reading.py:3 _read (from units.py:9 _scaled)")


@pytest.mark.shows("F27")
def test_a_shard_that_does_not_answer_is_named(
    lab: Any, helpers: Any, watched: Callable[..., Path], shared_corpus: Path, constants: Any
) -> None:
    """A FIFO in place of a shard. The alarm names the file."""
    constants("fsdp_pretrain.watchdog.hang.deadlines", UNKNOWN_SOFT=3.0)
    corpus = lab.path / "corpus"
    shutil.copytree(shared_corpus / "corpus", corpus)
    data = {"sources": [{"name": "text", "path": str(corpus)}]}
    deadlines = {"soft": "2 s", "hard": "60 s"}
    path, run = watched(data=data, watchdog={**WATCHED, "hang": deadlines, "act": False}), lab.path / "run"
    shards = sorted(corpus.glob("shards/*.bin"))
    assert shards
    job = lab.start(path, "train.duration='100000 steps'")
    until(lambda: steps(run) > 5)
    shard = shards[0]
    shard.unlink()
    os.mkfifo(shard)
    job.kill()
    until(lambda: not helpers.agents(run))
    lab.start(path, "train.duration='100000 steps'", flags=("--allow", "train.duration"))
    assert str(shard) in hang(run, verdict="data")["summary"]


@pytest.mark.slow
@pytest.mark.shows("F24")
@pytest.mark.promise("watchdog-harmless")
def test_a_killed_agent_comes_back_and_nobody_minds(lab: Any, helpers: Any, watched: Callable[..., Path]) -> None:
    config, run = watched(watchdog=PATIENT), lab.path / "run"
    job = lab.start(config, ranks=2)
    first = until(lambda: helpers.agents(run))
    until(lambda: steps(run) > 10)
    os.kill(first[0], signal.SIGKILL)
    again = until(lambda: [pid for pid in helpers.agents(run) if pid not in first])
    until(lambda: "was restarted" in (run / "journal.jsonl").read_text())
    before = steps(run)
    until(lambda: steps(run) > before + 20)
    assert not helpers.alarms(run, "hang") and not helpers.alarms(run, "rank-died")
    job.kill(0, signal.SIGTERM)
    assert job.wait() == [75, 75]
    until(lambda: not psutil.pid_exists(again[0]))


@pytest.mark.shows("D16", "F25")
@pytest.mark.promise("no-orphans")
def test_nothing_outlives_a_killed_torchrun(lab: Any, helpers: Any, watched: Callable[..., Path]) -> None:
    """The agent ends the ranks that a killed torchrun leaves, and itself. Signals that a scheduler sends to every process
    of a job do not end it before."""
    run, line = lab.path / "run", [*TORCHRUN, "--standalone", "--nproc-per-node", 2]
    job = spawn([*line, "-m", "fsdp_pretrain.train", watched(watchdog=PATIENT)], lab.path / "torchrun.log")
    processes = [job.pid]
    try:
        until(lambda: steps(run) > 10)
        (agent,) = helpers.agents(run)
        for number in (signal.SIGINT, signal.SIGUSR1):
            os.kill(agent, number)
        until(lambda: steps(run) > 20)
        assert helpers.agents(run) == [agent]
        processes += [*family(job.pid), agent]
        assert len(processes) >= 4
        job.kill()
        job.wait()
        until(lambda: not any(map(psutil.pid_exists, processes)))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    assert helpers.intent(run)["code"] == 75 and "that started the ranks is gone" in helpers.intent(run)["reason"]


def test_a_watchdog_that_is_new_knows_steps_by_the_record(lab: Any, watched: Callable[..., Path]) -> None:
    """It was started, or delayed, until just before the hang, and has seen no step itself."""
    run = lab.path / "run"
    patient = {"timeout": "180 s"}  # the watchdog is first, although it was stopped
    config = watched(watchdog={**WATCHED, "hang": {"soft": "2 s", "hard": "600 s"}}, parallel=patient)
    job = lab.start(config, ranks=2)
    (agent,) = until(lambda: agents(run))
    os.kill(agent, signal.SIGSTOP)
    until(lambda: steps(run) > 10)
    job.kill(1, signal.SIGSTOP)
    os.kill(agent, signal.SIGCONT)
    assert hang(run, suspects=[1])["facts"]["verdict"] == "stopped"


IN_A_SAVE = """
import os, pathlib, signal, sys
from fsdp_pretrain.heartbeat import Phase
from fsdp_pretrain.watchdog.hang.page import Page
page = Page(pathlib.Path(sys.argv[1]), rank=0, segment=1)
page.step(7)
page.beat(Phase.SAVE)
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
signal.pause()
"""


@pytest.mark.quick
def test_a_note_that_is_too_long_for_a_page_does_not_replace_the_last(tmp_path: Path) -> None:
    page, reader = Page(tmp_path / "rank-0.page", rank=0, segment=1), Reader(tmp_path / "rank-0.page")
    for note, read in ((b"a.bin", b"a.bin"), (b"x" * 3072, b"a.bin"), (b"y" * 3071, b"y" * 3071)):
        page.alive(note)
        assert reader.note() == read


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "busy"])
def test_a_rank_that_is_stopped_in_its_first_save_is_named_at_once(
    tmp_path: Path, helpers: Any, watch: Any, stopped: bool
) -> None:
    """How long saves take is not known yet, so that one that is busy is waited for."""
    line = [sys.executable, "-c", IN_A_SAVE, str(tmp_path / "rank-0.page"), "SIGSTOP" if stopped else "SIGCONT"]
    rank = subprocess.Popen(line, env=helpers.environment())
    ranks = RankMonitor(range(1), tmp_path, os.getpid())
    section = WatchdogSection.model_validate({"act": False, "hang": {"soft": "1 s", "hard": "2 s"}})
    nodes = PeerNodes(tmp_path, 0, 1, "attempt")
    monitor = HangMonitor(section, ranks, nodes, tmp_path, end=lambda *_: None)
    monitor.alarms = watch.alarms
    monitor.history.assume(0.01)

    def after(seconds: float) -> bool:
        """Whether the rank has made no progress for so long, as the monitor has seen."""
        ranks.read_pages()
        monitor.check()
        return ranks.still() > seconds

    try:
        until(lambda: after(0.1) and ranks.all[0].state == ("T" if stopped else "S"))
        if stopped:
            until(lambda: after(1.0) and "hang" in watch.alarms.open_keys())
            assert "is stopped" in next(iter(watch.alarms)).summary
        else:
            until(lambda: after(4.0))
            assert not monitor.is_stalled
    finally:
        rank.kill()
        rank.wait()


@pytest.mark.shows("F15", "F31")
@pytest.mark.slow
def test_long_first_steps_and_saves_are_no_hang(
    lab: Any, helpers: Any, watched: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first step of many deadlines, saves that take long, and a regular end."""
    monkeypatch.setenv("EXECUTE_FIRST", str(FAULTS))
    monkeypatch.setenv("FAULT", json.dumps({"rank": "all", "step": 1, "kind": "doze", "seconds": 6}))
    config, run = watched(train={"duration": "40 steps"}, checkpoint={"every": "20 steps"}), lab.path / "run"
    lab.train(config, ranks=2)
    assert not helpers.alarms(run, "hang")
    assert not list((run / "watchdog").glob("stacks/*"))


@pytest.mark.promise("watchdog-harmless")
def test_a_run_directory_that_hangs_blinds_and_silences_nobody(
    lab: Any, watched: Callable[..., Path], helpers: Any
) -> None:
    """The agent blocks in the run directory: that is reported, and ranks that stop meanwhile are still ended."""
    run, told = lab.path / "run", lab.path / "told"
    command = ["sh", "-c", f"cat >> {told}; echo >> {told}"]
    job = lab.start(watched(watchdog={**WATCHED, "notify": {"command": command}}), ranks=2)
    until(lambda: steps(run) > 20)
    metrics = run / "segments/0001/metrics.jsonl"
    metrics.rename(metrics.with_suffix(".away"))
    os.mkfifo(metrics)  # whoever opens it to read blocks; the trainer has its file open
    messages = lambda: map(json.loads, told.read_text().splitlines() if told.exists() else ())  # noqa: E731
    (message, *_) = until(lambda: [each for each in messages() if each["key"].startswith("blind/")])
    assert "does not answer" in message["summary"]
    job.kill(1, signal.SIGSTOP)
    assert job.wait() == [-signal.SIGKILL] * 2
    fifo = metrics.rename(metrics.with_suffix(".fifo"))  # it answers again
    metrics.with_suffix(".away").rename(metrics)
    os.close(os.open(fifo, os.O_WRONLY))
    until(lambda: not helpers.agents(run))
    states = [alarm["state"] for alarm in helpers.alarms(run) if alarm["key"].startswith("blind/")]
    assert states[:2] == ["open", "resolved"] and states[-1] == "resolved"


@pytest.mark.parametrize(("how", "code"), [("raises", 1), ("returns", 93)])
def test_a_rank_that_fails_alone_does_not_wait_for_its_peers(how: str, code: int) -> None:
    failed = python("-c", FAILS, how, expect=code, timeout=120)
    assert ("ZeroDivisionError: of this rank alone" in failed.stderr) == (how == "raises")


def test_a_gpu_that_torch_cannot_use_is_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "gpu_count", lambda: 8)
    with pytest.raises(ConfigError, match=r"has 8 GPUs, and torch .* can use none"):
        mesh.device_of(RankInfo(0, 1, 0, 1))
