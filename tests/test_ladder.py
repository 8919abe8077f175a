"""`plan --ladder` and `--ladder-fit`: small runs that the trainer accepts, and known laws found again in their records."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import Run
from records import step_record

from fsdp_pretrain.config.config import Config, load, parse
from fsdp_pretrain.models.flops import run_flops
from fsdp_pretrain.plan import ladder
from fsdp_pretrain.plan.plan import count_parameters
from fsdp_pretrain.run.step_record import LossSum

MODEL = {"family": "llama", "layers": 8, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 704, "vocab": 512}
FAMILIES = {
    "llama": MODEL,
    "qwen3": {**MODEL, "family": "qwen3", "head_size": 64, "tied_head": True},
    "gemma3_text": {
        **MODEL,
        "family": "gemma3_text",
        "head_size": 64,
        "query_pre_attn_scalar": 96,
        "sliding_window": 8,
        "sliding_window_pattern": 6,
    },
    "gpt": {"family": "gpt", "layers": 8, "hidden": 240, "heads": 6, "positions": 32, "vocab": 512},
    "glm": {"family": "glm", "layers": 8, "hidden": 240, "heads": 6, "positions": "rope-2d", "vocab": 512},
}


TARGET = {"train": {"duration": "4M tokens", "global_batch": "512 samples"}}
LEARNING = {"lr": 1e-3, "min_lr": 1e-4, "warmup": "20 steps"}


def make_target(lab: Any, model: dict[str, Any] = MODEL, name: str = "target") -> Path:
    """The configuration of a model that a ladder of four sizes leads to."""
    path: Path = lab.config(name, model={"kv_heads": None, "ffn": None, **model}, optimizer=LEARNING, **TARGET)
    return path


@pytest.fixture(scope="module")
def path(module_lab: Any) -> Path:
    """The configuration of a target."""
    return make_target(module_lab)


@pytest.fixture(scope="module")
def target(path: Path) -> Config:
    return load(path)


@pytest.fixture(scope="module")
def made(target: Config) -> list[Config]:
    """Its ladder."""
    return ladder.ladder(target, 4, Path("ladder"))


@pytest.mark.quick
@pytest.mark.parametrize("family", FAMILIES)
def test_small_models_have_the_shape_of_the_large_one(lab: Any, family: str) -> None:
    objective = ['data.objective={kind="glm",row=24,slots=2}'] if family == "glm" else []
    config = load(make_target(lab, FAMILIES[family]), objective)
    runs = ladder.ladder(config, 4, lab.path / "out")
    size = ladder.size_of(config.model)
    assert len(runs) == 12 and len({run.run.name for run in runs}) == 12
    for number, run in enumerate(runs):
        n, share = ladder.size_of(run.model), 0.1 / math.sqrt(10) ** (3 - number // 3)
        assert run.model.family == family and run.model.vocab == 512
        assert n / size == pytest.approx(share, rel=0.5)
        assert run.model.declared_params == count_parameters(run.model)
        assert run.model.kv_width / run.model.query_width == config.model.kv_width / config.model.query_width
        assert run.model.query_width / run.model.hidden == pytest.approx(config.model.query_width / config.model.hidden)
        assert run.schedule.tokens(run.schedule.total) / n == pytest.approx(4e6 / size, rel=0.05)
        assert run.schedule.batch.full == pytest.approx(512 * (n / size) ** (2 / 3), rel=0.1)
        factor = (0.5, 1.0, 2.0)[number % 3]
        assert run.optimizer.lr == pytest.approx(factor * 1e-3 * (n / size) ** (-1 / 3), rel=0.01)
        assert run.optimizer.min_lr == pytest.approx(run.optimizer.lr / 10)
        seen = {run.model.seen(layer, 32) for layer in range(run.model.layers)}
        assert run.model.layers == 1 or seen == ({8, 32} if family == "gemma3_text" else {32})
        scalar, its = (getattr(model, "query_pre_attn_scalar", None) or 1 for model in (config.model, run.model))
        assert its == (96 / 64 * run.model.head_dim if family == "gemma3_text" else scalar)
        warm = run.optimizer.warmup.value / run.schedule.steps  # the same share of the run
        assert warm == pytest.approx(20 / config.schedule.steps, rel=0.3)


@pytest.mark.quick
def test_lengths_in_steps_of_a_ramp_are_as_much_of_a_small_run(path: Path) -> None:
    """The steps of the target's warm-up are small ones."""
    ramp = 'train.batch_ramp={first="16 samples",by="16 samples",duration="30_000 samples"}'
    curve = ["curve=wsd", "warmup=60 steps", "decay=300 steps", "decay_length=100 steps"]
    config = load(path, [ramp, *(f"optimizer.{value}" for value in curve)])
    whole = config.schedule
    assert whole.warmup < 60 * 512 / 8
    for run in ladder.ladder(config, 3, Path("ladder")):
        schedule = run.schedule
        assert run.train.batch_ramp is None
        for key in ("warmup", "decay_start", "decay"):
            share = getattr(whole, key) / whole.total
            assert getattr(schedule, key) / schedule.total == pytest.approx(share, abs=0.02), key


