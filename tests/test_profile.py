"""A trace of chosen steps of a live run: its ranks and steps, no change of numbers, storage that fails."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import CLI, Run

from fsdp_pretrain.job.profiling import StepProfiler
from fsdp_pretrain.parallel.mesh import SingleProcess
from fsdp_pretrain.run.requests import Request
from fsdp_pretrain.train.observer import AgreedActions


def events(path: Path) -> list[str]:
    """The names of the events of a trace."""
    with gzip.open(path, "rt") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Runs wait before step 5 until this file exists; steps take longer than reading the inbox is apart, in 10 steps."""
    gate = tmp_path / "gate"
    faults = [
        {"rank": "all", "step": 0, "kind": "wait", "seconds": 0.06},
        {"rank": "all", "step": 5, "kind": "await_file", "path": str(gate)},
    ]
    monkeypatch.setenv("EXECUTE_FIRST", str(Path(__file__).with_name("faults.py")))
    monkeypatch.setenv("FAULT", json.dumps(faults))
    return gate


def test_two_ranks_trace_the_same_steps_and_no_number_changes(
    lab: Any, helpers: Any, run_command: Run, held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for while the run waits at a step: the files hold those steps, and the record is that of a run alone."""
    config = lab.config(train={"duration": "24 steps"}, checkpoint={"every": "24 steps"})
    job = lab.start(config, ranks=2)
    run = lab.path / "run"
    helpers.wait_for(lambda: helpers.metrics(run))
    assert "ranks 0 to 1" in run_command(CLI, "profile", run, "--ranks", "0,2", expect=78).stderr
    run_command(CLI, "profile", run, "--steps", 21, expect=78)
    assert "ends with step 24" in run_command(CLI, "profile", run, "--at", 25, expect=78).stderr
    assert "perfetto" in run_command(CLI, "profile", run, "--steps", 2, "--at", 20, "--ranks", "0,1", expect=0).stdout
    held.touch()
    assert job.wait() == [0, 0]
    traces = [run / f"profiles/step-00000020-rank-{rank}.json.gz" for rank in (0, 1)]
    for path in traces:
        assert [name for name in events(path) if re.fullmatch(r"step \d+", name)] == ["step 20", "step 21"]
    texts = [entry["text"] for entry in helpers.journal(run, "profile")]
    assert "tracing steps 20 to 21 on rank 0, 1" in texts[0] and sum("perfetto" in text for text in texts) == 2
    assert [r["step"] for r in helpers.metrics(run) if "profile" in r["beside"]] == [19, 20, 21]
    assert {path.name for path in (run / "profiles").iterdir()} == {path.name for path in traces}

    monkeypatch.delenv("EXECUTE_FIRST")
    lab.train(lab.config("alone", train={"duration": "24 steps"}, checkpoint={"every": "24 steps"}), ranks=2)
    assert helpers.losses(run) == helpers.losses(lab.path / "alone")


def test_storage_that_fails_loses_the_trace_and_nothing_else(
    lab: Any, helpers: Any, run_command: Run, held: Path
) -> None:
    """`profiles` is a file. The run ends as it should, and the journal says why."""
    job = lab.start(lab.config(train={"duration": "24 steps"}))
    run = lab.path / "run"
    helpers.wait_for(lambda: helpers.metrics(run))
    (run / "profiles").touch()
    run_command(CLI, "profile", run, "--steps", 2, expect=0)
    held.touch()
    assert job.wait() == [0]
    (failed,) = helpers.journal(run, "profile-failed")
    assert "no trace was written" in failed["text"] and len(helpers.losses(run)) == 24


class TwoRanks(SingleProcess):
    """Rank 0 of two, of which the other is as `busy` as its writer."""

    busy = False

    def gather(self, value: Any) -> list[Any]:
        return [value, self.busy]


@pytest.fixture
def profiler() -> Any:
    """Of one rank, with what it reports in `told`, asked to trace the steps 3 and 4."""
    told = list[tuple[str, str]]()
    world = TwoRanks()
    recorder = SimpleNamespace(event=lambda kind, text: told.append((kind, text)))
    made = StepProfiler(SimpleNamespace(world=world, recorder=recorder))  # type: ignore[arg-type]
    made.ask(Request(verb="profile", steps=2, ranks=[0], by="me"))
    return SimpleNamespace(profiler=made, world=world, told=told)


def test_ranks_agree_whether_a_trace_is_still_being_written(profiler: Any) -> None:
    """On any of them: else some would trace, and others refuse."""
    profiler.world.busy = True
    profiler.profiler.between_steps(AgreedActions(step=1, profile=True))
    assert [kind for kind, _ in profiler.told] == ["profile-failed"] and profiler.profiler.beside(3) == []


@pytest.mark.parametrize("fails_at", [3, 4])
def test_a_profiler_that_fails_loses_the_trace_and_nothing_else(profiler: Any, fails_at: int) -> None:
    profiler.profiler.between_steps(AgreedActions(step=1, profile=True))
    for step in range(2, 6):
        profiler.profiler.before_step(step)
        if step == fails_at:
            profiler.profiler._profile.step = lambda: 1 / 0
        profiler.profiler.after_step(SimpleNamespace(step=step))
    assert not torch.autograd._profiler_enabled()
    profiler.profiler.end(5)
    profiler.profiler.close()
    assert [kind for kind, _ in profiler.told] == ["profile", "profile-failed"]
    assert "was not traced: division by zero" in profiler.told[1][1]
