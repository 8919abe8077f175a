"""Goodput: every second of a run in exactly one state, from its record; and what operators once wrote manually."""

from __future__ import annotations

import json
import queue
import random
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import records
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_pretrain.run import lineage
from fsdp_pretrain.run.files import RunDir, stamp
from fsdp_pretrain.run.goodput import GoodputReport, State, goodput, render
from fsdp_pretrain.run.journal import Journal
from fsdp_pretrain.train import device_timing

LENGTH, BATCH = 32, 8
BEGIN = 1_700_000_000.0


class Script:
    """Writes the record of a run that follows a script, and knows the true account.

    Files are as the trainer writes them.
    """

    def __init__(self, path: Path, begin: float = BEGIN) -> None:
        self.run, self.clock, self.number = RunDir(path), begin, 0
        self.truth = dict.fromkeys(State, 0.0)
        self.done: list[tuple[int, int, float]] = []  # (segment, step, seconds) on the current line
        self.step = self.saved = 0
        self.stalled = 0.0

    def spend(self, seconds: float, state: State) -> None:
        self.clock += seconds
        self.truth[state] += seconds

    def write(self, path: Path, content: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(content) + "\n")

    def tell(self, kind: str, *, outside: bool = False, **facts: Any) -> None:
        segment = {} if outside else {"segment": self.number}
        entry = {"time": stamp(self.clock), "kind": kind, "text": kind, **segment, "host": "h", **facts}
        self.write(self.run.journal, entry)

    def start(self, *, launch: float = 10.0, load: float = 5.0, launcher: str = "") -> None:
        """A start that prepares: `told` is the launcher's entry, if there is a launcher."""
        if launcher:
            self.tell(launcher, outside=True)
        launched = self.clock
        self.spend(launch, State.STARTING)
        parent = self.number or None
        self.number += 1
        folder = self.run.segment(self.number)
        times = {
            "time": stamp(self.clock),
            "launched": stamp(launched),
            "host": "h",
            "world": {"size": 2, "replicas": 1, "shards": 2},
        }
        self.write(folder / "environment.json", times)
        self.tell("start")
        self.spend(load, State.STARTING)
        self.join(parent, "start")
        self.tell("ready")

    def join(self, parent: int | None, kind: str, **facts: Any) -> None:
        self.step = self.saved
        lost = [entry for entry in self.done if entry[1] > self.saved]
        self.done = [entry for entry in self.done if entry[1] <= self.saved]
        for _, _, seconds in lost:
            self.truth[State.LOST] += seconds
        content = {"parent": parent, "step": self.saved, "kind": kind, "time": stamp(self.clock), **facts}
        self.write(self.run.segment(self.number) / lineage.LINEAGE, content)

    def train(
        self,
        steps: int,
        *,
        seconds: float = 2.0,
        data: float = 0.1,
        skip: frozenset[int] = frozenset(),
        joules: float | None = None,
    ) -> None:
        for _ in range(steps):
            self.step += 1
            stalled, self.stalled = self.stalled, 0.0
            parts = {"iteration": seconds + data + stalled, "data": data, "checkpoint": stalled}
            more = {"mfu": 0.4, "skipped": self.step in skip, "seconds": parts, "energy_joules": joules}
            record = records.metric(self.step, batch=BATCH, length=LENGTH, **more)
            self.clock += seconds + data + stalled
            self.done.append((self.number, self.step, seconds + data + stalled))
            self.write(self.run.segment(self.number) / "metrics.jsonl", {**record, "time": stamp(self.clock)})

    def save(self, stall: float = 0.0) -> None:
        """A background save: training waited `stall` for it, before the next step."""
        self.saved, self.stalled = self.step, stall
        self.tell("checkpoint", step=self.step, seconds=1.0, bytes=1)

    def stop(self, code: int = 75, *, save: float = 3.0, down: float = 1.0) -> None:
        """A deliberate end: saves, and records it."""
        self.spend(save, State.STOPPING)
        self.save()
        self.tell("stop", code=code, step=self.step)
        self.spend(down, State.STOPPING)
        self.intend(code, "asked to")

    def fail(self, code: int, *, detect: float = 4.0, down: float = 1.0) -> None:
        """An end that the trainer noticed itself."""
        self.spend(detect, State.STOPPING)
        self.tell("stop", code=code)
        self.spend(down, State.STOPPING)
        self.intend(code, "broken")

    def intend(self, code: int, reason: str) -> None:
        path = self.run.segment(self.number) / "exit_intent.json"
        self.write(path, {"code": code, "reason": reason, "time": stamp(self.clock)})

    def hang(self, *, detect: float = 30.0, down: float = 5.0) -> None:
        """The watchdog notices a hang, and ends the start."""
        self.spend(detect, State.STOPPING)
        self.tell("alarm", outside=True, key="hang", state="open")
        self.spend(down, State.STOPPING)
        self.intend(75, "hang")

    def kill(self, *, detect: float = 1.0) -> None:
        """A rank dies; the launcher notices. Follow it with `start(told="restart")`."""
        self.spend(detect, State.STOPPING)

    def queue(self, seconds: float) -> None:
        self.spend(seconds, State.IDLE)

    def pause(self, seconds: float, *, over: bool = True) -> None:
        """`control pause` after the save in flight, which is waited for; `over`: until a request to resume or to stop."""
        self.spend(2.0, State.STOPPING)
        self.tell("control", step=self.step, did="pause")
        self.spend(seconds, State.IDLE)
        if over:
            self.tell("control", step=self.step, did="resume")

    def roll_back(self, step: int, reason: str = "spike") -> None:
        parent, self.saved = self.number, step
        self.number += 1
        self.join(parent, "rollback", reason=reason)

    def check(self, **others: float) -> GoodputReport:
        """The account agrees with the truth, state by state; `others`: truth about the steps."""
        found = goodput(self.run)
        assert found is not None
        truth = {**{str(state): seconds for state, seconds in self.truth.items()}, **others}
        assert found.states == pytest.approx(truth, abs=0.01), render(found)
        assert sum(found.states.values()) == pytest.approx(found.wall_seconds, rel=1e-3)
        assert found.wall_seconds == pytest.approx(self.clock - BEGIN, rel=1e-3)
        assert found.tokens == self.step * BATCH * LENGTH
        return found