@pytest.mark.quick
@pytest.mark.parametrize("shard", ["node", "64", "96"])
def test_a_target_of_many_shards_has_the_batches_of_the_law(path: Path, shard: str) -> None:
    config = load(path, [f"parallel.shard={shard}", "train.global_batch=960 samples", "train.micro_batch=1"])
    size = ladder.size_of(config.model)
    for run in ladder.ladder(config, 3, Path("ladder")):
        law = 960 * (ladder.size_of(run.model) / size) ** ladder.BATCH_POWER
        assert run.schedule.batch.full == pytest.approx(law, rel=0.11), (run.parallel.shard, law)


@pytest.mark.quick
def test_a_ladder_is_written_once(path: Path, target: Config, run_command: Run, tmp_path: Path) -> None:
    out = tmp_path / "ladder"
    command = ["fsdp_pretrain.cli", "plan", path, "--ladder", 4, "--out", out]
    done = run_command(*command)
    assert done.returncode == 0, done.stderr
    index = json.loads((out / "ladder.json").read_text())
    runs = [load(out / f"{run['name']}.toml") for run in index]
    assert [run["flops"] for run in index] == [run_flops(run, count_parameters(run.model)) for run in runs]
    assert [run.run.dir for run in runs] == [out / run["name"] for run in index]
    share = sum(run["flops"] for run in index) / run_flops(target, count_parameters(target.model))
    assert f"12 small runs: {sum(run['flops'] for run in index):.3g} FLOPs, {share:.2%} of the target's" in done.stdout
    again = run_command(*command)
    assert again.returncode == 78 and "ladder.json" in again.stderr and "Traceback" not in again.stderr


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--ladder", "2"], "at least 3 sizes"),
        (["--ladder", "4", 'timeline=[{at="8 steps",optimizer={lr=1e-3}}]'], "no timeline"),
        (["--ladder", "4", "model.hidden=32", "model.layers=1", "model.ffn=64"], "too few for 4 smaller models"),
        (["--ladder", "4", "--ladder-fit", "x"], "give --ladder"),
        (["--ladder", "4", "--world-size", "8"], "neither has --at or --world-size"),
    ],
)
def test_what_gives_no_ladder_is_refused(path: Path, run_command: Run, arguments: list[str], expected: str) -> None:
    done = run_command("fsdp_pretrain.cli", "plan", path, *arguments)
    assert done.returncode == 78 and expected in done.stderr and "Traceback" not in done.stderr, done.stderr


POWER, BEND, LIMIT, SCALE, ALPHA = -0.28, 0.08, 1.7, 0.4, 0.3


def best_rate(share: float) -> float:
    """The law of the records: the best rate of a model with this share of the target's size."""
    return 1.2e-3 * share**POWER


def law(share: float, lr: float) -> float:
    """The loss of such a model at a rate."""
    return LIMIT + SCALE * share**-ALPHA + BEND * math.log(lr / best_rate(share)) ** 2


def write_record(config: Config, folder: Path, loss: float, heldout: float | None = None, jump: float = 0.0) -> Path:
    """The record of a run whose loss falls to `loss`, and jumps at the end."""
    segment = folder / "segments" / "0001"
    segment.mkdir(parents=True)
    (folder / "config.toml").write_text(config.to_toml())
    (segment / "lineage.json").write_text(json.dumps({"segment": 1, "parent": None, "step": 0, "kind": "start"}))
    schedule, lines = config.schedule, []
    for step in range(1, schedule.steps + 1):
        left = 0.9 - step / schedule.steps
        now, batch = loss + 3 * max(0.0, left) + (jump if left < 0 else 0), schedule.batch.full
        changes: dict[str, Any] = {"loss": {"sum": 256 * now, "count": 256}, "lr": schedule.lr_at(step * batch)}
        if heldout is not None and step == schedule.steps:
            sums = {"a": 100 * heldout - 50, "b": 100 * heldout + 50}
            changes["heldout"] = {name: LossSum(sum=total, count=100) for name, total in sums.items()}
        lines.append(step_record(step, batch=batch, **changes).to_line() + "\n")
    (segment / "metrics.jsonl").write_text("".join(lines))
    return folder


