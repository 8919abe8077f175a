"""Evaluation of trained checkpoints: never of a damaged one, and on the schedule exactly once in spite of any failure."""

from __future__ import annotations

import json
import math
import random
import re
import signal
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from laboratory import moved
from processes import Run
from records import flip

pytest.importorskip("lm_eval")
import torch

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.sections import EvalSection
from fsdp_pretrain.errors import CheckpointError
from fsdp_pretrain.eval import jobs
from fsdp_pretrain.eval.checkpoints import open_checkpoint
from fsdp_pretrain.eval.evaluation import evaluate
from fsdp_pretrain.run import journal
from fsdp_pretrain.run.files import RunDir


@pytest.fixture(scope="module")
def trained(module_lab: Any) -> Path:
    """Saved and due for evaluation at 10, 20 and 30; not evaluated yet."""
    config = module_lab.config(
        "trained",
        train={"duration": "30 steps"},
        eval={"every": "10 steps", "heldout": str(module_lab.heldout), "launch": False, "limit": 4},
    )
    module_lab.train(config, ranks=2)
    run: Path = module_lab.path / "trained"
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return moved(trained, tmp_path / "run")


# ---------------------------------------------------------------- damaged checkpoints


@pytest.mark.promise("no-wrong-scores")
def test_no_checkpoint_with_a_flipped_bit_is_evaluated(run: Path) -> None:
    """In any file, of the optimiser's state too; what is refused names the file. Then it is whole again."""
    rng, store = random.Random(16), Store(run / "checkpoints")
    files = sorted(entry.name for entry in store.find(30).files())
    assert {"config.toml", "train_state.json", ".metadata"} < {*files}
    for name in [*files, *files, *rng.choices([name for name in files if name.endswith(".distcp")], k=20)]:
        path = store.find(30).path / name
        at, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
        flip(path, at, bit)
        with pytest.raises(CheckpointError, match=f"step-00000030 is damaged: {re.escape(name)}") as refused:
            open_checkpoint(store.find(30)).read("cpu", None)
        assert refused.value.remedy
        flip(path, at, bit)
    assert open_checkpoint(store.find(30)).read("cpu", None) is not None


def test_a_damaged_newest_checkpoint_is_not_evaluated(run: Path, run_command: Run) -> None:
    """It is refused, and the schedule publishes nothing of it."""
    flip(run / "checkpoints/step-00000030/__0_0.distcp", -100)
    refused = run_command("fsdp_pretrain.eval.cli", "run", run, "--limit", "1")
    assert refused.returncode == 78 and "__0_0.distcp: its bytes are not the ones" in refused.stderr
    assert "step-00000030 is damaged" in refused.stderr and refused.stdout == ""
    set_eval(run, tasks=["heldout_bpb"], attempts=1)
    assert run_command("fsdp_pretrain.eval.cli", "watch", run, "--once").returncode == 1 and results(run) == {
        10,
        20,
    }


# ---------------------------------------------------------------- scores that are no numbers


def test_scores_of_a_model_that_computes_nan_are_results(trained: Path, module_lab: Any) -> None:
    judged = open_checkpoint(Store(trained / "checkpoints").find(30))

    def poisoned(device: str, world: Any) -> Any:
        model = judged.read(device, world)
        with torch.no_grad():
            next(model.parameters()).fill_(math.nan)
        return model

    section = EvalSection(heldout=module_lab.heldout, limit=2)
    found = evaluate(replace(judged, read=poisoned), section)
    assert {task for task, _, value, *_ in found.metrics() if math.isnan(value)} >= {"heldout_bpb", "separator_probe"}
    assert ("heldout_bpb", "bits_per_byte is no finite number") in [*found.alarms()]


# ---------------------------------------------------------------- the scheduled job


def results(run: Path) -> set[int]:
    """The steps with results."""
    return {json.loads(path.read_text())["step"] for path in run.glob("evals/step-*/*/results.json")}