@pytest.mark.shows("F32")
@pytest.mark.quick
@pytest.mark.promise("account")
def test_a_scripted_run_is_accounted_for_to_the_second(tmp_path: Path) -> None:
    """Crash, rollback and requeue; states sum to the wall clock, lost time is exact."""
    script = Script(tmp_path)
    script.start()
    script.train(30)
    script.save()
    script.train(7)
    script.kill(detect=2.0)  # after step 37: 7 steps of 2.1 s are lost
    script.start(launcher="restart", launch=20.0)
    script.train(10, skip=frozenset({35}))
    script.save()
    script.train(10, seconds=3.0)
    script.fail(93)  # 10 steps of 3.1 s are lost
    script.queue(200.0)
    script.tell("launch", outside=True)  # the other node did not come
    script.queue(400.0)
    script.start(launcher="launch")
    script.train(20)
    script.stop()  # at 60
    script.queue(50.0)
    script.roll_back(40)  # 20 more steps of 2.1 s
    script.queue(50.0)
    script.start()
    script.train(5)
    script.train(25)
    script.stop(0, down=0.0)
    lost = 7 * 2.1 + 10 * 3.1 + 20 * 2.1
    found = script.check(steps=69 * 2.0, lost=lost + 2.0, data=70 * 0.1)  # one step was skipped
    assert found.goodput == pytest.approx(138 / found.wall_seconds, rel=1e-4)
    available = found.wall_seconds - 700
    assert found.tokens_lost == 37 * BATCH * LENGTH
    assert found.mfu == 0.4
    crash, failure, back = found.incidents
    assert [i.kind for i in found.incidents] == ["failure", "failure", "rollback"]
    assert crash.recovery_seconds == pytest.approx(2 + 20 + 5, rel=1e-4)
    assert found.states["idle"] == pytest.approx(700, rel=1e-4)
    assert failure.recovery_seconds == pytest.approx(4 + 1 + 10 + 5, rel=1e-4)
    assert (back.cause, back.step) == ("spike", 60)
    assert found.mtti_seconds == pytest.approx(available / 3, rel=1e-4)


