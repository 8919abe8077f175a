"""Jobs of two nodes that lose one: what the watchdogs see, say and do, who speaks for the job, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from sight import WATCHED, agents, alarms, intent, steps, until

HOSTNAME = Path(__file__).resolve().parent / "hostname.py"
NODES = {**WATCHED, "beat": "0.5 s", "silent": "3 s"}


@pytest.fixture
def pair(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts a job of two nodes with one rank each, and waits until it trains."""
    if os.geteuid():
        pytest.skip("host names of their own need root")
    monkeypatch.setenv("EXECUTE_FIRST", str(HOSTNAME))

    def start(**hang: str) -> Any:
        watchdog = {**NODES, "hang": {**WATCHED["hang"], **hang}}
        config = lab.config(watchdog=watchdog, train={"duration": "9000 steps"}, checkpoint={"every": "50 steps"})
        job = lab.start(config, ranks=2, nodes=2)
        until(lambda: steps(lab.path / "run") > 10)
        return job

    return start


def agent_of(run: Path, node: int) -> int:
    """Process id of a node's agent."""

    def find() -> list[int]:
        return [pid for pid in agents(run) if f"--node {node} " in " ".join(psutil.Process(pid).cmdline())]

    return int(until(find)[0])


def chronicle(run: Path) -> str:
    """What the watchdogs said in it."""
    lines = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    return "\n".join(line["text"] for line in lines if line["kind"] == "watchdog")


def test_a_stopped_rank_of_another_node_is_named(lab: Any, pair: Callable[..., Any]) -> None:
    """Fault matrix 6, between nodes: one alarm with rank and host, all ranks ended, stacks of both nodes."""
    job, run = pair(), lab.path / "run"
    stopped = time.monotonic()
    job.kill(1, signal.SIGSTOP)
    (alarm,) = until(lambda: alarms(run, "hang"))
    print(f"told after {time.monotonic() - stopped:.1f}s")
    assert time.monotonic() - stopped < 5
    assert alarm["facts"]["verdict"] == "stopped" and alarm["facts"]["suspects"] == [1]
    assert f"rank 1 (node-1, pid {job.ranks[1].pid}) is stopped" in alarm["summary"]
    assert {rank["host"] for rank in alarm["facts"]["ranks"]} == {"node-0", "node-1"}
    assert set(job.wait(30)) <= {1, -signal.SIGKILL}  # one node is a moment earlier, and the other loses the connection
    print(f"ended after {time.monotonic() - stopped:.1f}s")
    found = intent(run)
    assert (found["code"], found["suspects"], found["hosts"]) == (75, [1], ["node-1"])
    stacks = sorted(path.name for path in (run / "watchdog/stacks").iterdir())
    assert stacks == ["0001-rank-00000.txt", "0001-rank-00001.txt"]
    until(lambda: not agents(run), 10)
    assert len(alarms(run, "hang")) == 1 and not alarms(run, "node/node-1")


def test_a_lost_node_is_named(lab: Any, pair: Callable[..., Any]) -> None:
    """kill -9 of all of a node: the ranks of the other fail, and its watchdog says which node is the reason."""
    job, run = pair(), lab.path / "run"
    killed = time.monotonic()
    os.kill(agent_of(run, 1), signal.SIGKILL)
    job.kill(1)
    (alarm,) = until(lambda: alarms(run, "node/node-1"))
    print(f"told after {time.monotonic() - killed:.1f}s")
    assert alarm["severity"] == "CRIT" and "nothing has been heard of node-1" in alarm["summary"]
    job.wait(30)
    until(lambda: not agents(run), 10)
    found = intent(run)
    assert (found["code"], found["lost"]) == (75, ["node-1"]) and not alarms(run, "rank-died")


def test_a_killed_rank_of_another_node_is_named(lab: Any, pair: Callable[..., Any]) -> None:
    """Fault matrix 16, between nodes: the leader tells what the other node's watchdog saw; its own rank is no suspect."""
    job, run = pair(), lab.path / "run"
    job.kill(1)
    (alarm,) = until(lambda: alarms(run, "rank-died"))
    assert "rank 1 (node-1" in alarm["summary"]
    job.wait(30)
    until(lambda: not agents(run), 10)
    assert intent(run)["code"] == 75 and intent(run)["suspects"] == [1]
    assert len(alarms(run, "rank-died")) == 1 and not alarms(run, "node/node-1")


def test_another_node_takes_the_lead(lab: Any, pair: Callable[..., Any]) -> None:
    """Fault matrix 24: the leader's agent is killed, and its rank stopped, which would start it again: the next node's
    watchdog takes over and tells. Thawed, the first does not take it back, and says nothing twice."""
    job, run = pair(hard="60 s"), lab.path / "run"
    job.kill(0, signal.SIGSTOP)
    killed = time.monotonic()
    os.kill(agent_of(run, 0), signal.SIGKILL)
    until(lambda: alarms(run, "node/node-0"))
    print(f"taken over after {time.monotonic() - killed:.1f}s")
    assert time.monotonic() - killed < 8
    (hang,) = until(lambda: alarms(run, "hang"))
    assert hang["facts"]["verdict"] == "silent" and hang["facts"]["hosts"] == ["node-0"]
    claim = run / "watchdog/agent.json"
    assert json.loads(claim.read_text())["host"] == "node-1" and "node-0 silent" in chronicle(run)
    job.kill(0, signal.SIGCONT)
    until(lambda: alarms(run, "node/node-0")[-1]["state"] == "resolved")
    until(lambda: alarms(run, "hang")[-1]["state"] == "resolved")
    assert json.loads(claim.read_text())["host"] == "node-1"
    job.kill(0, signal.SIGTERM)
    assert job.wait(30) == [75, 75]


def test_a_frozen_leader_gives_up_the_lead(lab: Any, pair: Callable[..., Any]) -> None:
    """Only its agent is frozen: another takes over, and when it is thawed there is still one that writes alarms."""
    job, run = pair(), lab.path / "run"
    first = agent_of(run, 0)
    os.kill(first, signal.SIGSTOP)
    until(lambda: alarms(run, "node/node-0"))
    before = steps(run)
    os.kill(first, signal.SIGCONT)
    until(lambda: "this one was frozen" in chronicle(run))
    assert json.loads((run / "watchdog/agent.json").read_text())["host"] == "node-1"
    until(lambda: [alarm["state"] for alarm in alarms(run, "node/node-0")] == ["open", "resolved"])
    until(lambda: steps(run) > before + 10)  # nothing of it touches training
    job.kill(1, signal.SIGTERM)
    assert job.wait(30) == [75, 75]
    until(lambda: not agents(run), 10)
    assert not (run / "watchdog/agent.json").exists() and not alarms(run, "hang")
