"""Real jobs of one to four processes: the same curve on every mesh, across kills, restarts and other world sizes."""

from __future__ import annotations

import functools
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sight import seeded

from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.requests import send

MESHES = {
    # name: (ranks, overrides)
    "one": (1, ["train.micro_batch=8"]),
    "one-accumulating": (1, ["train.micro_batch=2"]),
    "fsdp4-accumulating": (4, ["parallel.shard=4", "train.micro_batch=1", "parallel.reshard_after_forward=false"]),
    "hsdp2x2-accumulating": (4, ["parallel.shard=2", "train.micro_batch=1"]),
    "ddp2": (2, ["parallel.shard=1", "train.micro_batch=2", "parallel.recompute=1"]),
}


@pytest.fixture(scope="module")
def trained_on(module_lab: Any) -> Callable[[str], Path]:
    """Run directory of 12 steps on a mesh of that name."""
    config = module_lab.config("parity", train={"duration": "12 steps"}, checkpoint={"every": "1000 steps"})

    @functools.cache
    def train(name: str) -> Path:
        ranks, overrides = MESHES[name]
        run: Path = module_lab.path / name
        module_lab.train(config, f"run.dir={run}", *overrides, ranks=ranks)
        return run

    return train


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "one"])
@pytest.mark.promise("exact-loss")
def test_every_mesh_gives_the_curve_of_one_process(trained_on: Callable[[str], Path], helpers: Any, mesh: str) -> None:
    curves = {name: helpers.losses(trained_on(name)) for name in ("one", mesh)}
    assert len(curves["one"]) == 12
    for (step, loss, norm), (step_one, loss_one, norm_one) in zip(curves[mesh], curves["one"], strict=True):
        assert step == step_one
        assert loss == pytest.approx(loss_one, rel=1e-5)
        assert norm == pytest.approx(norm_one, rel=1e-5)
    assert curves["one"][-1][1] < 0.95 * curves["one"][0][1]  # and it learns


@pytest.mark.slow
def test_gradients_exchanged_in_bf16_give_nearly_the_same_curve(module_lab: Any, helpers: Any) -> None:
    """A few steps of two micro-batches on two replicas of two ranks, whose gradients are rounded on the way."""
    config = module_lab.config(
        "rounded",
        train={"duration": "30 steps"},
        optimizer={"lr": 1e-3, "min_lr": 1e-4},
        checkpoint={"every": "1000 steps"},
    )
    curves = {}
    for reduce, ranks, mesh in (
        ("fp32", 1, ["train.micro_batch=8"]),
        ("bf16", 4, ["parallel.shard=2", "train.micro_batch=1"]),
    ):
        run = module_lab.path / f"rounded-{reduce}"
        module_lab.train(config, f"run.dir={run}", f"parallel.reduce={reduce}", *mesh, ranks=ranks)
        curves[reduce] = [loss for _, loss, _ in helpers.losses(run)]
    assert len(curves["fp32"]) == 30 and curves["bf16"] == pytest.approx(curves["fp32"], rel=1e-3)
    assert curves["bf16"] != pytest.approx(curves["fp32"], rel=1e-6)


@pytest.mark.promise("record")
def test_the_record_is_complete(trained_on: Callable[[str], Path], helpers: Any) -> None:
    records = helpers.metrics(trained_on("hsdp2x2-accumulating"))
    reference = helpers.metrics(trained_on("one"))
    for record, other in zip(records, reference, strict=True):
        step = record["step"]
        assert (record["consumed"], record["cursor"], record["tokens"]) == (step * 8, step * 8, step * 256)
        assert record["loss"]["count"] == 256 and record["sources"]["text"]["count"] == 256
        assert record["data_digest"] == other["data_digest"]
        assert record["documents"] == other["documents"] and record["quarantined"] == 0
        assert record["clip"] == pytest.approx(min(1.0, 1 / record["grad_norm"]), rel=1e-4)
        parts = record["seconds"]
        assert parts["iteration"] == pytest.approx(sum(v for k, v in parts.items() if k != "iteration"), rel=1e-6)
        assert record["mfu"] is None  # a CPU has no peak on file, and none is guessed
        assert record["energy_joules"] is None
        assert record["mixture"] == {"text": 1.0} and record["segment"] == 1 and record["host"]
    assert records[3]["lr"] == pytest.approx(1e-2) and records[-1]["lr"] == pytest.approx(1e-3)