@pytest.mark.quick
@pytest.mark.promise("account")
@pytest.mark.parametrize("steps", [0, 10])
@pytest.mark.parametrize("end", ["stop", "fail", "kill", "kill unseen"])
def test_a_pause_that_a_stop_or_a_kill_ends_is_idle(tmp_path: Path, steps: int, end: str) -> None:
    """And no recovery. When a job died that nobody saw die, is not known: it was paused until the next launch."""
    script = Script(tmp_path)
    script.start()
    script.train(steps)
    script.pause(60.0)
    script.pause(600.0, over=not end.startswith("kill"))
    script.saved = script.step
    if end == "stop":
        script.stop()
    elif end == "fail":
        script.fail(93)
    script.start(launcher="" if end == "kill unseen" else "restart")
    script.train(5)
    found = script.check(steps=(steps + 5) * 2.0, data=(steps + 5) * 0.1)
    recovery = {"stop": None, "fail": 5.0 + 15.0}.get(end, 15.0) if steps else None
    assert found.mttr_seconds == (None if recovery is None else pytest.approx(recovery, rel=1e-3))


@pytest.mark.quick
@pytest.mark.promise("account")
def test_energy_is_summed_across_a_rollback(tmp_path: Path) -> None:
    """What was lost counts for the run and not for what is kept; steps whose energy is not known for neither."""
    script = Script(tmp_path)
    script.start()
    script.train(30)
    found = goodput(script.run)
    assert found is not None and found.energy is None and "kWh" not in render(found)
    script.train(30, joules=3.6e6)
    script.stop()
    script.roll_back(40)
    script.start()
    script.train(10, joules=0.9e6)
    million, found = BATCH * LENGTH / 1e6, goodput(script.run)
    assert found is not None and found.energy is not None
    kwh = 30 * 1.0 + 10 * 0.25
    truth = {"kwh": kwh, "per_million": kwh / 40 / million, "per_million_kept": kwh / 20 / million, "steps": 40 / 70}
    assert found.energy.model_dump() == pytest.approx(truth)
    assert "32.5 kWh used by the GPUs in 57.1% of the steps: 3.17e+03 per million tokens" in render(found)