@pytest.mark.shows("C6")
@pytest.mark.promise("exactly-once")
def test_every_due_checkpoint_exactly_once_by_many_workers(
    run: Path, helpers: Any, run_command: Run, start_command: Callable[..., Any]
) -> None:
    workers = [start_command("fsdp_pretrain.eval.cli", "watch", run, "--once") for _ in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0], [worker.output() for worker in workers]
    assert results(run) == {10, 20, 30}
    entries = helpers.journal(run, "eval")
    assert sorted(entry["step"] for entry in entries) == [10, 20, 30]
    assert entries[0]["scores"]["heldout_bpb"]["bits_per_byte"] > 0
    assert not list(run.glob("evals/**/claim*"))
    again = run_command("fsdp_pretrain.eval.cli", "watch", run, "--once", "--wait", expect=0).stdout
    assert again.endswith(" nothing is due now\n") and "evaluated" not in again
    report = run_command("fsdp_pretrain.eval.cli", "report", run).stdout
    assert report.count("heldout_bpb") == 3 and "step 10," in report
    for newest in (30, 20):  # before and after a rollback
        shown = run_command("fsdp_pretrain.cli", "status", run).stdout
        assert re.search(rf"^  evaluated +step {newest}, .*heldout_bpb bits_per_byte \d", shown, re.MULTILINE)
        journal.add(RunDir(run), "rollback", "back", step=20)


@pytest.mark.promise("exactly-once")
def test_a_killed_worker_is_taken_over(
    run: Path, helpers: Any, run_command: Run, start_command: Callable[..., Any]
) -> None:
    """kill -9 in the middle of an evaluation: the next worker sees that the owner is dead and does the job."""
    worker = start_command("fsdp_pretrain.eval.cli", "watch", run, "--once")
    helpers.wait_for(
        lambda: [claim for claim in run.glob("evals/**/claim.json") if claim.stat().st_size], what="a claim"
    )
    worker.signal(signal.SIGKILL)
    assert worker.wait() == -signal.SIGKILL
    assert list(run.glob("evals/**/claim.json"))
    run_command("fsdp_pretrain.eval.cli", "watch", run, "--once", expect=0)
    assert results(run) == {10, 20, 30}


SEARCHED = """
task: searched
custom_dataset: !function searched.load
output_type: generate_until
validation_split: validation
doc_to_text: "{{text}}"
doc_to_target: "{{text}}"
generation_kwargs: {num_beams: 4, temperature: 0.0, max_gen_toks: 6, until: []}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def searched(tmp_path: Path) -> Path:
    """A folder for `eval.include` with a task that searches for its answers."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "searched.yaml").write_text(SEARCHED)
    (folder / "searched.py").write_text(
        "def load(**_):\n"
        "    from datasets import Dataset\n"
        "    return {'validation': Dataset.from_list([{'text': 'the run'}])}\n"
    )
    return folder


def test_tasks_that_are_refused_end_the_worker_and_use_up_no_attempt(
    run: Path, searched: Path, helpers: Any, run_command: Run
) -> None:
    """Every checkpoint would fail alike. The worker reports it once and exits, and all stay due for corrected tasks."""
    set_eval(run, include=[str(searched)], tasks=["searched"])
    for once in ([], ["--once"]):
        done = run_command("fsdp_pretrain.eval.cli", "watch", run, *once)
        assert done.returncode == 78 and "a task asks for num_beams=4" in done.stderr, done
    (entry,) = helpers.journal(run, "eval-refused")
    assert entry["step"] == 10 and "num_beams=4" in entry["text"]
    assert not helpers.journal(run, "eval-failed") and not list(run.glob("evals/**/*.json"))
    assert len(jobs.due_jobs(RunDir(run), load(run / "config.toml"))) == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "{run}", "--step", "11"], "no checkpoint of step 11 (there are: 10, 20, 30)"),
        (["run", "{run}", "--heldout", "/nowhere"], "there is no held-out file /nowhere"),
        (["run", "{run}", "--device", "cuda:7"], "device 'cuda:7' cannot be used"),
        (["watch", "/tmp"], "is not a run directory"),
    ],
)
def test_mistakes(trained: Path, run_command: Run, arguments: list[str], expected: str) -> None:
    done = run_command("fsdp_pretrain.eval.cli", *(argument.format(run=trained) for argument in arguments))
    assert done.returncode == 78 and expected in done.stderr and "Traceback" not in done.stderr


@pytest.mark.promise("evaluation-harmless")
def test_the_trainer_starts_evaluations_and_does_not_wait(
    lab: Any, helpers: Any, run_command: Run, constants: Any
) -> None:
    """Beside training, without delaying or changing it; a due checkpoint outlives retention until it is evaluated."""
    constants("fsdp_pretrain.eval.jobs", _NICENESS=0)  # on a full machine it would never get its turn
    common = {"train": {"duration": "30 steps"}, "checkpoint": {"every": "5 steps", "keep_last": 2}}
    scheduled = {"every": "15 steps", "heldout": str(lab.heldout), "limit": 3}
    lab.train(lab.config("with", **common, eval=scheduled), ranks=2)
    run = lab.path / "with"
    assert json.loads((run / "status.json").read_text())["state"] == "complete"
    run_command("fsdp_pretrain.eval.cli", "watch", run, "--once", "--wait", expect=0)
    assert results(run) == {15, 30}, (run / "evals/log").read_text()
    assert sorted(entry["step"] for entry in helpers.journal(run, "eval")) == [15, 30]
    lab.train(lab.config("without", **common), ranks=2)
    assert helpers.losses(run) == helpers.losses(lab.path / "without")