@pytest.fixture(scope="module")
def long_config(module_lab: Any) -> Path:
    path: Path = module_lab.config(
        "long", train={"duration": "28 steps", "micro_batch": 2}, checkpoint={"every": "7 steps"}, parallel={"shard": 2}
    )
    return path


@pytest.fixture(scope="module")
def uninterrupted(module_lab: Any, long_config: Path, helpers: Any) -> list[Any]:
    module_lab.train(long_config, f"run.dir={module_lab.path / 'whole'}", ranks=4)
    return list(helpers.metrics(module_lab.path / "whole"))


def curve(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(r["step"], r["loss"]["sum"], r["grad_norm"], r["data_digest"], r["lr"], r["cursor"]) for r in records]


def same_within_rounding(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """The same batches and, up to the order of additions, the same losses: another number of ranks."""
    assert [record["data_digest"] for record in ours] == [record["data_digest"] for record in theirs]
    assert [r["loss"]["sum"] for r in ours] == pytest.approx([r["loss"]["sum"] for r in theirs], rel=1e-5)


@pytest.mark.shows("A4", "A24", "A28", "D7")
@pytest.mark.promise("bitwise-resume")
def test_kill_and_restart_is_bitwise(
    module_lab: Any, long_config: Path, uninterrupted: list[Any], helpers: Any, gates: Any
) -> None:
    """kill -9 of one rank at a random step; after a restart the curve is bitwise that of no kill."""
    rng, run = seeded(), module_lab.path / "killed"
    at = rng.randrange(8, 20)
    (gate,) = gates(at + 6)
    job = module_lab.start(long_config, f"run.dir={run}", ranks=4)

    def there() -> bool:
        saved = any((run / "checkpoints").glob("step-*/verified.json"))  # saves continue during the next steps
        return (saved and reached(run, at, helpers)) or job.ranks[0].poll() is not None

    helpers.wait_for(there, what=f"step {at}")
    job.kill(rng.randrange(4))
    gate.touch()
    codes = job.wait()
    assert -signal.SIGKILL in codes and 0 not in codes, job.output()
    gates()
    module_lab.train(long_config, f"run.dir={run}", ranks=4)
    assert curve(helpers.metrics(run)) == curve(uninterrupted)
    (resume,) = helpers.journal(run, "resume")
    assert resume["step"] % 7 == 0


def reached(run: Path, step: int, helpers: Any) -> bool:
    records = helpers.metrics(run)
    return bool(records) and records[-1]["step"] >= step


@pytest.mark.shows("A6", "D19")
@pytest.mark.promise("other-mesh")
def test_another_world_size_continues_the_same_batches(
    module_lab: Any, long_config: Path, uninterrupted: list[Any], helpers: Any
) -> None:
    run = module_lab.path / "rescaled"
    module_lab.train(long_config, f"run.dir={run}", "train.duration=14 steps", "optimizer.decay=28 steps", ranks=4)
    module_lab.train(long_config, f"run.dir={run}", "train.duration=21 steps", "optimizer.decay=28 steps", ranks=2)
    module_lab.train(long_config, f"run.dir={run}", "parallel.shard=1", ranks=1)
    assert len(uninterrupted) == 28
    same_within_rounding(helpers.metrics(run), uninterrupted)
    second, third = (entry["changed"] for entry in helpers.journal(run, "resume"))
    assert "world.size: 4 -> 2" in second and "world.size: 2 -> 1" in third
    assert any(change.startswith("train.duration:") for change in second)


@pytest.mark.slow
def test_two_nodes_form_one_mesh(module_lab: Any, long_config: Path, uninterrupted: list[Any], helpers: Any) -> None:
    """Shards inside each, replicas between them."""
    run = module_lab.path / "nodes"
    module_lab.train(long_config, f"run.dir={run}", "parallel.shard='node'", ranks=4, nodes=2)
    assert curve(helpers.metrics(run)) == curve(uninterrupted)
    environment = json.loads((run / "segments/0001/environment.json").read_text())
    assert environment["world"] == {"size": 4, "replicas": 2, "shards": 2}


@pytest.mark.shows("A23", "D17")
def test_stopping_saves_and_says_resume(
    module_lab: Any, long_config: Path, uninterrupted: list[Any], helpers: Any, gates: Any
) -> None:
    """SIGTERM to one rank only: all agree, save, exit 75; `control save` and `stop` likewise; nothing is lost."""
    run = module_lab.path / "stopped"
    (gate,) = gates(12)
    job = module_lab.start(long_config, f"run.dir={run}", ranks=2)
    helpers.wait_for(lambda: reached(run, 9, helpers), what="step 9")
    job.kill(1, signal.SIGTERM)
    gate.touch()
    assert job.wait() == [75, 75], job.output()
    stopped_at = helpers.metrics(run)[-1]["step"]
    assert (run / f"checkpoints/step-{stopped_at:08d}/manifest.json").exists()
    assert json.loads((run / "status.json").read_text())["exit_intent"]["code"] == 75
    assert json.loads((run / "segments/0001/exit_intent.json").read_text())["code"] == 75

    first, second = gates(18, 23)
    job = module_lab.start(long_config, f"run.dir={run}", ranks=2)
    helpers.wait_for(lambda: reached(run, 15, helpers), what="the second start")
    send(RunDir(run), "save")
    time.sleep(0.5)  # requests are checked twice a second, so the next step finds it
    first.touch()
    helpers.wait_for(
        lambda: any(stopped_at < e["step"] and e["step"] % 7 for e in helpers.journal(run, "checkpoint")),
        what="a save on request",
    )
    send(RunDir(run), "stop")
    time.sleep(0.5)
    second.touch()
    assert job.wait() == [75, 75], job.output()
    assert "control stop by" in json.loads((run / "status.json").read_text())["exit_intent"]["reason"]

    gates()
    module_lab.train(long_config, f"run.dir={run}", ranks=2)
    same_within_rounding(helpers.metrics(run), uninterrupted)
    assert json.loads((run / "status.json").read_text())["state"] == "complete"


# ---------------------------------------------------------------- refusals


@pytest.mark.shows("D1", "D6")
@pytest.mark.parametrize(
    ("override", "ranks", "expected"),
    [
        ("model.vocab=300", 1, "model.vocab = 300, but the corpora's tokenizer has"),
        ("model.declared_params=5", 2, "model.declared_params = 5, but this model has"),
        ("train.micro_batch=3", 2, "does not split over 2 ranks into micro-batches of 3"),
        ("parallel.shard=3", 2, "parallel.shard = 3 does not divide the world size 2"),
        ("data.sources.0.path=/nowhere", 2, "/nowhere is not a corpus"),
        ("optimizer.lrr=1", 2, "did you mean"),
        ("optimizer.betas=[0.9,1.0]", 2, "optimizer.betas.1 = 1.0"),
    ],
)
@pytest.mark.promise("mistakes-first")
def test_refused_before_work_starts(lab: Any, override: str, ranks: int, expected: str) -> None:
    output = lab.train(lab.config(), override, ranks=ranks, expect=78)
    assert expected in output and "Traceback" not in output
    assert output.count("error:") == 1  # not once per rank
    intent = lab.path / "run/segments/0001/exit_intent.json"
    assert intent.exists() or "split" not in expected  # a job that has shrunk says in its record that it cannot go on
    if intent.exists():
        assert json.loads(intent.read_text())["code"] == 78


@pytest.mark.shows("A11")
@pytest.mark.promise("bad-steps")
def test_a_loss_that_is_not_finite_stops_with_93_and_is_not_saved(lab: Any, helpers: Any) -> None:
    output = lab.train(lab.config(optimizer={"lr": 1e30, "min_lr": 0.0}, train={"grad_clip": 0.0}), ranks=2, expect=93)
    assert "not finite" in output and output.count("error:") == 1
    last = helpers.metrics(lab.path / "run")[-1]
    assert last["loss"]["sum"] is None or last["grad_norm"] is None
    assert not list((lab.path / "run/checkpoints").glob("step-*"))
    assert json.loads((lab.path / "run/status.json").read_text())["exit_intent"]["code"] == 93


@pytest.mark.shows("B4")
@pytest.mark.promise("bitwise-resume")
def test_dropout_resumes_bitwise(lab: Any, helpers: Any) -> None:
    """Random numbers are functions of (seed, step, rank): no generator state is stored, yet a resume repeats them. Also
    of a seed so large that its product with the step has more than 64 bits."""
    gpt = {"family": "gpt", "layers": 2, "hidden": 32, "heads": 4, "vocab": 512, "positions": 32, "dropout": 0.2}
    model = {**dict.fromkeys(["kv_heads", "ffn"]), **gpt}
    sections = {"run": {"seed": 2**62}, "train": {"duration": "10 steps"}, "checkpoint": {"every": "5 steps"}}
    config = lab.config("gpt", model=model, **sections)
    text = config.read_text()
    assert "kv_heads" not in text
    whole, parts = lab.path / "whole", lab.path / "parts"
    lab.train(config, f"run.dir={whole}", ranks=2)
    lab.train(config, f"run.dir={parts}", "train.duration=5 steps", "optimizer.decay=10 steps", ranks=2)
    lab.train(config, f"run.dir={parts}", ranks=2)
    assert helpers.losses(whole) == helpers.losses(parts)


def test_labels_that_cross_documents_can_be_left_out(lab: Any, helpers: Any) -> None:
    """Counts are those of the packer's separators, in all and by source."""
    from fsdp_pretrain.config.config import load
    from fsdp_pretrain.data.packing.opening import open_packer

    sources = [{"name": name, "path": str(lab.corpus), "weight": weight} for name, weight in (("a", 3.0), ("b", 1.0))]
    gpt = {"family": "gpt", "layers": 2, "hidden": 32, "heads": 4, "vocab": 512, "positions": 32}
    path = lab.config(
        model={**dict.fromkeys(["kv_heads", "ffn"]), **gpt},
        data={"attention": "document", "positions": "document", "loss_across_documents": False, "sources": sources},
        train={"duration": "3 steps"},
        optimizer={"warmup": "1 steps"},
    )
    lab.train(path, "parallel.shard=2", "train.micro_batch=1", ranks=4)
    config = load(path)
    packer = open_packer(config)
    for record in helpers.metrics(lab.path / "run"):
        packed = packer.pack(record["cursor"] - 8, 8)
        crossing = packed.tokens[:, :-1] == packer.eod
        kept = (~crossing).sum(1)
        assert record["loss"]["count"] == kept.sum() < 8 * 32
        for number, name in enumerate("ab"):
            assert record["sources"][name]["count"] == kept[packed.sources == number].sum()


def test_a_start_warns_once_of_what_is_set_in_vain(lab: Any) -> None:
    config = lab.config(train={"loss_scale": {"window": 500}, "duration": "5 steps"})
    assert lab.train(config, ranks=2).count("warning: train.loss_scale has no effect") == 1
