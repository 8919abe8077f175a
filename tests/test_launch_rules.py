"""The launcher's rules: what follows an end, when to stop, the arguments of torchrun and Slurm. Few start a
process."""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import records
from processes import spawn
from sight import PATIENCE
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from fsdp_pretrain import master_port
from fsdp_pretrain.cli.launch import torchrun_options
from fsdp_pretrain.config.operations import LaunchSection
from fsdp_pretrain.errors import ConfigError, UserError
from fsdp_pretrain.launch import limit, torchrun
from fsdp_pretrain.launch.elastic_agent import cause_of
from fsdp_pretrain.launch.outcome import StartOutcome, segment_of
from fsdp_pretrain.launch.policy import decide
from fsdp_pretrain.launch.watch import TorchrunWatch
from fsdp_pretrain.run import journal, state_files
from fsdp_pretrain.run.files import RunDir


def ended(code: int | None, verified: int = 0, *, at: float = 0.0, before: int = 0, **facts: Any) -> StartOutcome:
    return StartOutcome(code, "why", verified=verified, verified_before=before, at=at, **facts)


@pytest.mark.parametrize(
    ("history", "code"),
    [
        ([ended(0)], 0),
        ([ended(78)], 78),
        ([ended(93)], 93),
        ([ended(75)], None),
        ([ended(75, asked=True)], 75),
        ([ended(None)], None),
        ([ended(1)], None),
        ([ended(None)] * 3, 93),
        ([ended(None)] * 2 + [ended(None, 10, before=5)], None),
        ([ended(None, 10, before=5)] + [ended(None)] * 2, None),
        ([ended(None, n + 1, before=n, at=60.0 * n) for n in range(5)], None),
        ([ended(None, n + 1, before=n, at=60.0 * n) for n in range(6)], 93),
        ([ended(None, n + 1, before=n, at=600.0 * n) for n in range(60)], None),
        ([ended(76, avoid=("other",))], 76),
    ],
)
@pytest.mark.promise("exit-codes")
def test_what_follows_an_end(history: list[StartOutcome], code: int | None) -> None:
    """A job that may shrink goes on without a bad host."""
    decision = decide(history, LaunchSection(), asked=False, host="here", elastic=False)
    assert decision.code == code
    asked = decide(history, LaunchSection(), asked=True, host="here", elastic=False)
    assert asked.code == (code if history[-1].code in (0, 76, 78, 93) else 75)
    shrunk = decide(history, LaunchSection(), asked=False, host="here", elastic=True)
    assert shrunk.code == (None if code == 76 else code)
    bad = decide(history, LaunchSection(), asked=False, host="other", elastic=True)
    assert bad.code == code


@pytest.mark.promise("no-loops")
def test_pauses_grow_and_progress_shortens_them() -> None:
    def pause(history: list[StartOutcome]) -> float:
        settings = LaunchSection(attempts=9)
        return decide(history, settings, asked=False, host="here", elastic=False).pause

    assert [pause([ended(None)] * n) for n in (1, 2, 3, 4)] == [10, 60, 300, 300]
    assert pause([ended(None), ended(None), ended(None, 10, before=5)]) == 10


def test_nodes_that_do_not_meet_are_no_failed_start() -> None:
    """All try for `join_timeout` in total, then 75; starts before and after count as if these had not happened."""

    def unmet(at: float, seconds: float) -> StartOutcome:
        return StartOutcome(None, "why", joined=False, at=at, seconds=seconds)

    def code(*history: StartOutcome) -> int | None:
        return decide(history, LaunchSection(), asked=False, host="here", elastic=False).code

    assert code(unmet(300, 300)) == code(*(unmet(70.0 * n, 60) for n in range(1, 6))) == 75
    assert code(*(unmet(70.0 * n, 60) for n in range(1, 4))) is None
    assert code(ended(None), unmet(60, 60), unmet(130, 60), ended(None)) is None
    assert code(ended(None), ended(None), unmet(60, 60), ended(None)) == 93


