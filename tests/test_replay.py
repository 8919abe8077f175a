"""Steps trained again beside the run: equal to the bit, or which of data, settings and numerics differs first."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import CLI, Run, as_rank, constants, free_port
from records import step_record
from sight import contents

from fsdp_pretrain.config.schedule import StepValues
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.eval.samples import sample_losses
from fsdp_pretrain.lineage.provenance import describe_step, trained_step
from fsdp_pretrain.replay.comparison import difference
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir

NOISE, BAD = 291, 28
"""A document of random tokens, and the step that trains on it."""


@pytest.fixture(scope="module", autouse=True)
def limits() -> Iterator[None]:
    """Those of short runs."""
    replicas = constants("fsdp_pretrain.parallel.replica_check", COMPARE_EVERY=4)
    with constants("fsdp_pretrain.health.limits", WINDOW=8), replicas:
        yield


@pytest.fixture
def replay(run_command: Run) -> Callable[..., tuple[dict[int, str], str]]:
    """`replay(run, "--from", 8)` is what each step differs in, and the output; checks its end and the exit code."""

    def replay_(run: Path, *arguments: object) -> tuple[dict[int, str], str]:
        done = run_command(CLI, "replay", run, *arguments)
        assert done.returncode in (0, 1) and done.stdout, done.stderr
        return verdicts(done.stdout, done.returncode), done.stdout

    return replay_


def verdicts(shown: str, code: int) -> dict[int, str]:
    """What each step of a table differs in; its last line and the exit code must agree with it."""
    rows = [line.split() for line in shown.splitlines() if line.split()[0].isdecimal()]
    found = {int(row[0]): row[-1] for row in rows}
    first = next(((step, differs) for step, differs in found.items() if differs != "equal"), None)
    last = "equal" if first is None else f"{first[1]} differs first, in step {first[0]}"
    assert shown.endswith(f"\n{last}\n") and code == int(first is not None), shown
    return found


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


def test_beside_a_live_run_nothing_is_touched(
    lab: Any, helpers: Any, replay: Any, gates: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the run waits at step 9, its steps 5 to 7 are trained again to the bit; it then goes on as if alone."""
    (gate,) = gates(9)
    job = lab.start(lab.config(train={"duration": "10 steps"}, checkpoint={"every": "4 steps"}))
    run = lab.path / "run"
    helpers.wait_for(lambda: (run / "checkpoints/step-00000008/verified.json").exists())
    monkeypatch.delenv("EXECUTE_FIRST")
    before, beside = contents(run), {path.name for path in lab.path.iterdir()}
    found, shown = replay(run, "--from", 4, "--steps", 50)
    assert found == dict.fromkeys((5, 6, 7, 8), "equal")
    assert "4 of the 50 steps that were asked for" in shown
    assert contents(run) == before and {path.name for path in lab.path.iterdir()} == beside
    gate.touch()
    assert job.wait() == [0]


@pytest.mark.promise("replay")
def test_four_ranks_repeat_themselves(lab: Any, helpers: Any, start_command: Any) -> None:
    """2 replicas of 2 shards: losses and gradient norms are those of the record, to the bit."""
    config = lab.config(
        parallel={"shard": 2}, train={"duration": "8 steps", "micro_batch": 1}, checkpoint={"every": "4 steps"}
    )
    lab.train(config, ranks=4)
    request = {"run": str(lab.path / "run"), "start": 4, "steps": 4}
    port = free_port()
    ranks = [
        start_command("fsdp_pretrain.replay", json.dumps(request), environment=as_rank(rank, 4, 4, port))
        for rank in range(4)
    ]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0] * 4, ranks[0].output()
    shown = ranks[0].output()[0]
    assert verdicts(shown, 0) == dict.fromkeys((5, 6, 7, 8), "equal") and "not as recorded" not in shown
    for record in helpers.metrics(lab.path / "run")[4:]:
        assert f"{record['grad_norm']:.6g}" in shown


