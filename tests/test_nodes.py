"""Two-node jobs that lose a node: what the watchdogs detect, report and do, who leads the job, and how it continues."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import LAUNCH, spawn
from sight import PATIENCE, WATCHED, agents, alarms, family, hang, intent, lives, rank_of, steps, until

HOSTNAME = Path(__file__).resolve().parent / "hostname.py"
SLOW = {"timeout": "600 s"}
"""Collectives on a busy machine: the watchdog's deadlines, which grow with the steps, must come first."""
PEERS = "fsdp_pretrain.watchdog.hang.peers"


@pytest.fixture(autouse=True)
def fast(constants: Any) -> None:
    """Frequent reports of the nodes, short pauses between starts, short waits for their ends."""
    constants(PEERS, BEAT_SECONDS=0.5, SILENT_SECONDS=3.0)
    constants("fsdp_pretrain.launch.policy", PAUSES=[0.5])
    constants("fsdp_pretrain.launch.watch", END_SECONDS=10.0)


@pytest.fixture
def pair(lab: Any, monkeypatch: pytest.MonkeyPatch, constants: Any) -> Callable[..., Any]:
    """Starts a job of two nodes with one rank each, and waits until it trains."""
    if os.geteuid():
        pytest.skip("host names of their own need root")
    monkeypatch.setenv("EXECUTE_FIRST", str(HOSTNAME))

    def start(
        beat: float = 0.5,
        silent: float = 3.0,
        before: Callable[[], object] | None = None,
        act: bool = True,
        **deadlines: Any,
    ) -> Any:
        constants(PEERS, BEAT_SECONDS=beat, SILENT_SECONDS=silent)
        watchdog = {**WATCHED, "act": act, "hang": {**WATCHED["hang"], **deadlines}}
        # No save, whose first deadlines are long, when the fault comes.
        sections = {"train": {"duration": "9000 steps"}, "checkpoint": {"every": "9000 steps"}, "parallel": SLOW}
        config = lab.config(watchdog=watchdog, **sections)
        job = lab.start(config, ranks=2, nodes=2)
        if before is None:  # both watchdogs have seen steps
            until(lambda: all((lab.path / f"run/watchdog/nodes/{node}.json").exists() for node in (0, 1)))
        else:
            before()
        seen = steps(lab.path / "run")
        until(lambda: steps(lab.path / "run") > seen + 20)
        return job

    return start


def agent_of(run: Path, node: int) -> int:
    def find() -> list[int]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [pid for pid in agents(run) if " ".join(psutil.Process(pid).cmdline()).endswith(f" node-{node}")]
        return []

    return int(until(find)[0])


def chronicle(run: Path) -> str:
    """What the watchdogs wrote into it."""
    lines = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    return "\n".join(line["text"] for line in lines if line["kind"] == "watchdog")


@pytest.mark.shows("F6")
def test_a_stopped_rank_of_another_node_is_named(lab: Any, pair: Any) -> None:
    """Between nodes: one alarm with rank and host, all ranks ended, stacks of both nodes."""
    job, run = pair(silent=60.0, hard="8 s"), lab.path / "run"
    job.kill(1, signal.SIGSTOP)
    alarm = hang(run, suspects=[1])
    assert alarm["facts"]["verdict"] == "stopped"
    assert f"rank 1 (node-1, pid {job.ranks[1].pid}) is stopped" in alarm["summary"]
    assert {rank["host"] for rank in alarm["facts"]["ranks"]} == {"node-0", "node-1"}
    assert set(job.wait()) <= {1, -signal.SIGKILL}  # one node is earlier, and the other loses the connection
    found = intent(run)
    assert (found["code"], found["suspects"], found["hosts"]) == (75, [1], ["node-1"])
    stacks = sorted(path.name for path in (run / "watchdog/stacks").iterdir())
    assert stacks == ["0001-rank-00000.txt", "0001-rank-00001.txt"]
    until(lambda: not agents(run))
    verdicts = [each["facts"]["verdict"] for each in alarms(run, "hang")]
    assert verdicts[-1] == "stopped" and "network" not in verdicts and not alarms(run, "node/node-1")
    last = json.loads((run / "watchdog/nodes/1.json").read_text())  # the leader may ask for it after the end
    assert last["ended"] and [(rank["rank"], rank["state"]) for rank in last["stalled"]] == [(1, "T")]


@pytest.mark.slow
@pytest.mark.promise("hang-named")
def test_a_verdict_waits_for_the_other_nodes_and_is_revised(lab: Any, pair: Any) -> None:
    """The watchdog of the node with the stopped rank is late: missing data is no evidence, and the alarm says so until
    it arrives. It has seen no step times, but reports too."""
    run = lab.path / "run"

    def stop_agent() -> None:
        os.kill(agent_of(run, 1), signal.SIGSTOP)

    job = pair(beat=2.0, silent=60.0, hard="8 s", act=False, before=stop_agent)
    late = agent_of(run, 1)
    job.kill(1, signal.SIGSTOP)
    first = until(lambda: alarms(run, "hang"))[0]
    assert first["facts"]["verdict"] in ("unknown", "silent") and "node-1" in first["summary"]
    os.kill(late, signal.SIGCONT)
    revised = hang(run, verdict="stopped", suspects=[1], hosts=["node-1"])
    assert revised["opened"] == first["opened"] and revised["changed"] > first["changed"]
    journal = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert "is stopped" in [entry["text"] for entry in journal if entry["kind"] == "alarm"][-1]