def share_of(run: Config, target: Config) -> float:
    return ladder.size_of(run.model) / ladder.size_of(target.model)


@pytest.mark.quick
def test_a_known_law_is_found_in_noisy_records(
    path: Path, target: Config, made: list[Config], run_command: Run, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    losses = [law(share_of(run, target), run.optimizer.lr) + random.normal(0, 0.003) for run in made]
    runs = [write_record(run, tmp_path / run.run.name, loss) for run, loss in zip(made, losses, strict=True)]
    done = run_command("fsdp_pretrain.cli", "plan", path, "--ladder-fit", *runs, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["lr"][0] == pytest.approx(best_rate(1), rel=0.1)
    assert found["lr"][1] < best_rate(1) < found["lr"][2]
    assert found["loss"][1] < law(1, best_rate(1)) < found["loss"][2] < found["loss"][1] + 0.1
    assert found["batch"] == 512 and found["measure"] == "training"


SHARES = 0.1 / math.sqrt(10) ** np.arange(4)


def trials(loss: Callable[[float, float], float]) -> list[ladder.Trial]:
    """The ends of the runs of a ladder whose target has 10^9 parameters in its blocks."""
    rates = [(share, factor * 1e-3 * share ** (-1 / 3)) for share in SHARES for factor in (0.5, 1.0, 2.0)]
    return [ladder.Trial(int(share * 1e9), 100, lr, loss(share, lr), None, False) for share, lr in rates]


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(5))
def test_rate_and_loss_whatever_the_noise(seed: int) -> None:
    random = np.random.default_rng(seed)
    found = ladder.fit(trials(lambda share, lr: law(share, lr) + random.normal(0, 0.003)), 10**9, 464)
    assert found.lr is not None and found.loss is not None, found.problems
    assert found.lr[0] == pytest.approx(best_rate(1), rel=0.1) and found.lr[1] < best_rate(1) < found.lr[2]
    assert found.loss[1] < law(1, best_rate(1)) < found.loss[2] < found.loss[1] + 0.15


@pytest.mark.quick
def test_rates_far_from_the_best_do_not_count() -> None:
    few = trials(lambda share, lr: law(share, lr) + math.sin(1e5 * lr) / 500)
    far = [ladder.Trial(trial.size, 100, trial.lr * 8, 9.0, None, False) for trial in few]
    assert ladder.fit([*few, *far], 10**9, 464) == ladder.fit(few, 10**9, 464)


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of 200 ladders 190 on average; fewer than 180 about once in a thousand."""
    held = {"lr": 0, "loss": 0}
    for seed in range(200):
        random = np.random.default_rng(seed)
        found = ladder.fit(trials(lambda share, lr: law(share, lr) + random.normal(0, 0.003)), 10**9, 464)  # noqa: B023
        assert found.lr is not None and found.loss is not None, found.problems
        held["lr"] += found.lr[1] < best_rate(1) < found.lr[2]
        held["loss"] += found.loss[1] < law(1, best_rate(1)) < found.loss[2]
    assert min(held.values()) >= 180, held


@pytest.mark.quick
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda share, lr: law(share, lr / 4), "the best rate of 100M is at the edge of those tried: try 0.00862"),
        (lambda share, lr: law(share, lr * 4), "the best rate of 3.16M is at the edge of those tried: try 0.0017"),
        (
            lambda share, lr: law(share, 1e-3) + math.tanh(99 * lr),
            "the best rate of 100M is at the edge of those tried: try 0.000539",
        ),
        (lambda share, lr: law(share, lr) + 9 * share, "does not fall with the size"),
        (lambda share, lr: 2 * law(share, best_rate(share)) - law(share, lr), "do not bend as a parabola"),
        (lambda share, lr: law(share, best_rate(share)) + math.sin(1e5 * lr) / 10, "less than their noise"),
    ],
    ids=["above", "below", "falling", "size", "concave", "noise"],
)
def test_losses_that_allow_no_proposal(loss: Any, expected: str) -> None:
    found = ladder.fit(trials(loss), 10**9, 464)
    assert expected in "; ".join(found.problems) and found.lr is None and found.loss is None


@pytest.mark.quick
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_equal_losses_allow_no_proposal() -> None:
    """And numpy says nothing of its own."""
    rates, sizes = (1e-3, 2e-3, 4e-3), (10**6, 3 * 10**6, 10**7)
    equal = [ladder.Trial(size, 64, lr, 3.0, None, False) for size in sizes for lr in rates]
    found = ladder.fit(equal, 10**9, 640)
    assert found.lr is None and "the loss does not fall with the size" in found.problems


@pytest.mark.quick
def test_the_held_out_loss_counts_where_it_was_measured(
    path: Path, target: Config, made: list[Config], run_command: Run, tmp_path: Path
) -> None:
    """At a further rate the largest model diverged, which is no point of the law; the batch is that of the runs."""
    section = made[-1].optimizer.model_copy(update={"lr": 4 * made[-1].optimizer.lr})
    runs = [
        write_record(run, tmp_path / run.run.name, 9.0, heldout=law(share_of(run, target), run.optimizer.lr))
        for run in made
    ]
    runs.append(
        write_record(parse(made[-1].model_copy(update={"optimizer": section}).to_toml()), tmp_path / "x", 9.0, 2.0, 1.0)
    )
    arguments = [path, "train.global_batch=1024 samples", "--ladder-fit", *runs]
    done = run_command("fsdp_pretrain.cli", "plan", *arguments)
    assert f"optimizer.lr = {best_rate(1):.3g} (" in done.stdout, done.stdout + done.stderr
    assert f"its held-out loss at the end: {law(1, best_rate(1)):.3f}" in done.stdout
    assert int(done.stdout.split("global_batch = ")[1].split()[0]) == pytest.approx(512, rel=0.1)


@pytest.mark.quick
def test_runs_that_do_not_belong_to_the_ladder_are_refused(
    lab: Any, path: Path, target: Config, made: list[Config], run_command: Run, tmp_path: Path
) -> None:
    runs = [
        write_record(run, tmp_path / run.run.name, law(share_of(run, target), run.optimizer.lr)) for run in made[:7]
    ]

    def refused(*arguments: Any) -> str:
        done = run_command("fsdp_pretrain.cli", "plan", *arguments)
        assert done.returncode == 78 and "Traceback" not in done.stderr, done.stdout + done.stderr
        return str(done.stderr)

    few = refused(path, "--ladder-fit", *runs)
    assert "has 1 rates without divergence; 3 are the least" in few and "no rate is proposed" in few
    assert "there are 2 sizes; 3 are the least" in refused(path, "--ladder-fit", *runs[:6])
    longer = refused(path, "train.duration=8M tokens", "--ladder-fit", *runs)
    assert "tokens per parameter of its blocks, and the target has" in longer
    other = make_target(lab, FAMILIES["gpt"], "other")
    assert "model.family = llama, and the target has gpt" in refused(other, "--ladder-fit", *runs)
    assert "there is no such directory" in refused(path, "--ladder-fit", tmp_path / "nowhere")

    metrics = runs[0] / "segments" / "0001" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:-2]))
    assert f"it was left after {len(lines) - 2} of {len(lines)} steps" in refused(path, "--ladder-fit", *runs)
    changed = json.loads(lines[9])
    changed["lr"] *= 1.5
    metrics.write_text("".join([*lines[:9], json.dumps(changed) + "\n", *lines[10:]]))
    assert "its rate is not known" in refused(path, "--ladder-fit", *runs)
    metrics.write_text("".join(lines))
    (runs[0] / "segments" / "0002").mkdir()
    back = {"segment": 2, "parent": 1, "step": 7, "kind": "rollback"}
    (runs[0] / "segments" / "0002" / "lineage.json").write_text(json.dumps(back))
    assert f"it was left after 7 of {len(lines)} steps" in refused(path, "--ladder-fit", *runs)


@pytest.mark.slow
def test_the_trainer_accepts_every_run_of_a_ladder(lab: Any, run_command: Run, tmp_path: Path) -> None:
    model = {**MODEL, "layers": 6, "hidden": 192, "heads": 6, "kv_heads": 3, "ffn": 512}
    path = lab.config(
        "target", model=model, train={"duration": "1M tokens", "global_batch": "256 samples", "micro_batch": 256}
    )
    out = tmp_path / "ladder"
    assert run_command("fsdp_pretrain.cli", "plan", path, "--ladder", 3, "--out", out).returncode == 0
    names = [run["name"] for run in json.loads((out / "ladder.json").read_text())]
    for name in names:
        lab.train(out / f"{name}.toml")
    done = run_command("fsdp_pretrain.cli", "plan", path, "--ladder-fit", *(out / name for name in names))
    assert done.stdout.count("best lr") == 3, done.stdout + done.stderr
    assert ("optimizer.lr = " in done.stdout) == (done.returncode == 0)
    assert (done.returncode == 78) == ("no rate is proposed" in done.stderr)