def test_a_launcher_knows_the_segments_of_its_host(tmp_path: Path) -> None:
    """A node that was frozen does not mistake the others' new segment for its own."""
    run = RunDir(tmp_path)
    for hosts in ({"a": 1, "b": 1}, {"a": 1}):
        state_files.write(run.new_segment() / "environment.json", {"hosts": hosts})
    assert [segment_of(run, 0, host) for host in ("a", "b", "c", None)] == [2, 1, 0, 2]
    assert segment_of(run, 1, "b") == 1
    run.new_segment()
    assert segment_of(run, 0, "b") == 3  # its hosts are not known yet


@pytest.mark.parametrize("apart", [0, 2, 3])
def test_deaths_at_the_same_step_are_named(apart: int) -> None:
    ahead = ({"step": 43, "first": 336, "cursor": 344, "consumed": 344, "batch": 8},)
    history = [ended(None, step=42 - apart), ended(None, step=42, ahead=ahead)]
    decision = decide(history, LaunchSection(), asked=False, host="here", elastic=False)
    assert ("step 43 samples 336:344" in decision.reason) == (apart < 3)


@pytest.mark.shows("B19")
def test_grace_is_what_the_record_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.5 times four steps and two saves, at least what is configured or two minutes; Slurm gets the limit."""
    run = RunDir(tmp_path)
    assert limit.grace(run) == 120
    segment = run.new_segment()
    parts = {"iteration": 20.0, "data": 0.0, "checkpoint": 0.0}
    lines = [json.dumps(records.metric(step, seconds=parts)) for step in range(2_000)]
    (segment / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for seconds in (999.0, 30.0, 25.0, 50.0, 30.0, 30.0):
        journal.add(run, "checkpoint", "saved", step=1, seconds=seconds, bytes=1)
    needed = 1.5 * (4 * 20 + 2 * 50)
    assert limit.grace(run) == max(120, needed)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1500")
    clock = {"now": 50.0, "wall": 1000.0}
    assert limit.deadline(3600, **clock) == 550 and limit.deadline(100, **clock) == 150


def torchrun_arguments(*options: str) -> list[str]:
    parser = argparse.ArgumentParser()
    torchrun_options("")(parser)
    args, rest = parser.parse_known_args(["--rdzv-id", "job", *options])
    return torchrun.command(args, rest, "fsdp_pretrain.train", ["x.toml", "a=1"])


def test_torchrun_gets_what_it_needs() -> None:
    one = " ".join(torchrun_arguments("--nproc-per-node", "4", "--log-dir", "logs"))
    assert one.endswith("--nnodes 1 --nproc-per-node 4 --max-restarts 0 --standalone --log-dir logs -m fsdp_pretrain.train x.toml a=1")  # fmt: skip
    for head, endpoint, is_host in (
        ("127.0.0.1", "127.0.0.1:29400", "true"),
        ("127.0.1.1", "127.0.1.1:29400", "true"),  # as Debian names a machine to itself
        ("192.0.2.1:1234", "192.0.2.1:1234", "false"),
        ("2001:db8::7", "[2001:db8::7]:29400", "false"),
        ("[2001:db8::7]:1234", "[2001:db8::7]:1234", "false"),
    ):
        many = " ".join(torchrun_arguments("--nnodes", "3", "--rdzv-endpoint", head, "--local-addr", "127.0.0.1"))
        host = head.partition("]")[0].strip("[") if "2001" in head else head.partition(":")[0]
        assert parse_rendezvous_endpoint(endpoint, 1) == (host, int(endpoint.rpartition(":")[2]))
        assert f"--rdzv-endpoint {endpoint} --rdzv-id job --rdzv-conf is_host={is_host}," in many
        assert "--nnodes 3 --nproc-per-node gpu" in many and "--local-addr 127.0.0.1" in many
    for said in ("true", "false"):
        conf = ("--rdzv-conf", f"is_host={said},read_timeout=9")
        many = " ".join(torchrun_arguments("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1", *conf))
        assert f"--rdzv-conf is_host={said},join_timeout=300,close_timeout=30,read_timeout=9 " in many
    with pytest.raises(ConfigError, match="'is_host' has no value"):
        torchrun_arguments("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1", "--rdzv-conf", "is_host")
    with pytest.raises(ConfigError, match="without --rdzv-endpoint"):
        torchrun_arguments("--nnodes", "3")
    for wrong in ("x", "0", "3:2", "1:2:3"):
        with pytest.raises(ConfigError, match="neither a number"):
            torchrun_arguments("--nnodes", wrong)
    variables = torchrun.environment({"OMP_NUM_THREADS": "7", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"})
    assert (variables["OMP_NUM_THREADS"], variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]) == ("7", "1")


@pytest.mark.parametrize("after", [2, 100])
def test_the_name_of_the_first_node_may_come_with_its_container(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Or never: then the job may be started again, as when the nodes do not find each other."""
    resolve, asked = socket.getaddrinfo, list[str]()

    def unknown_at_first(host: str, *more: Any) -> Any:
        asked.append(host)
        if len(asked) <= after:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("192.0.2.1", *more)

    monkeypatch.setattr(socket, "getaddrinfo", unknown_at_first)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 10.0 * next(clock))
    if after < 100:
        assert "is_host=false" in " ".join(torchrun_arguments("--nnodes", "3", "--rdzv-endpoint", "node-0:29400"))
    else:
        with pytest.raises(UserError, match=r"node-0 does not resolve on this node") as caught:
            torchrun_arguments("--nnodes", "3", "--rdzv-endpoint", "node-0:29400")
        assert caught.value.exit == 75
    assert {*asked} == {"node-0"} and len(asked) < 50