@pytest.mark.slow
def test_the_command_starts_the_ranks_of_the_run(lab: Any, run_command: Run) -> None:
    """Under torchrun, as many as trained it; with fewer, equal bits are not promised, and the exit code says so: sums in
    another order are rounded otherwise in some of 16 steps, on any processor."""
    lab.train(lab.config(train={"duration": "24 steps"}, checkpoint={"every": "8 steps"}), ranks=2)
    done = run_command(CLI, "replay", lab.path / "run", "--from", 8, "--steps", 2, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("\nequal\n"), done.stderr
    alone = run_command(CLI, "replay", lab.path / "run", "--from", 8, "--steps", 16, "--nproc-per-node", 1)
    assert alone.returncode == 1 and "world.size: 2 -> 1" in alone.stdout, alone.stdout
    assert re.search(r"numerics differs first, in step \d+", alone.stdout)


def test_a_branch_that_was_left_is_replayed(trained: Path, tmp_path: Path, run_command: Run, replay: Any) -> None:
    """The checkpoint that a rollback moved aside, and the record of the start that it left. Another processor is named:
    it may round otherwise."""
    run = tmp_path / "trained"
    shutil.copytree(trained, run)
    run_command(CLI, "rollback", run, "--to", 8, expect=0)
    assert "segments that have it: 1" in run_command(CLI, "replay", run, "--from", 16, expect=78).stderr
    assert sample_losses(RunDir(run), 18, segment=1).checkpoint == 16  # of that branch too, and moved aside
    path = run / "segments/0001/environment.json"
    facts = json.loads(path.read_text())
    state_files.write(path, {**facts, "device": "cpu (another)"})
    found, shown = replay(run, "--from", 16, "--steps", 2, "--segment", 1)
    assert found == dict.fromkeys((17, 18), "equal")
    assert facts["device"] != "cpu" and f'device: "cpu (another)" -> "{facts["device"]}"' in shown


# ---------------------------------------------------------------------- what differs first


@pytest.mark.shows("B12")
def test_a_bad_document_is_bad_in_another_precision_too(trained: Path, replay: Any) -> None:
    """Its step is equal to the bit; in another precision nothing is, and its loss is as high again."""
    same, _ = replay(trained, "--from", 24, "--steps", 4)
    assert same == dict.fromkeys(range(25, BAD + 1), "equal")
    other, shown = replay(trained, "--from", 24, "--steps", 4, "--precision", "fp32")
    assert other == dict.fromkeys(range(25, BAD + 1), "numerics")
    *before, bad = [float(line.split()[1]) for line in shown.splitlines() if line.split()[0].isdecimal()]
    assert bad > max(before) + 0.1


def test_other_settings_are_told_where_they_begin(lab: Any, replay: Any) -> None:
    """Of two starts with other values in their own steps: equal up to the second, whatever its file says."""
    config = lab.config(train={"duration": "12 steps"}, checkpoint={"every": "4 steps"})
    lab.train(config, "train.duration=8 steps", "optimizer.decay=12 steps")
    flags = ("--allow", "optimizer")
    lab.train(config, "optimizer.decay=12 steps", "optimizer.weight_decay=0.3", "optimizer.eps=1e-6", flags=flags)
    found, shown = replay(lab.path / "run", "--from", 4, "--steps", 8)
    assert [*found.values()] == ["equal"] * 4 + ["settings"] * 4
    assert any("not as recorded: from step 9 on, " in line and "eps" in line for line in shown.splitlines())


def test_another_list_of_excluded_documents_is_other_data(lab: Any, replay: Any) -> None:
    """Its tokens are read as before, so the batch has the recorded digest; from its first document on, less is learned.
    The steps of the start for which it was declared are equal."""
    listed, run = lab.path / "bad.txt", RunDir(lab.path / "run")
    data, optimizer = {"exclude": str(listed)}, {"decay": "20 steps"}
    config = lab.config(data=data, optimizer=optimizer, checkpoint={"every": "4 steps"})
    listed.write_text("")
    lab.train(config, "train.duration=8 steps")
    steps = [describe_step(trained_step(run, step)).samples for step in range(5, 9)]
    *before, last = [{(piece.shard, piece.document) for sample in step for piece in sample.pieces} for step in steps]
    shard, document = min(last.difference(*before))
    listed.write_text(f"text {shard} {document}\n")
    relisted = f"not as recorded: data.exclude: {listed} names other documents"
    found, shown = replay(run.path, "--from", 4, "--steps", 4)
    assert [*found.values()] == ["equal"] * 3 + ["data"] and relisted in shown
    with pytest.raises(DataError, match="names other documents than it did for step 8"):
        sample_losses(run, 8)
    lab.train(config, "train.duration=10 steps", flags=("--allow", "data.exclude"))
    found, shown = replay(run.path, "--from", 8, "--steps", 2)
    assert [*found.values()] == ["equal"] * 2 and "not as recorded" not in shown
    assert sample_losses(run, 9).loss.count > 0
    found, shown = replay(run.path, "--from", 4, "--steps", 6)
    assert [*found.values()] == ["equal"] * 3 + ["data"] + ["numerics"] * 2 and relisted in shown


UNSTEERED = StepValues(
    lr=1e-3, lr_scale=1.0, weight_decay=0.1, betas=(0.9, 0.95), grad_clip=1.0, z_loss=0.0,
    embedding_shrink=1.0, shrink_paths="both",
)  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({}, None),
        ({"data_digest": "f" * 16, "lr": 2e-3, "grad_norm": 3.0}, "data"),
        ({"lr": 2e-3, "grad_norm": 3.0}, "settings"),
        ({"batch": 3}, "settings"),
        ({"grad_norm": 3.0}, "numerics"),
        ({"loss": {"sum": 512.5, "count": 256}}, "numerics"),
        ({"skipped": True}, "numerics"),
    ],
)
def test_the_cause_is_named_before_its_effect(change: dict[str, Any], differs: str | None) -> None:
    pair = [step_record(5), step_record(5, **change)]
    for replayed, recorded in (pair, pair[::-1]):
        assert difference(replayed, recorded, UNSTEERED) == differs


@pytest.mark.quick
def test_settings_are_their_values() -> None:
    """A record has only what its start had changed by then: what it leaves out is as if nothing was."""
    for ramps, differs in (
        ({"lr_scale": 1.0, "betas": (0.9, 0.95)}, None),
        ({"lr_scale": 1.0, "weight_decay": 0.2}, "settings"),
        ({"shares": {"a": 0.5}}, "settings"),
    ):
        steered, plain = step_record(5, ramps={"shares": {"a": 1.0}, **ramps}), step_record(5)
        for pair in ((steered, plain), (plain, steered)):
            assert difference(*pair, UNSTEERED) == differs


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", 9], "there are those of steps 8, 16, 24, 32"),
        (["--from", 32], "step 33 is not in the record"),
        (["--from", 8, "--precison", "fp32"], "unrecognized arguments: --precison fp32"),
    ],
)
def test_what_cannot_be_replayed_is_refused(trained: Path, run_command: Run, arguments: list[Any], said: str) -> None:
    before = contents(trained)
    done = run_command(CLI, "replay", trained, *arguments)
    assert done.returncode == 78 and said in done.stderr and done.stdout == ""
    assert contents(trained) == before