@pytest.mark.quick
def test_the_account_of_a_fork_begins_with_it(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.start(launcher="launch")
    script.train(50)
    script.tell("launch", outside=True)  # of the parent too, whose journal the fork has
    script.stop()
    script.number += 1
    script.join(1, "fork", run="/elsewhere")
    script.tell("fork")
    script.queue(900.0)
    script.start()
    script.train(40)
    found = goodput(script.run)
    assert found is not None and found.incidents == []
    assert found.wall_seconds == pytest.approx(15 + 40 * 2.1, abs=0.01)
    assert found.tokens == 40 * BATCH * LENGTH
    assert found.states["idle"] == 0 and found.states["steps"] == pytest.approx(80)


@pytest.mark.quick
def test_a_run_that_trains_is_accounted_for_up_to_its_last_step(tmp_path: Path, run_command: Any) -> None:
    script = Script(tmp_path)
    script.run.segment(1).mkdir(parents=True)
    assert "was never started" in run_command("fsdp_pretrain.cli", "goodput", tmp_path, expect=78).stderr
    script.start()
    assert goodput(script.run) is not None  # no step yet
    script.train(3)
    script.tell("checkpoint-late", step=3)
    found = script.check(steps=6.0, data=0.3)
    assert found.incidents == [] and found.mtti_seconds is None and found.interval_seconds is None
    assert "MTTI" not in render(found)


@pytest.mark.quick
def test_lost_lines_of_the_record_are_a_gap_not_an_error(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.start()
    script.train(100)
    path = tmp_path / "segments/0001/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:40], "torn\n", *lines[50:]]))
    found = goodput(RunDir(tmp_path))
    assert found is not None
    assert found.states["lost"] == pytest.approx(10 * 2.1, abs=0.01)
    assert found.states["steps"] == pytest.approx(180.0)
    assert found.wall_seconds == pytest.approx(script.clock - BEGIN, abs=0.01)


@pytest.mark.shows("A2", "B8")
@pytest.mark.quick
def test_the_recommended_interval_is_the_square_root_law(tmp_path: Path) -> None:
    """GLM-130B saved every 500 steps of 88 s; with a day between losses of nodes and 60 s a save, that is too long."""
    script = Script(tmp_path)
    script.start(launch=100.0, load=500.0)
    for _ in range(8):
        script.train(100, seconds=88.0, data=0.0)
        script.save(stall=60.0)
    script.train(8, seconds=88.0, data=0.0)
    script.fail(75, detect=500.0)
    script.start()
    script.train(1, seconds=88.0, data=0.0)
    found = goodput(RunDir(tmp_path))
    assert found is not None
    assert (found.block_seconds, found.save_seconds) == (60.0, 1.0)
    wanted = (2 * found.mtti_seconds * 60.0) ** 0.5
    assert found.interval_seconds == pytest.approx(wanted)
    assert found.interval_steps == round(wanted / 88.0) == 34


def test_a_rollback_behind_a_start_that_was_refused_ends_the_one_before(tmp_path: Path) -> None:
    """The operator tries the old command with another rate, and goes back when it is refused."""
    script = Script(tmp_path)
    script.start()
    script.train(20)
    script.stop()
    script.start()
    script.fail(78)
    script.roll_back(10)
    script.start()
    script.train(5)
    found = goodput(script.run)
    assert found is not None
    assert [(each.kind, each.segment, each.step) for each in found.incidents] == [("rollback", 1, 20)]


@pytest.mark.quick
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
@pytest.mark.promise("account")
def test_any_run_is_accounted_for(tmp_path_factory: Any, seed: int) -> None:
    """States sum to the wall clock and agree with the truth; it is deterministic."""
    rng = random.Random(seed)
    script = Script(tmp_path_factory.mktemp("any"))
    script.start(launch=rng.uniform(0, 30), load=rng.uniform(0, 30))
    for _ in range(rng.randrange(5)):
        for _ in range(rng.randrange(3)):
            script.train(rng.randrange(1, 15), data=rng.choice([0.0, 0.3]))
            script.save(stall=rng.choice([0.0, 2.0]))
        script.train(rng.randrange(1, 10))
        launcher = ""
        match rng.randrange(5):
            case 0:
                script.kill(detect=rng.uniform(0.1, 900))
                launcher = "restart"
            case 1:
                script.fail(rng.choice([1, 75, 93]), detect=rng.uniform(0, 9), down=rng.uniform(0, 9))
                script.queue(rng.uniform(0, 900))
            case 2:
                script.stop(down=rng.uniform(0, 9))
                script.queue(rng.uniform(0, 900))
                launcher = "launch"
            case 3:
                script.hang(detect=rng.uniform(1, 90), down=rng.uniform(0, 9))
                script.queue(rng.uniform(0, 900))
            case _:
                script.stop()
                script.queue(10.0)
                script.roll_back(rng.randrange(script.step))
                script.queue(10.0)
        script.start(launch=rng.uniform(0, 30), load=rng.uniform(0, 30), launcher=launcher)
    script.train(rng.randrange(1, 30))
    seconds = sum(entry[2] for entry in script.done)
    found = goodput(script.run)
    assert found is not None and found == goodput(script.run)
    states, truth = found.states, {str(state): value for state, value in script.truth.items()}
    steps = ("steps", "data", "saves")
    assert sum(states[name] for name in steps) == pytest.approx(seconds, abs=0.05)
    for name in set(states) - set(steps):
        assert states[name] == pytest.approx(truth[name], abs=0.05), name
    assert sum(states.values()) == pytest.approx(script.clock - BEGIN, rel=1e-3)
    assert found.tokens == script.step * BATCH * LENGTH


@pytest.mark.shows("A5", "F46")
def test_a_real_run_that_was_killed_and_stopped(lab: Any, helpers: Any, run_command: Any, gates: Any) -> None:
    """kill -9 and resume on two ranks, with another learning rate; no second is missing."""
    began = time.time()
    config = lab.config(train={"duration": "60 steps"}, checkpoint={"every": "10 steps"})
    gates(29)
    job = lab.start(config, ranks=2)
    run = lab.path / "run"
    # the second save may still be going on at the gate, where nobody asks for its end
    helpers.wait_for(lambda: helpers.journal(run, "checkpoint"), what="a save")
    helpers.wait_for(lambda: helpers.metrics(run)[-1]["step"] >= 25, what="step 25")
    job.kill()
    job.wait()
    gates()
    recorded = helpers.metrics(run)[-1]["step"]
    writer = Journal(RunDir(run))
    writer.write("restart", "rank 0 died by SIGKILL")  # as the launcher writes it
    writer.close()
    flags = ("--allow", "optimizer.lr", "--reason", "it was too high")
    lab.train(config, "optimizer.lr=2e-3", ranks=2, flags=flags)
    found = json.loads(run_command("fsdp_pretrain.cli", "goodput", run, "--json").stdout)
    states, metrics = found["states"], helpers.metrics(run)
    assert sum(states.values()) == pytest.approx(found["wall_seconds"], rel=1e-3)
    assert found["wall_seconds"] <= time.time() - began + 0.1
    assert found["tokens"] == metrics[-1]["tokens"] == 60 * 8 * 32
    (resumed,) = helpers.journal(run, "resume")
    (incident,) = found["incidents"]
    lost = recorded - resumed["step"]
    assert resumed["lost"]["steps"] == lost > 0
    assert found["tokens_lost"] == resumed["lost"]["tokens"] == lost * 8 * 32
    assert incident["kind"] == "failure" and incident["over"] and "SIGKILL" in incident["cause"]
    assert states["starting"] > 0 and states["steps"] > 0 and states["stopping"] > 0
    assert states["lost"] > 0 == states["idle"]
    kept = sum(record["seconds"]["iteration"] for record in metrics)
    assert sum(states[name] for name in ("steps", "data", "saves")) == pytest.approx(kept, abs=0.01)
    (changed,) = helpers.journal(run, "changed")
    assert "optimizer.lr: 0.01 -> 0.002; because: it was too high" in changed["text"]
    assert f"{found['goodput']:.1%} of" in run_command("fsdp_pretrain.cli", "status", run).stdout


def test_the_energy_of_all_ranks_is_recorded(lab: Any, helpers: Any) -> None:
    """Or none, where a rank does not know its own."""
    config = lab.config(train={"duration": "4 steps"}, checkpoint={"every": "10 steps"})
    lab.train(config, ranks=2, variables={"EXECUTE_FIRST": str(helpers.root / "tests/energies.py")})
    found = [record["energy_joules"] for record in helpers.metrics(lab.path / "run")]
    assert found == [3.0, 6.0, None, 12.0]


@pytest.mark.quick
def test_energy_of_a_time_without_an_answer_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver is silent for a minute: what was used meanwhile is not that of the next step."""
    asked, answers, clock = threading.Semaphore(0), queue.SimpleQueue[int | None](), [0.0]

    def answer(handle: object) -> int:
        asked.release()
        if (joules := answers.get()) is None:
            raise ValueError("the test is over")
        return 1000 * joules

    nvml = {"nvmlInit": lambda: None, "nvmlDeviceGetHandleByUUID": str, "nvmlDeviceGetTotalEnergyConsumption": answer}
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**nvml))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="x"))
    monkeypatch.setattr(device_timing, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: None))
    counter, taken = device_timing.EnergyCounter(torch.device("cuda", 0)), list[int | None]()
    asked.acquire()
    for now, joules in ((0, 100), (10, 150), (70, None), (71, 900), (72, 950)):
        clock[0] = now
        if joules is not None:
            answers.put(joules)
            asked.acquire()  # for the next reading: this one is there
        taken.append(counter.take())
    answers.put(None)
    assert taken == [None, 50_000, None, None, 50_000]