@pytest.mark.shows("F24")
@pytest.mark.slow
def test_a_silent_leader_is_in_the_journal_and_the_ranks_of_other_nodes_are_still_ended(lab: Any, pair: Any) -> None:
    """The leader's agent is killed, and its rank, which would restart it, is stopped: the other node's watchdog reports
    that it is silent, and ends its own ranks at the hard deadline with the reason."""
    job, run = pair(hard="12 s"), lab.path / "run"
    job.kill(0, signal.SIGSTOP)
    os.kill(agent_of(run, 0), signal.SIGKILL)
    until(lambda: "the watchdog of node-0" in chronicle(run))
    until(lambda: intent(run), what=lambda: chronicle(run))
    assert (intent(run)["code"], intent(run)["verdict"], intent(run)["hosts"]) == (75, "silent", ["node-0"])
    assert not alarms(run, "hang")
    job.kill(0)
    job.wait()


# ---------------------------------------------------------------------- a launcher on each of two nodes

HASTE = {"stop_timeout": "60 s", "join_timeout": "60 s"}
SWITCHES = ["enabled=true", "hang.soft='3 s'", "hang.hard='8 s'"]


class Side:
    """The launcher of one node."""

    def __init__(self, node: Any, config: Path, log: Path) -> None:
        self.node, self.log = node, log
        changes = [f"watchdog.{switch}" for switch in SWITCHES]
        self.process = spawn([*node.prefix, *LAUNCH, *node.options, config, *changes], log, **node.environment)

    def everything(self) -> list[int]:
        """Process ids of the launcher, torchrun, ranks and agent."""
        return [self.process.pid, *family(self.process.pid)]

    def rank(self, number: int) -> int:
        return next(pid for pid in family(self.process.pid) if rank_of(pid) == number)

    def signal(self, number: int) -> None:
        for pid in self.everything():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def ends(self, code: int) -> None:
        assert self.process.wait(2 * PATIENCE) == code, self.log.read_text(errors="replace")


Sides = Callable[..., list[Side]]


@pytest.fixture
def sides(lab: Any, two_nodes: Any) -> Iterator[Callable[..., list[Side]]]:
    """Starts a launcher on each of two nodes, and waits until two steps after the first save are recorded. The next one,
    whose first deadlines are long, is far: the fault does not come during it."""
    started: list[Side] = []

    def start(nnodes: str) -> list[Side]:
        sections = {"train": {"duration": "300 steps"}, "checkpoint": {"every": "40 steps"}, "launch": HASTE}
        config = lab.config(parallel={**SLOW, "shard": 1}, **sections)
        for node in two_nodes(ranks=1, nnodes=nnodes):
            started.append(Side(node, config, lab.path / f"{node.name}.log"))
        until(lambda: steps(lab.path / "run") > 42 or started[0].process.poll() is not None)
        return started

    yield start
    for side in started:
        side.signal(signal.SIGKILL)
        side.process.wait()


def same_curve(helpers: Any, lab: Any) -> None:
    """The run is complete, and its losses are those of the undisturbed run: on another mesh for five steps from the
    first that differs in a bit; later, rounding errors grow."""
    ours, theirs = helpers.metrics(lab.path / "run"), helpers.metrics(lab.path / "whole")
    assert [one["data_digest"] for one in ours] == [one["data_digest"] for one in theirs]
    losses = [[one["loss"]["sum"] for one in records] for records in (ours, theirs)]
    apart = next((place for place, (one, other) in enumerate(zip(*losses, strict=True)) if one != other), len(ours))
    assert losses[0][: apart + 5] == pytest.approx(losses[1][: apart + 5], rel=1e-5)


def starts(run: Path) -> int:
    return len(list((run / "segments").iterdir()))


@pytest.mark.shows("A8")
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("aborts", [False, True], ids=["raises", "aborts"])
def test_a_node_dies(lab: Any, sides: Sides, aborts: bool) -> None:
    """kill -9 of everything on the second node: it is named, and the job, which may not shrink, ends with 75. The rank
    of the first node raises an error of gloo, or dies without one (NCCL's behaviour)."""
    both, run = sides("2"), lab.path / "run"
    name, mine = both[1].node.name, both[0].rank(0)
    if aborts:
        os.kill(mine, signal.SIGSTOP)
    both[1].signal(signal.SIGKILL)
    if aborts:
        os.kill(mine, signal.SIGKILL)
    until(lambda: alarms(run, f"node/{name}"))
    until(lambda: (intent(run) or {}).get("lost") == [name], what=lambda: f"{intent(run)}; {both[0].log.read_text()}")
    both[0].ends(75)
    assert "did not find each other" in both[0].log.read_text() and starts(run) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_node_freezes_and_comes_back(lab: Any, helpers: Any, sides: Sides) -> None:
    """All of the second node is stopped. The first names it, ends, and continues alone. When the second is thawed its
    ranks end without a trace in the run; then it takes part again."""
    both, run = sides("1:2"), lab.path / "run"
    name, stale = both[1].node.name, both[1].rank(1)
    both[1].signal(signal.SIGSTOP)
    assert hang(run, verdict="silent")["facts"]["hosts"] == [name]
    until(lambda: (intent(run) or {}).get("lost") == [name])
    until(lambda: starts(run) == 2 and helpers.journal(run, "changed"))  # steps that are kept may be of the first start
    assert f"hosts gone: {name}" in helpers.journal(run, "changed")[-1]["text"]
    both[1].signal(signal.SIGCONT)
    until(lambda: not lives(stale))
    for side in both:
        side.ends(0)
    lab.train(lab.path / "run.toml", f"run.dir={lab.path / 'whole'}", ranks=2)
    same_curve(helpers, lab)
    assert intent(run)["code"] == 0 and json.loads((run / "status.json").read_text())["state"] == "complete"
