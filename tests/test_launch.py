"""The launcher: real torchrun, two gloo ranks, and every way a start can end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import LAUNCH, SET_CONSTANTS, TORCHRUN, free_port, python, python_path, spawn
from sight import PATIENCE, PATIENT, rank_of

from fsdp_pretrain.config.operations import LaunchSection
from fsdp_pretrain.launch import outcome
from fsdp_pretrain.launch.policy import decide
from fsdp_pretrain.run.files import RunDir, json_object, read_lines
from fsdp_pretrain.run.lock import hold

HASTE = {"stop_timeout": "120 s"}


@pytest.fixture(autouse=True)
def haste(constants: Any) -> None:
    """Short pauses between starts, short waits for their ends."""
    constants("fsdp_pretrain.launch.policy", PAUSES=[0.1])
    constants("fsdp_pretrain.launch.watch", END_SECONDS=30.0)


class Launched:
    """A running launcher, with arguments of the trainer and options of its own; `extra` are variables."""

    def __init__(
        self,
        lab: Any,
        helpers: Any,
        config: Path,
        *arguments: str,
        options: tuple[str, ...] = (),
        run: Path | None = None,
        **extra: str,
    ) -> None:
        arguments = arguments if run is None else (f"run.dir={run}", *arguments)
        self.run, self._helpers = run or lab.path / config.stem, helpers
        self.log = lab.path / f"launch-{len(list(lab.path.glob('launch-*')))}"
        self.process = spawn([*LAUNCH, "--nproc-per-node", 2, *options, config, *arguments], self.log, **extra)

    def reaches(self, step: int) -> None:
        """Wait until a step is recorded."""
        self._helpers.wait_for(lambda: self.step >= step or self.process.poll() is not None, what=f"step {step}")
        assert self.process.poll() is None, self.output()

    @property
    def step(self) -> int:
        steps = self._helpers.metrics(self.run) if (self.run / "segments").is_dir() else []
        return steps[-1]["step"] if steps else 0

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        found = {number: one for one in self.family() if (number := rank_of(one.pid)) is not None}
        return [found[number] for number in sorted(found)]

    def ends(self, code: int) -> str:
        """Wait for the exit code; the output."""
        try:
            assert self.process.wait(2 * PATIENCE) == code, self.output()
        finally:
            self.process.kill()
        return self.output()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def intent(self) -> dict[str, Any]:
        """The exit intent in `status.json`."""
        return json.loads((self.run / "status.json").read_text())["exit_intent"]


Launch = Callable[..., Launched]


@pytest.fixture
def launch(lab: Any, helpers: Any) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(*arguments: Any, **options: Any) -> Launched:
        started.append(Launched(lab, helpers, *arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()


LONG = {"duration": "4000 steps", "global_batch": "8 samples", "micro_batch": 2}


def test_the_last_alarm_is_told_before_the_launcher_ends(lab: Any, launch: Launch) -> None:
    """A container ends with it, and after a refusal no start follows whose watchdog would send the rest."""
    heard, hook = lab.path / "heard", lab.path / "hook"
    hook.write_text(f"#!/bin/sh\nsleep 1\necho $WD_KEY $WD_STATE >>{heard}\n")
    hook.chmod(0o755)
    watchdog = {"enabled": True, "notify": {"command": [str(hook)]}}
    config = lab.config(train=LONG, parallel={"shard": 2}, watchdog=watchdog)
    first = launch(config)
    first.reaches(3)
    first.process.send_signal(signal.SIGUSR1)
    first.ends(75)
    launch(config, "model.ffn=96").ends(78)
    assert "ended open" in heard.read_text().splitlines()


def segments(job: Launched) -> int:
    return len(list((job.run / "segments").iterdir()))


def with_each_batch(folder: Path, statement: str) -> Path:
    """A folder for PYTHONPATH: every rank executes a statement when it has read a `batch`."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        SET_CONSTANTS + "import os, time\n"
        "if rank := os.environ.get('RANK'):\n"
        "    from fsdp_pretrain.data.packing import loader\n"
        "    real = loader.Loader.__next__\n"
        "    def then(self):\n"
        "        batch = real(self)\n"
        f"        {statement}\n"
        "        return batch\n"
        "    loader.Loader.__next__ = then\n"
    )
    return folder