def test_an_error_of_the_storage_does_not_end_the_look_at_a_start(tmp_path: Path) -> None:
    """A network file system that is away for a moment: the launcher's view of the start would stay as it was."""
    child = subprocess.Popen(["sleep", "30"])
    looks = list[int]()

    def on_read() -> None:
        looks.append(1)
        if len(looks) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        child.kill()

    child.ranks, child.wait_for_ranks, child.has_lost_ranks = list, lambda seconds: True, False  # type: ignore[attr-defined]
    watch = TorchrunWatch(RunDir(tmp_path), LaunchSection(), child, lambda: 0, host=None)  # type: ignore[arg-type]
    assert watch.run(lambda: None, on_read) == -9 and len(looks) == 2


def test_the_port_of_the_store_is_kept_from_the_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun lets the port go that it found, and rank 0 listened there seconds later: any process could be given it."""
    monkeypatch.setenv("MASTER_PORT", "0")  # any free one, which nothing else here keeps
    monkeypatch.setenv("RANK", "1")
    assert master_port.hold() is None
    monkeypatch.setenv("RANK", "0")
    held = master_port.hold()
    assert held is not None
    port = held.getsockname()[1]
    with socket.socket() as other:
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port))
        assert TCPStore("127.0.0.1", port, 1, is_master=True).port == port
    held.close()


def test_a_port_that_another_process_has_is_named_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, log = server.getsockname()[1], tmp_path / "log"
        rank = spawn((sys.executable, "-m", "fsdp_pretrain.train"), log, RANK="0", MASTER_PORT=str(port))
        assert rank.wait(PATIENCE) == 1
    assert log.read_text().strip() == (
        f"error: another process uses MASTER_PORT {port}: the ranks cannot meet. Start again"
    )


@pytest.mark.parametrize(
    ("code", "array", "restarts", "expected"),
    [
        (0, False, 0, []),
        (
            75,
            False,
            0,
            [
                "requeuehold 5",
                "update JobId=5 ExcNodeList=spare,bad1",
                "update JobId=5 ExcNodeList=spare,bad1,bad2",
                "release 5",
            ],
        ),
        (
            76,
            False,
            9,
            [
                "requeuehold 5",
                "update JobId=5 ExcNodeList=spare,bad1",
                "update JobId=5 ExcNodeList=spare,bad1,bad2",
                "release 5",
            ],
        ),
        (
            137,
            False,
            0,
            [
                "requeuehold 5",
                "update JobId=5 ExcNodeList=spare,bad1",
                "update JobId=5 ExcNodeList=spare,bad1,bad2",
                "release 5",
            ],
        ),
        (137, False, 3, []),
        (76, True, 0, ["update JobId=4 ExcNodeList=spare,bad1", "update JobId=4 ExcNodeList=spare,bad1,bad2"]),
        (0, True, 0, ["scancel --state=PENDING 4"]),
    ],
)
def test_what_slurm_is_told(tmp_path: Path, code: int, array: bool, restarts: int, expected: list[str]) -> None:
    """The batch script with a fake Slurm that records its calls, and knows nodes by their short names."""
    script, log = Path(__file__).resolve().parent.parent / "scripts/slurm/train.sbatch", tmp_path / "log"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    (tmp_path / "run").mkdir()
    (tmp_path / "run/avoid_hosts").write_text("bad1.cluster.local\ngone.cluster.local\nbad2")
    fakes = {
        "srun": f'case "$*" in *--print-run*) echo {tmp_path}/run ;; *) echo "$@" > {tmp_path}/started; exit {code} ;; esac',
        "scontrol": f'case "$1 $2" in "show hostnames") echo node1; echo node2 ;; '
        f'"show job") echo "   JobState=RUNNING Reason=None ExcNodeList=spare" ;; *) case "$*" in *.local* | *gone*) exit 1 ;; *) echo "$@" >> {log} ;; esac ;; esac',
        "scancel": f'echo "scancel $@" >> {log}',
    }
    (tmp_path / "env.sh").write_text("[ -n $UNSET ] && SRUN=(srun --container-image=it)\n")
    for name, text in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "5",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "ENV_FILE": "env.sh",
        "SLURM_RESTART_COUNT": str(restarts),
        **({"SLURM_ARRAY_JOB_ID": "4"} if array else {}),
    }
    done = subprocess.run(["bash", script, "my.toml", "a=1"], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (log.read_text().splitlines() if log.exists() else []) == expected
    assert ("gone.cluster.local" in done.stdout) == any("update" in line for line in expected)
    started = (tmp_path / "started").read_text().strip()
    assert started.startswith("--container-image=it fsdp-pretrain launch --nnodes 2 --rdzv-endpoint node1 ")
    assert started.endswith(" my.toml a=1")


@pytest.mark.parametrize("script", ["train", "eval", "eval_checkpoint"])
def test_a_missing_environment_is_refused(tmp_path: Path, script: str) -> None:
    path = Path(__file__).resolve().parent.parent / f"scripts/slurm/{script}.sbatch"
    environment = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "ENV_FILE": "env.sh"}
    done = subprocess.run(["bash", path, "my.toml"], env=environment, capture_output=True, text=True)
    assert done.returncode == 78
    assert done.stdout == f"error: ENV_FILE=env.sh: there is no such file in {tmp_path}\n"


@pytest.mark.parametrize(
    ("ends", "named"),
    [
        ({0: (1, 5), 1: (-9, 5)}, 1),
        ({0: (1, 5), 1: (-9, 6)}, 0),
        ({0: (-15, 5), 1: (78, 5)}, 1),
        ({2: (-11, 4), 3: (75, 4)}, 2),
    ],
    ids=["killed", "failed before", "ended by torchrun", "crashed"],
)
def test_of_ranks_that_ended_together_the_cause_is_named(ends: dict[int, tuple[int, int]], named: int) -> None:
    """torchrun knows the second of an end, and sees the ranks in their order."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file="")
        for rank, (code, _) in ends.items()
    }
    for rank, (_, second) in ends.items():
        failures[rank].timestamp = second
    assert cause_of(ChildFailedError("train", failures))[0] == named


@pytest.mark.parametrize("chosen", [None, "true"])
def test_a_resume_on_another_mesh_does_not_warn_of_its_transfers(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    """The variable is set before torch reads it, unless somebody has set it."""
    name, seen = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", list[str | None]()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setenv(name, chosen or "")
    if chosen is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(master_port, "hold", lambda: None)
    monkeypatch.setattr("fsdp_pretrain.processes.collect_seldom", lambda: None)
    monkeypatch.setattr("fsdp_pretrain.processes.run_rank", lambda main: seen.append(os.environ.get(name)))
    runpy.run_module("fsdp_pretrain.train.__main__", run_name="__main__")
    assert seen == [chosen or "false"]