@pytest.mark.promise("evaluation-harmless")
def test_a_crashing_evaluation_does_not_touch_training(lab: Any, helpers: Any, constants: Any) -> None:
    constants("fsdp_pretrain.eval.jobs", _NICENESS=0)  # on a full machine it would never get its turn
    crashing = {"command": "echo broken; exit 3", "heldout": str(lab.heldout), "attempts": 1}
    lab.train(lab.config(eval={"every": "10 steps", **crashing}), ranks=2)
    run = lab.path / "run"
    assert json.loads((run / "status.json").read_text())["state"] == "complete"
    failed = helpers.wait_for(lambda: helpers.journal(run, "eval-failed"), what="the failure in the journal")
    assert "ended with 3: broken" in failed[0]["text"]


# ---------------------------------------------------------------- evaluations that do not end


def set_eval(run: Path, **values: Any) -> None:
    config = tomllib.loads((run / "config.toml").read_text())
    config["eval"].update(values)
    (run / "config.toml").write_text(tomli_w.dumps(config))


@pytest.fixture
def hanging(run: Path, helpers: Any) -> Path:
    """A run whose evaluations wait forever."""
    set_eval(run, include=[str(helpers.root / "tests/deadlock")], tasks=["deadlock"], deadline="0.7 s", attempts=1)
    return run


@pytest.mark.slow
@pytest.mark.shows("D15", "F26")
def test_an_evaluation_that_hangs_is_ended_with_its_stack(
    hanging: Path, helpers: Any, start_command: Callable[..., Any]
) -> None:
    """A deadlock in an evaluation: its stack, then the next one."""
    set_eval(hanging, every="20 steps", deadline="15 s")  # time to import torch and lm-eval
    worker = start_command("fsdp_pretrain.eval.cli", "watch", hanging, "--once")
    assert worker.wait() == 1, worker.output()
    failed = helpers.journal(hanging, "eval-failed")
    assert [(entry["step"], entry["failures"]) for entry in failed] == [(20, 1), (30, 1)]
    assert all("(given up): no results after 15s" in entry["text"] for entry in failed)
    assert "its stack is in" in failed[0]["text"]
    dumps = [path.read_text() for path in hanging.glob("evals/step-*/*/attempt-*/stack")]
    assert len(dumps) == 2 and all("most recent call first" in text for text in dumps)
    assert any(re.search(r'deadlock.py", line \d+ in load', text) for text in dumps)
    assert not list(hanging.glob("evals/**/claim*"))


def test_an_evaluation_that_is_killed_is_one_try_and_ends_with_its_worker(
    hanging: Path, helpers: Any, start_command: Callable[..., Any]
) -> None:
    """An OOM kill counts as an attempt, or it would repeat forever. A killed worker takes its evaluation along, and
    the next one begins it again."""
    set_eval(hanging, deadline="60 s", attempts=2, retry="0.001 s")

    def evaluation(worker: Any) -> psutil.Process:
        """Once it has asked to die with its worker, which it does before it imports torch."""
        (child,) = helpers.wait_for(lambda: psutil.Process(worker.pid).children(), what="an evaluation")
        helpers.wait_for(lambda: "libtorch_cpu" in str(child.memory_maps()), what="torch")
        found: psutil.Process = child
        return found

    worker = start_command("fsdp_pretrain.eval.cli", "watch", hanging, "--once", "--wait")
    evaluation(worker).kill()
    failed = helpers.wait_for(lambda: helpers.journal(hanging, "eval-failed"), what="the failure")
    assert "its process was ended by signal 9" in failed[0]["text"] and failed[0]["failures"] == 1
    child = evaluation(worker)
    worker.signal(signal.SIGKILL)
    helpers.wait_for(lambda: not child.is_running(), what="its end")
    again = start_command("fsdp_pretrain.eval.cli", "watch", hanging, "--once", "--wait")
    assert evaluation(again).is_running() and len(helpers.journal(hanging, "eval-failed")) == 1
    again.signal(signal.SIGKILL)