@pytest.mark.shows("A4", "A24", "A28", "F11", "F16")
def test_killed_rank_then_stop(launch: Launch, lab: Any, helpers: Any) -> None:
    """kill -9 of a rank is reported with its number and followed by a new start; SIGUSR1 to every process of the job
    saves, stops, exits 75, without a word about failures."""
    config = lab.config(train=LONG, checkpoint={"every": "10 steps"}, launch=HASTE, watchdog=PATIENT)
    job = launch(config)
    helpers.wait_for(lambda: helpers.journal(job.run, "checkpoint"), what="a checkpoint to continue from")
    (torchrun_process,) = psutil.Process(job.process.pid).children()
    assert torchrun_process.environ()["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "120"  # HASTE
    killed = job.ranks()[1]
    killed.kill()
    helpers.wait_for(lambda: helpers.journal(job.run, "restart"), what="a restart")
    (restart,) = helpers.journal(job.run, "restart")
    assert restart["attempt"] == 2 and restart["code"] in (1, 75) and restart["last_step"] >= 10
    assert "rank 1" in helpers.wait_for(lambda: helpers.alarms(job.run, "rank-died"))[0]["summary"]
    died = json.loads((job.run / "segments/0001/exit_intent.json").read_text())
    assert (died["code"], died["suspects"]) == (75, [1]) and died["restart"]
    job.reaches(restart["last_step"] + 5)
    output = job.output()
    assert f"torchrun: rank 1 (pid {killed.pid}) was killed by SIGKILL\n" in output and "Traceback" not in output
    before = len(job.output())
    for process in [psutil.Process(job.process.pid), *job.family()]:  # as Slurm does
        process.send_signal(signal.SIGUSR1)
    assert not re.search("Traceback|FAILED|Root Cause|exitcode|closing signal", job.ends(75)[before:])
    assert job.intent() == {"code": 75, "reason": "stopped on request (SIGUSR1)"}
    assert not [one for one in helpers.journal(job.run, "watchdog") if "restarted" in one["text"]]
    last = helpers.metrics(job.run)[-1]["step"]
    assert (job.run / f"checkpoints/step-{last:08d}/verified.json").exists()
    assert helpers.journal(job.run, "resume")[-1]["step"] >= 10 and segments(job) == 2
    assert max(len(entry["text"]) for entry in helpers.journal(job.run)) <= 200


@pytest.mark.slow
def test_a_node_that_joins_waits_for_a_save(launch: Launch, lab: Any, helpers: Any, tmp_path: Path) -> None:
    """An elastic job of one node is joined by another: its last save takes 35 s, longer than torchrun itself waits."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        SET_CONSTANTS + "import os, time\n"
        "if os.environ.get('RANK'):\n"
        "    from fsdp_pretrain.train.loop import Loop\n"
        "    save = Loop.checkpoint\n"
        "    def slow(self, **how):\n"
        "        time.sleep(35 * how.get('must_succeed', False))\n"
        "        save(self, **how)\n"
        "    Loop.checkpoint = slow\n"
    )
    config = lab.config(train=LONG, checkpoint={"every": "1000 steps"}, launch=HASTE, watchdog=PATIENT)
    port = free_port()

    def node(number: int) -> Launched:
        how = f"is_host={str(number == 0).lower()},last_call_timeout=2"
        options = ("--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", how, "--rdzv-id", "x")
        return launch(config, options=options, PYTHONPATH=python_path(tmp_path / "site"))

    one = node(0)
    one.reaches(12)
    other = node(1)
    helpers.wait_for(lambda: len(helpers.journal(one.run, "ready")) == 2, what=one.output)
    saved = helpers.journal(one.run, "checkpoint")[0]["step"]
    assert helpers.journal(one.run, "resume")[-1]["step"] == saved >= 12 and not helpers.alarms(one.run, "rank-died")
    for job in (one, other):
        job.process.send_signal(signal.SIGTERM)
    one.ends(75)


@pytest.mark.slow
def test_between_two_starts(launch: Launch, lab: Any, helpers: Any, run_command: Any, constants: Any) -> None:
    """A start waits for a rollback that is under way, as long as it takes; the record says why none follows a refused
    one. In the pause nobody can be asked, and the answer says whom to end."""
    constants("fsdp_pretrain.launch.policy", PAUSES=[15.0])
    hasty = {**HASTE, "join_timeout": "2 s"}
    config = lab.config(train=LONG, checkpoint={"every": "10 steps"}, launch=hasty, watchdog=PATIENT)
    job = launch(config)
    job.reaches(12)
    job.ranks()[1].kill()
    helpers.wait_for(lambda: helpers.journal(job.run, "restart"), what="a restart")
    refused = run_command("fsdp_pretrain.cli", "control", job.run, "stop", expect=78).stderr
    assert "no job of" in refused and "to end the launcher, send it SIGTERM" in refused
    with hold(RunDir(job.run), "rollback"):
        time.sleep(20)
        assert segments(job) == 1 and job.process.poll() is None
        assert job.output().count("launch: waiting for the end of what somebody does to the run") == 1
    helpers.wait_for(lambda: len(helpers.journal(job.run, "ready")) == 2, what="the second start")
    (job.run / "avoid_hosts").write_text(socket.gethostname() + "\n")
    job.ranks()[1].kill()
    assert socket.gethostname() in job.ends(76)
    assert job.intent()["code"] == 76 == helpers.journal(job.run, "stop")[-1]["code"]
    assert json.loads((job.run / "status.json").read_text())["state"] == "stopped" and segments(job) == 2


@pytest.mark.shows("A23", "F11")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["one-rank", "twice", "limit"])
@pytest.mark.promise("exit-codes")
def test_stops_are_not_started_again(launch: Launch, lab: Any, helpers: Any, constants: Any, how: str) -> None:
    """Whoever asks, and however: one agreed step, a verified checkpoint, 75, no other start."""
    options = ("--time-limit", "120 s") if how == "limit" else ()
    constants("fsdp_pretrain.launch.limit", LEAST=45.0)
    train = {**LONG, "duration": "400_000 steps"}
    pace = helpers.python_path(with_each_batch(lab.path / "pace", "time.sleep(0.1)"))  # for other tests beside this one
    config = lab.config(train=train, checkpoint={"every": "1000 steps"}, launch=HASTE)
    job = launch(config, options=options, PYTHONPATH=pace)
    if how != "limit":  # which comes whatever step has been reached
        job.reaches(5)
    if how == "one-rank":
        job.ranks()[1].terminate()
    elif how == "twice":
        family = [*job.family()]
        for rank in job.ranks():
            rank.suspend()  # so that nothing is saved
        job.process.send_signal(signal.SIGINT)
        helpers.wait_for(lambda: "asking the ranks" in job.output(), what="the first to be heard")
        job.process.send_signal(signal.SIGINT)
    printed = job.ends(75)
    assert segments(job) == 1
    if how == "twice":
        assert "ending at once" in printed and not psutil.wait_procs(family, timeout=PATIENCE)[1]
        return
    last = helpers.metrics(job.run)[-1]["step"]
    assert (job.run / f"checkpoints/step-{last:08d}/verified.json").exists()
    assert job.intent()["code"] == 75


@pytest.mark.shows("D16", "F25")
@pytest.mark.slow
@pytest.mark.promise("no-orphans")
def test_no_process_outlives_its_parent(launch: Launch, lab: Any, helpers: Any, constants: Any) -> None:
    """A frozen torchrun with a dead rank is killed soon. kill -9 of torchrun ends its ranks, and another start follows;
    of the launcher: it ends everything."""
    constants("fsdp_pretrain.launch.watch", END_SECONDS=3.0)
    job = launch(lab.config(train=LONG, checkpoint={"every": "5 steps"}, launch=HASTE))
    for starts, victim in enumerate(("a rank of a frozen torchrun", "torchrun", "launcher"), 1):
        job.reaches(job.step + 11)  # a start that made no checkpoint may be the last
        assert segments(job) == starts
        family, ranks = job.family(), job.ranks()
        (torchrun,) = [one for one in psutil.Process(job.process.pid).children() if one not in ranks]
        if victim == "launcher":
            job.process.kill()
        elif victim == "torchrun":
            torchrun.kill()
        else:
            torchrun.suspend()
            ranks[0].kill()
        killed = family if victim == "launcher" else [torchrun, *ranks]
        assert not psutil.wait_procs(killed, timeout=PATIENCE)[1], victim
        if victim != "launcher":
            helpers.wait_for(lambda starts=starts: segments(job) == starts + 1, what="another start")


@pytest.mark.shows("F17")
@pytest.mark.slow
@pytest.mark.promise("no-loops")
def test_a_loop_of_crashes_ends_and_names_the_batch(launch: Launch, lab: Any, helpers: Any, run_command: Any) -> None:
    """Three deaths at the same step: 93, with the samples; `where` shows the step without a record."""
    saved = {"every": "10 steps", "background": False}  # before the first death, however slow the machine is
    config = lab.config(train=LONG, checkpoint=saved, launch=HASTE)
    defect = f"if (rank, batch.position.cursor) == ('1', {13 * 8}): raise RuntimeError('a defect')"
    job = launch(config, PYTHONPATH=helpers.python_path(with_each_batch(lab.path / "fault", defect)))
    printed = job.ends(93)
    assert segments(job) == 4  # the first made a checkpoint, the three others none
    intent = job.intent()
    assert intent["code"] == 93 and "3 starts in a row ended without a newer verified checkpoint" in intent["reason"]
    assert "step 13 samples 96:104" in intent["reason"] and intent["reason"] in printed
    third, fourth = helpers.journal(job.run, "restart")[-1], helpers.journal(job.run, "stop")[-1]
    for entry in (third, fourth):
        assert {"step": 13, "first": 96, "cursor": 104, "batch": 8}.items() <= next(
            one for one in entry["suspects"] if one["step"] == 13
        ).items()
    shown = run_command("fsdp_pretrain.cli", "where", job.run, "--step", 13)
    assert shown.returncode == 0 and "not recorded" in shown.stdout and "sample 96:" in shown.stdout


@pytest.mark.parametrize(
    ("options", "arguments", "expected"),
    [
        ([], ["--reset-optimiser", "4"], "unrecognized arguments: --reset-optimiser 4"),
        (["--nproc-per-node", "two"], [], "'two' is neither a number of ranks nor"),
        (["optimizer.lr=1e-4"], [], "optimizer.lr=1e-4 stands before"),
        (["--nnodes", "0"], [], "--nnodes 0 is neither a number of nodes nor MIN:MAX"),
        (["--nproc-per-node", "3"], ["parallel.shard=2"], "parallel.shard = 2 does not divide the world size 3"),
    ],
)
def test_a_mistake_in_the_arguments_starts_nothing(
    lab: Any, run_command: Any, options: list[str], arguments: list[str], expected: str
) -> None:
    done = run_command("fsdp_pretrain.cli", "launch", "--nproc-per-node", 1, *options, lab.config(), *arguments)
    assert done.returncode == 78 and done.stderr.count(expected) == 1 and "launch: exit" not in done.stderr
    assert not (lab.path / "run").exists()


@pytest.mark.slow
def test_a_refusal_by_the_ranks_is_said_once(lab: Any, run_command: Any) -> None:
    """Not again by the record of the start, the launcher and torchrun."""
    done = run_command("fsdp_pretrain.cli", "launch", "--nproc-per-node", 2, lab.config(), "model.declared_params=7")
    assert done.returncode == 78 and "declared_params" not in done.stdout and "launch: exit 78\n" in done.stderr
    assert done.stderr.count("model.declared_params = 7, but") == 1 and "torch/distributed" not in done.stderr


@pytest.mark.parametrize(
    ("slow", "mistake", "expected"),
    [
        ("time.sleep(4)", "train.micro_batch=3", "error: the global batch 8 does not split"),
        (
            "from fsdp_pretrain.run import exit_intent as e\n    real = e.write\n"
            "    e.write = lambda *a, **k: (time.sleep(4), real(*a, **k))",
            "model.declared_params=7",
            "model.declared_params = 7, but",
        ),
    ],
    ids=["to start", "to record"],
)
def test_a_rank_that_says_why_may_be_slower_than_the_others(
    lab: Any, helpers: Any, tmp_path: Path, slow: str, mistake: str, expected: str
) -> None:
    """torchrun, here without the launcher, ends all ranks once one has ended."""
    (tmp_path / "sitecustomize.py").write_text(
        SET_CONSTANTS + f"import os, time\nif os.environ.get('RANK') == '0':\n    {slow}\n"
    )
    line = [*TORCHRUN[1:], "--standalone", "--nproc-per-node", 2, "-m", "fsdp_pretrain.train", lab.config(), mistake]
    done = python(*line, expect=1, PYTHONPATH=python_path(tmp_path))
    assert done.stderr.count(expected) == 1 and "SIGTERM before" not in done.stderr, done.stderr


def test_options_of_torchrun_that_it_does_not_know_are_no_failed_start(tmp_path: Path) -> None:
    from torch.distributed.run import parse_args

    with pytest.raises(SystemExit) as ended:
        parse_args(["--nosuch", "x.py"])
    assert isinstance(ended.value.code, int)
    refused = outcome.read_outcome(RunDir(tmp_path), 0, tmp_path / "note", ended.value.code)
    assert refused.code == 78 and "torchrun rejected" in refused.reason
    assert decide([refused], LaunchSection(), asked=False, host="a", elastic=False).code == 78


def test_a_reason_is_no_setting(lab: Any, run_command: Any) -> None:
    arguments = [lab.config(), "--reason", "optimizer.lr=3 was too much", "optimizer.lr=1e-3"]
    done = run_command("fsdp_pretrain.cli", "launch", "--print-run", *arguments)
    assert (done.returncode, done.stdout) == (0, f"{lab.path / 'run'}\n"), done.stderr


@pytest.mark.slow
@pytest.mark.shows("F51")
@pytest.mark.parametrize("how", ["itself", "checkpoints"])
@pytest.mark.promise("never-fresh")
def test_a_run_directory_that_is_gone_is_not_begun_again(
    launch: Launch, lab: Any, helpers: Any, removable: Any, run_command: Any, how: str
) -> None:
    """93 at the next save, nothing in its place, and when it is back the same command continues."""
    run = lab.path / "disk/run"
    where = run / "checkpoints" if how == "checkpoints" else run
    disk = removable(where)
    config = lab.config(train=LONG, checkpoint={"every": "40 steps"}, launch=HASTE)
    job = launch(config, run=run)
    helpers.wait_for(lambda: run.exists() and helpers.journal(run, "checkpoint"), 120, "a checkpoint")
    job.reaches(helpers.journal(run, "checkpoint")[-1]["step"] + 10)
    disk.take_away()
    printed = job.ends(93)
    assert f"directory {where} is gone on {os.uname().nodename}" in printed and "is mounted on that host" in printed
    assert "begins at step 0" not in printed and "follows in" not in printed and "IndexError" not in printed
    assert not [*disk.path.rglob("*")]
    disk.bring_back()

    def trained(segment: int) -> dict[int, tuple[float, float]]:
        records = read_lines(run / f"segments/{segment:04d}/metrics.jsonl", json_object)
        return {record["step"]: (record["loss"]["sum"], record["grad_norm"]) for record, _ in records}

    again = launch(config, run=run)
    helpers.wait_for(lambda: len(trained(2)) > 5, 120, "another start")
    again.process.send_signal(signal.SIGUSR1)
    again.ends(75)
    (resume,) = helpers.journal(run, "resume")
    first, second = trained(1), trained(2)
    both = first.keys() & second.keys()
    assert min(second) == resume["step"] + 1 > 40 and min(both) == min(second)
    assert all(first[step] == second[step] for step in both)
    run_command("fsdp_pretrain.cli", "status", run, "--json", expect=1)  # stopped


@pytest.mark.shows("F51")
@pytest.mark.slow
@pytest.mark.promise("storage-told")
def test_the_watchdog_tells_of_a_run_directory_that_is_gone(
    launch: Launch, lab: Any, helpers: Any, removable: Any, endpoint: Any
) -> None:
    """Long before the next save; the message is sent although the run directory takes no writes."""
    run, disk = lab.path / "disk/run", removable(lab.path / "disk")
    endpoint.up()
    watchdog = {"enabled": True, "notify": {"webhook": True}}
    config = lab.config(train=LONG, checkpoint={"every": "3000 steps"}, launch=HASTE, watchdog=watchdog)
    job = launch(config, run=run)
    job.reaches(10)
    helpers.wait_for((run / "watchdog/snapshot.json").exists, 60, "a watchdog that speaks for the run")
    disk.take_away()
    assert "is gone on" in job.ends(93)
    helpers.wait_for(lambda: not helpers.agents(run), 60, "the end of the watchdog")
    assert not [*disk.path.rglob("*")]
    assert "run-directory" in {body["key"] for body in endpoint.bodies()}


@pytest.mark.shows("F51")
@pytest.mark.slow
def test_torchrun_does_not_begin_again_in_the_place_of_a_run_directory(lab: Any, helpers: Any, removable: Any) -> None:
    """Without the launcher: the ranks that torchrun restarts know what those before them had."""
    run, disk = lab.path / "disk/run", removable(lab.path / "disk")
    config, log = lab.config(train=LONG, checkpoint={"every": "40 steps"}), lab.path / "log"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", 2, "--max-restarts", 1]
    job = spawn([*command, "-m", "fsdp_pretrain.train", config, f"run.dir={run}"], log)
    try:
        helpers.wait_for(lambda: run.exists() and helpers.journal(run, "checkpoint"), 120, "a checkpoint")
        disk.take_away()
        assert job.wait(240) == 1
    finally:
        job.kill()
    printed = log.read_text()
    assert printed.count(f"error: the run directory {run} is gone") == 2, printed  # at the save, and at the restart
    assert not [*disk.path.rglob("*")]


@pytest.mark.shows("D4", "F45")
@pytest.mark.slow
@pytest.mark.promise("bad-hosts")
def test_a_broken_gpu_keeps_its_host_away(launch: Launch, lab: Any, helpers: Any, constants: Any) -> None:
    """Saved, 76, and the host is in `avoid_hosts`, where no launcher starts (`test_preflight`)."""
    constants("fsdp_pretrain.watchdog.detectors.gpu", _CHECK_SECONDS=0.2)
    gpus, host = lab.path / "gpus.json", os.uname().nodename
    gpus.write_text(json.dumps({"devices": [{"index": 0}, {"index": 1}]}))
    watchdog = {"enabled": True, "gpus": f"file:{gpus}"}
    config = lab.config(train=LONG, checkpoint={"every": "1000 steps"}, launch=HASTE, watchdog=watchdog)
    job = launch(config)
    job.reaches(5)
    gpus.write_text(json.dumps({"devices": [{"index": 0}, {"index": 1, "lost": "fallen off the bus"}]}))
    job.ends(76)
    assert segments(job) == 1 and job.intent()["code"] == 76
    last = helpers.metrics(job.run)[-1]["step"]
    assert (job.run / f"checkpoints/step-{last:08d}/verified.json").exists()
    assert (job.run / "avoid_hosts").read_text().split() == [host]


@pytest.mark.shows("A9", "F38")
def test_preflight(lab: Any, run_command: Any, small_disk: Any) -> None:
    """A directory that cannot be written is named, exit 78, before a rank starts; and other refusals."""
    disk = small_disk("2m")
    run = disk / "run"
    config = lab.config()

    def refused(code: int, *options: str, **extra: str) -> str:
        command = ("launch", "--nproc-per-node", "2", *options, config, f"run.dir={run}")
        return str(run_command("fsdp_pretrain.cli", *command, **extra, expect=code).stderr)

    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert f"cannot write to {run}: Read-only file system" in refused(78)
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    text = refused(78, "--nproc-per-node", "gpu", CUDA_VISIBLE_DEVICES="")
    assert "shows no GPU" in text and "AMD" in text
    lab.train(config, f"run.dir={run}")
    (run / "checkpoints/hog").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096 - 20_000))
    assert "the next checkpoint does not fit: needs " in refused(78, *())
    (run / "checkpoints/hog").unlink()
    helpers_host = os.uname().nodename
    (run / "avoid_hosts").write_text(f"other\n{helpers_host}\n")
    assert f"host {helpers_host} is in {run}/avoid_hosts" in refused(76)
