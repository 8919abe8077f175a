"""Steps trained again beside the run: equal to the bit, and told apart: a bad document, a bad kernel, a bad device."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import CLI, Run, as_rank, constants, free_port
from records import step_record

from data.text.tokenizer import Tokenizer
from fsdp_pretrain.config.operations import HealthSection
from fsdp_pretrain.config.steering import StepValues
from fsdp_pretrain.health import limits as health_limits
from fsdp_pretrain.record.step_record import StepRecord
from fsdp_pretrain.replay.comparison import StepComparison, UsualSteps, compare
from fsdp_pretrain.replay.verdict import ReplayReport, judge, render

NOISE, BAD = 291, 28
"""A document of random tokens, and the step that trains on it."""


@pytest.fixture(scope="module", autouse=True)
def limits() -> Iterator[None]:
    """Those of short runs."""
    with constants("fsdp_pretrain.health.limits", WINDOW=8, COMPARE_EVERY=4):
        yield


def files(run: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a run directory but the lock, which beats: when it was written, and its bytes."""
    found = (path for path in run.rglob("*") if path.is_file() and "lock.json" not in path.name)
    return {str(path.relative_to(run)): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


@pytest.fixture
def replay(run_command: Run) -> Callable[..., dict[str, Any]]:
    """`replay(run, "--from", 8)` is the report; checks that the exit code says whether all steps are equal."""

    def replay_(run: Path, *arguments: object) -> dict[str, Any]:
        done = run_command(CLI, "replay", run, *arguments, "--json")
        assert done.returncode in (0, 1) and done.stdout, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == int(any(step["differs"] for step in report["steps"]))
        return report

    return replay_


@pytest.fixture(scope="module")
def trained(module_lab: Any, helpers: Any) -> Path:
    """32 steps in bf16 on a text that is learned quickly; one document, in step `BAD`, is noise."""
    rng, cycle = random.Random(2), [*range(16, 48)]
    documents = [cycle[at % 32 :] + cycle[: at % 32] for at in range(400)]
    documents[NOISE] = [rng.randrange(60, 200) for _ in range(32)]
    corpus = helpers.corpus(module_lab.path / "corpus", documents, Tokenizer.load(module_lab.tokenizer), shards=1)
    config = module_lab.config(
        "trained",
        data={"sources": [{"name": "text", "path": str(corpus)}]},
        train={"duration": "32 steps", "precision": "bf16"},
        checkpoint={"every": "8 steps", "keep_last": 9},
    )
    module_lab.train(config)
    run: Path = module_lab.path / "trained"
    return run


# ---------------------------------------------------------------------- equal to the bit


@pytest.mark.shows("D11")
def test_beside_a_live_run_nothing_is_touched(
    lab: Any, helpers: Any, replay: Any, gates: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the run waits at step 9, its steps 5 to 7 are trained again to the bit; it then goes on as if alone."""
    (gate,) = gates(9)
    job = lab.start(lab.config(train={"duration": "10 steps"}, checkpoint={"every": "4 steps"}))
    run = lab.path / "run"
    helpers.wait_for(lambda: (run / "checkpoints/step-00000008/verified.json").exists())
    monkeypatch.delenv("EXECUTE_FIRST")
    before = files(run)
    report = replay(run, "--from", 4, "--steps", 50)
    assert report["finding"] == "reproducible" and [step["step"] for step in report["steps"]] == [5, 6, 7, 8]
    assert "4 of the 50 steps that were asked for" in render(ReplayReport.model_validate(report))
    assert files(run) == before
    gate.touch()
    assert job.wait() == [0]
    assert {path.name for path in (lab.path / "run.replays/0001").iterdir()} == {
        *("config.toml", "metrics.jsonl", "replay.json")
    }


def test_four_ranks_repeat_themselves(lab: Any, helpers: Any, start_command: Any) -> None:
    """2 replicas of 2 shards: losses and gradient norms are those of the record, to the bit."""
    config = lab.config(
        parallel={"shard": 2}, train={"duration": "8 steps", "micro_batch": 1}, checkpoint={"every": "4 steps"}
    )
    lab.train(config, ranks=4)
    request = {"run": str(lab.path / "run"), "out": str(lab.path / "out"), "start": 4, "steps": 4, "json_output": True}
    port = free_port()
    ranks = [
        start_command("fsdp_pretrain.replay", json.dumps(request), environment=as_rank(rank, 4, 4, port))
        for rank in range(4)
    ]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0] * 4, ranks[0].output()
    report = json.loads(ranks[0].output()[0])
    assert report["finding"] == "reproducible" and len(report["steps"]) == 4 and not report["unlike"]
    trained = [(record["loss"]["sum"], record["grad_norm"]) for record in helpers.metrics(lab.path / "run")[4:]]
    lines = (lab.path / "out/metrics.jsonl").read_text().splitlines()
    assert [(record["loss"]["sum"], record["grad_norm"]) for record in map(json.loads, lines)] == trained


@pytest.mark.slow
def test_the_command_starts_the_ranks_of_the_run(lab: Any, run_command: Run) -> None:
    """Under torchrun, as many as trained it; with fewer, equal bits are not promised, and the exit code says so."""
    lab.train(lab.config(train={"duration": "4 steps"}, checkpoint={"every": "2 steps"}), ranks=2)
    done = run_command(CLI, "replay", lab.path / "run", "--from", 2, "--steps", 2, timeout=300)
    assert done.returncode == 0 and "equal to the bit" in done.stdout, done.stderr
    alone = run_command(CLI, "replay", lab.path / "run", "--from", 2, "--nproc-per-node", 1)
    assert alone.returncode == 1 and "world.size: 2 -> 1" in alone.stdout and "rounding:" in alone.stdout, alone.stderr


def test_a_branch_that_was_left_is_replayed(trained: Path, tmp_path: Path, run_command: Run, replay: Any) -> None:
    """The checkpoint that a rollback moved aside, and the record of the start that it left."""
    run = tmp_path / "trained"
    shutil.copytree(trained, run)
    assert run_command(CLI, "rollback", run, "--to", 8).returncode == 0
    refused = run_command(CLI, "replay", run, "--from", 16)
    assert refused.returncode == 78 and "segments that have it: 1" in refused.stderr
    report = replay(run, "--from", 16, "--steps", 2, "--segment", 1)
    assert report["finding"] == "reproducible" and report["segment"] == 1


# ---------------------------------------------------------------------- what it was


@pytest.mark.shows("B12")
def test_a_bad_document_stays_bad_and_is_named(trained: Path, replay: Any) -> None:
    same = replay(trained, "--from", 24, "--steps", 4)
    assert same["finding"] == "reproducible" and f"Step {BAD} is bad again" in same["verdict"]
    other = replay(trained, "--from", 24, "--steps", 4, "--precision", "fp32", "--attention", "math")
    assert other["finding"] == "data or state" and len(other["changed"]) == 2
    assert NOISE in [piece["document"] for piece in other["suspects"][0]["pieces"]]
    assert [step["step"] for step in other["steps"] if step["bad"]] == [BAD]
    elsewhere = replay(trained, "--from", 16, "--batch-of", BAD)
    assert elsewhere["finding"] == "data" and elsewhere["steps"][0]["step"] == 17
    assert NOISE in [piece["document"] for piece in elsewhere["suspects"][0]["pieces"]]


@pytest.mark.shows("B12")
def test_a_bad_kernel_is_gone_without_it(lab: Any, replay: Any, fault: Any) -> None:
    """Fused attention gives NaN in step 7, in training and whenever it is used."""
    fault("kernel", rank="all", steps=[7])
    lab.train(lab.config(train={"duration": "8 steps"}, checkpoint={"every": "4 steps"}))
    run = lab.path / "run"
    same = replay(run, "--from", 4, "--steps", 4)
    assert same["finding"] == "reproducible" and "Step 7 is bad again (loss not finite)" in same["verdict"]
    assert any("--attention math" in command for command in same["next"])
    other = replay(run, "--from", 4, "--steps", 3, "--attention", "math")
    assert other["finding"] == "numerics" and "not the data" in other["verdict"]


@pytest.mark.slow
def test_a_device_that_was_wrong_once_is_told(lab: Any, replay: Any, fault: Any) -> None:
    fault("gradient", rank="all", steps=[7])
    lab.train(lab.config(train={"duration": "8 steps"}, checkpoint={"every": "4 steps"}))
    fault()
    report = replay(lab.path / "run", "--from", 4, "--steps", 4)
    assert report["finding"] == "device" and "step 7 is not bad now" in report["verdict"]
    assert [step["step"] for step in report["steps"] if step["differs"]] == [7, 8]


# ---------------------------------------------------------------------- the verdict, from numbers alone


def compared(step: int = 5, **changes: Any) -> StepComparison:
    values: dict[str, Any] = {
        "step": step, "batch_of": step, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "recorded_loss": 2.0,
        "recorded_grad_norm": 1.0, "recorded_lr": 1e-3, "sources": {}, "recorded_sources": {}, "differs": [],
        "bad": "", "recorded_bad": "", **changes,
    }  # fmt: skip
    return StepComparison(**values)


SAME: dict[str, Any] = {}
OTHER = {"changed": ["precision: bf16 -> fp32"]}
BATCH = {"batch_of": 9}
THEN, NOW, BOTH = {"recorded_bad": "loss not finite"}, {"bad": "loss not finite"}, {"recorded_bad": "x", "bad": "y"}
OFF = {"differs": ["loss"]}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("report", "step", "finding"),
    [
        (SAME, {}, "reproducible"),
        (SAME, BOTH, "reproducible"),
        (SAME, OFF, "device"),
        (SAME, OFF | THEN, "device"),
        (SAME, OFF | {"differs": ["samples", "loss"]}, "other samples"),
        (SAME, OFF | {"differs": ["settings"]}, "other settings"),
        ({"unlike": ["torch: 2.11 -> 2.13"]}, OFF | {"loss": 2.001}, "rounding"),
        ({"unlike": ["torch: 2.11 -> 2.13"]}, OFF | {"loss": 2.1}, "unlike"),
        ({"unlike": ["torch: 2.11 -> 2.13"]}, OFF | THEN, "unlike"),
        (OTHER, OFF, "undecided"),
        (OTHER, OFF | BOTH, "data or state"),
        (OTHER, OFF | THEN, "numerics"),
        (OTHER, OFF | NOW, "numerics"),
        (BATCH, OFF | BOTH, "data"),
        (BATCH, OFF | THEN, "state"),
        (BATCH, OFF | NOW, "undecided"),
        (BATCH, OFF, "undecided"),
        (BATCH | {"due_bad": "z"}, OFF | NOW, "state"),
        (BATCH | {"due_bad": "z"}, OFF, "data"),
    ],
)
def test_what_follows_from_a_replay(report: dict[str, Any], step: dict[str, Any], finding: str) -> None:
    values = {"changed": [], "unlike": [], "batch_of": None, "due_bad": "", **report}
    judged = judge(
        ReplayReport(run="r", segment=1, start=4, tolerance=1e-3, steps=[compared(**step)], seconds=1.0, **values)
    )
    assert judged.finding == finding and f"{finding}: {judged.verdict}" in render(judged)


UNSTEERED = StepValues(
    lr=1e-3, lr_scale=1.0, rewarm=1.0, weight_decay=0.1, betas=(0.9, 0.95), grad_clip=1.0, z_loss=0.0,
    embedding_shrink=1.0, shrink_paths="both",
)  # fmt: skip


def beside(
    replayed: StepRecord, recorded: StepRecord, usual: UsualSteps, then: UsualSteps, samples: list[float | None]
) -> StepComparison:
    return compare(replayed, recorded, usual, then, samples, UNSTEERED)


@pytest.mark.quick
def test_settings_are_their_values() -> None:
    """A record has only what its start had changed by then: what it leaves out is as if nothing was."""
    usual = UsualSteps([], HealthSection())
    for ramps, same in (
        ({"lr_scale": 1.0, "betas": (0.9, 0.95)}, True),
        ({"lr_scale": 1.0, "weight_decay": 0.2}, False),
        ({"shares": {"a": 0.5}}, False),
    ):
        steered, plain = step_record(5, ramps={"shares": {"a": 1.0}, **ramps}), step_record(5)
        for pair in ((steered, plain), (plain, steered)):
            assert (beside(*pair, usual, usual, []).differs == []) is same


@pytest.mark.quick
def test_what_stands_out() -> None:
    """Against the steps before; a step that did so then does so again if it comes half as far."""
    config = HealthSection()
    before = [step_record(at, loss={"sum": 512.0 + at % 3, "count": 256}, grad_norm=0.5) for at in range(1, 129)]
    usual = UsualSteps(before, config)
    calm, high = (
        step_record(129, loss={"sum": 512.0, "count": 256}),
        step_record(129, loss={"sum": 640.0, "count": 256}),
    )
    assert usual.stands_out(calm) == "" and "spreads above" in usual.stands_out(high)
    assert "gradient norm 5" in usual.stands_out(step_record(129, grad_norm=5.0))
    assert "not finite" in usual.stands_out(step_record(129, grad_norm=None, not_finite="gradients"))
    less = step_record(
        129, loss={"sum": 513.0 + 256 * 0.75 * health_limits.OUTLIER * health_limits.FLOOR, "count": 256}
    )
    assert beside(less, high, usual, usual, []).bad and not beside(less, calm, usual, usual, []).bad
    assert not UsualSteps(before[:4], config).stands_out(high)  # too few to say
    elsewhere = step_record(17, loss={"sum": 900.0, "count": 256})  # of a state at which so much is usual
    wild = UsualSteps([step_record(at, loss={"sum": 600.0 + 60 * at, "count": 256}) for at in range(1, 129)], config)
    odd, even = [3.4, 3.4, 3.5, 5.5], [3.4, 3.5, 3.6, 3.5]
    assert "raise its loss by" in beside(elsewhere, high, wild, usual, odd).bad  # high: 0.5 above the usual
    assert not beside(elsewhere, high, wild, usual, even).bad


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", 8, "--precision", "bf16"], "is what the steps were trained in"),
        (["--from", 8, "--attention", "sdpa"], "would change nothing"),
        (["--from", 9], "there are those of steps 8, 16, 24, 32"),
        (["--from", 32], "step 33 is not in the record"),
        (["--from", 8, "--precison", "fp32"], "unrecognized arguments: --precison fp32"),
    ],
)
def test_what_cannot_be_replayed_is_refused(trained: Path, run_command: Run, arguments: list[Any], said: str) -> None:
    before = files(trained)
    done = run_command(CLI, "replay", trained, *arguments)
    assert done.returncode == 78 and said in done.stderr and done.stdout == ""
    assert files(trained) == before


@pytest.mark.parametrize("out", ["trained/replay", "full"])
def test_where_it_may_not_write(trained: Path, run_command: Run, out: str) -> None:
    (trained.parent / "full").mkdir(exist_ok=True)
    (trained.parent / "full/file").touch()
    done = run_command(CLI, "replay", trained, "--from", 8, "--out", trained.parent / out)
    assert done.returncode == 78 and "--out" in done.stderr and not (trained / "replay").exists()
