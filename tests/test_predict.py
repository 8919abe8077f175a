"""The scale model: closed forms in its limits, bytes of collectives, published runs, and `plan --predict`."""

from __future__ import annotations

import json
import math
import random
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from processes import Run
from pydantic import TypeAdapter, ValidationError
from sight import seeded

from fsdp_pretrain import models
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.model import AnyModel, LlamaModel, Model
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.plan import devices, overheads, predict, published, scale
from fsdp_pretrain.plan.flops import hardware_flops_per_token
from fsdp_pretrain.plan.scale import FITTED, Cluster, Constants, Workload, step
from fsdp_pretrain.plan.sizes import sizes

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parent.parent
H100 = "NVIDIA H100 80GB HBM3"
LLAMA_7B = LlamaModel(family="llama", layers=32, hidden=4096, heads=32, ffn=11_008, vocab=32_000)


def cluster(**changes: float) -> Cluster:
    device = devices.find(H100)
    assert device is not None
    return replace(Cluster.of(device), **changes)


def work(shards: int = 8, replicas: int = 16, **changes: Any) -> Workload:
    return replace(Workload(LLAMA_7B, 4096, 2, 1, shards, replicas), **changes)


# ---------------------------------------------------------------- sizes


CHOICES: dict[str, list[Any]] = {
    "layers": [1, 2, 3], "hidden": [24, 48], "heads": [2, 6], "kv_heads": [None, 1, 2], "head_size": [None, 4, 20],
    "ffn": [None, 40, 72], "vocab": [60, 64], "vocab_multiple": [1, 64], "tied_head": [True, False],
    "positions": [16, "alibi", "rope", "rope-2d"], "embedding_norm": [True, False],
}  # fmt: skip
FAMILIES = [tag for kind in get_args(AnyModel) for tag in get_args(kind.model_fields["family"].annotation)]
"""Those of the schema: what is added there is checked here."""


@pytest.mark.parametrize("family", FAMILIES)
def test_closed_forms_count_the_models(family: str) -> None:
    """Twenty random shapes of every family."""
    rng, counted = seeded(), 0
    while counted < 20:
        (kind,) = (kind for kind in get_args(AnyModel) if family in get_args(kind.model_fields["family"].annotation))
        try:
            values = {key: rng.choice(choices) for key, choices in CHOICES.items() if key in kind.model_fields}
            model = kind(family=family, **values)
        except ValidationError:  # heads that do not divide, positions of another family
            continue
        built, found = models.build(model), sizes(model)
        assert found.block == sum(parameter.numel() for parameter in built.blocks[0].parameters()), model
        assert (found.layers, found.total) == (model.layers, built.count_parameters()), model
        counted += 1


@pytest.mark.parametrize("path", sorted((ROOT / "configs/models").glob("*.toml")), ids=lambda path: path.stem)
def test_closed_forms_give_the_declared_sizes(path: Path) -> None:
    model = TypeAdapter(Model).validate_python(tomllib.loads(path.read_text())["model"])
    assert sizes(model).total == model.declared_params


# ---------------------------------------------------------------- limits of the step


def test_one_node_needs_no_network() -> None:
    for shards, replicas in ((8, 1), (4, 2), (1, 8)):
        fast, slow = (step(work(shards, replicas), cluster(network=speed)) for speed in (math.inf, 1.0))
        assert fast == slow
    assert step(work(8, 2), cluster(network=1.0)).reduce > 1e9


def test_one_rank_communicates_nothing() -> None:
    alone = step(work(1, 1), cluster(link=1.0, network=1.0))
    assert (alone.gather, alone.reduce, alone.stragglers) == (0, 0, 0)


def test_with_infinite_bandwidth_only_products_remain() -> None:
    device = replace(cluster().device, bandwidth=math.inf)
    for job in (work(), work(128, 1, micro_batches=3), work(recompute=1.0)):
        parts = step(job, Cluster(device, 8, math.inf, math.inf, hop=0.0))
        flops = hardware_flops_per_token(LLAMA_7B, 4096, 1 if job.recompute else 0)
        seconds = job.micro_batches * job.tokens * flops / (FITTED.throttled * 794.5e12)
        assert parts.products == pytest.approx(seconds)
        assert (parts.elementwise, parts.optimizer, parts.gather, parts.reduce) == (0, 0, 0, 0)
        assert parts.stragglers == pytest.approx(seconds * scale.NOISE * scale.slowest(128))
        assert parts.seconds == pytest.approx(sum(getattr(parts, each.name) for each in fields(parts)))


@pytest.mark.parametrize(("ranks", "expected"), [(1, 0.0), (8, 1.4236), (100, 2.5076), (1000, 3.2414)])
def test_the_slowest_of_n_normal_ranks(ranks: int, expected: float) -> None:
    assert scale.slowest(ranks) == pytest.approx(expected, rel=0.01)


# ---------------------------------------------------------------- bytes of collectives


def test_a_ring_moves_the_bytes_of_the_theory() -> None:
    size = 1e9
    inside = scale.shard_traffic(work(8, 16), cluster(), size)
    assert inside == scale.CollectiveTraffic(size * 7 / 8, 0.0, 7)
    across = scale.shard_traffic(work(64, 2), cluster(), size)  # a node of 8 fetches the parts of 7 others once
    assert across.link == size * 63 / 64 and across.network * 8 == size * 7 / 8 and across.hops == 63
    between = scale.replica_traffic(work(8, 16), cluster(), size)  # all-reduce: 2 (r - 1) / r
    assert between == scale.CollectiveTraffic(0.0, 2 * size * 15 / 16, 2 * 15)
    mixed = scale.replica_traffic(work(4, 4), cluster(), size)  # two replicas in each of two nodes
    assert mixed.link == 2 * size * 3 / 4 and mixed.network * 2 == 2 * size / 2
    assert scale.shard_traffic(work(1, 8), cluster(), size) == scale.CollectiveTraffic()
    assert scale.replica_traffic(work(8, 1), cluster(), size) == scale.CollectiveTraffic()


def test_a_step_moves_what_fsdp_does() -> None:
    """Without overlap: blocks are gathered twice per micro-batch and the root once per step, all gradients reduced in
    fp32 after every micro-batch, and all-reduced once per step."""
    parameters = sizes(LLAMA_7B)
    bare = Constants(products=1, throttled=1, overlap=0, network=1)
    place = cluster(hop=0.0, link=1.0, network=8.0)  # a byte per second and rank
    for micro_batches in (1, 4):
        parts = step(work(8, 16, micro_batches=micro_batches), place, bare)
        assert parts.gather == pytest.approx(7 / 8 * 2 * (micro_batches * 2 * parameters.blocks + parameters.root))
    sharded = [step(work(8, 1, micro_batches=n), place, bare).reduce for n in (1, 4)]
    assert sharded == pytest.approx([n * 7 / 8 * 4 * parameters.total for n in (1, 4)])
    replicated = [step(work(1, 128, micro_batches=n, reshard=False), place, bare) for n in (1, 4)]
    nodes = 2 * 15 / 16 * 4 * parameters.total / 8  # a rank's share of what its node exchanges with 15 others
    inside = 2 * 127 / 128 * 4 * parameters.total
    assert [parts.reduce for parts in replicated] == pytest.approx([max(nodes, inside)] * 2)
    assert [parts.gather for parts in replicated] == [0, 0]
    for micro_batches in (1, 3):
        kept = step(work(8, 1, micro_batches=micro_batches, reshard=False), place, bare)
        assert kept.gather == pytest.approx(7 / 8 * 2 * parameters.total)


def test_what_computation_hides_costs_nothing_but_the_root() -> None:
    hiding = replace(FITTED, overlap=1.0)
    place = cluster(hop=0.0)
    parts = step(work(8, 1, micro_batches=3), place, hiding)
    root = 7 / 8 * sizes(LLAMA_7B).root / (hiding.network * place.link)
    assert parts.gather == pytest.approx(2 * root) and parts.reduce == pytest.approx(3 * 4 * root)
    none = step(work(8, 1, micro_batches=3), place, replace(FITTED, overlap=0.0))
    half = step(work(8, 1, micro_batches=3), place, replace(FITTED, overlap=0.5))
    assert half.gather + half.reduce == pytest.approx((parts.gather + parts.reduce + none.gather + none.reduce) / 2)


# ---------------------------------------------------------------- monotony


@pytest.mark.parametrize("part", ["link", "network"])
@pytest.mark.parametrize(
    "job",
    [work(), work(128, 1), work(4, 32, micro_batches=2), work(64, 2, reshard=False)],
    ids=["node", "all", "half a node", "eight nodes"],
)
def test_faster_wires_make_no_step_slower(part: str, job: Workload) -> None:
    times = [step(job, cluster(**{part: speed})).seconds for speed in (1e9, 1e10, 1e11, 1e12)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


def test_more_ranks_more_work_and_less_memory_bandwidth_cost_time() -> None:
    times = [step(work(8, replicas), cluster()).seconds for replicas in (1, 2, 4, 16, 64, 128)]
    assert times == sorted(times)
    base = step(work(), cluster()).seconds
    for more in ({"recompute": 0.5}, {"compiled": False}, {"micro_batch": 3}, {"micro_batches": 2}):
        assert step(work(**more), cluster()).seconds > base
    device = cluster().device
    assert step(work(), replace(cluster(), device=replace(device, bandwidth=device.bandwidth / 2))).seconds > base
    assert step(work(), cluster(), replace(FITTED, overlap=0.9)).seconds > base


# ---------------------------------------------------------------- saves and failures


@pytest.mark.parametrize(
    ("hours", "every", "stall", "save", "restart"),
    [
        (1000, 3600, 60, 60, 2700),
        (64, 3600, 60, 60, 2700),
        (1000, 900, 2, 2, 480),
        (8, 900, 2, 2, 480),
        (3, 900, 2, 2, 480),
    ],
)
def test_goodput_is_that_of_simulated_failures(
    hours: float, every: float, stall: float, save: float, restart: float
) -> None:
    """Hourly saves of 60 s that training waits for, 30 min until a failure is noticed and 15 min to start again; saves
    every 15 min with a wait of 2 s, 3 min and 5 min."""
    rate, interval = 1 / (3600 * hours), every + stall
    chance, kept, passed = random.Random(1), 0.0, 0.0
    for _ in range(20_000):
        life = chance.expovariate(rate)
        kept += max(0, math.floor((life - save) / interval)) * interval
        passed += life + restart
    assert overheads.kept_share(rate, interval, save, restart) == pytest.approx(kept / passed, rel=0.01)


def test_a_failure_loses_half_an_interval_and_the_save_in_flight() -> None:
    operations = overheads.Operations(failures=1e-3)
    costs = overheads.overheads(work(), cluster(), operations, interval=3600.0)
    assert costs.lost == pytest.approx((3600 + costs.stall) / 2 + costs.save, rel=0.01)
    assert costs.between == pytest.approx(1e3 * 86_400 / 16)
    safe = overheads.overheads(work(), cluster(), overheads.Operations(failures=0.0), interval=3600.0)
    assert safe.between == math.inf and safe.goodput == pytest.approx(3600 / (3600 + safe.stall))


def test_a_checkpoint_is_read_once_however_many_replicas_there_are() -> None:
    state = 12 * sizes(LLAMA_7B).total
    operations, instant = overheads.Operations(storage=1e9), cluster(link=math.inf, network=math.inf)
    times = [overheads.resume(work(8, replicas), instant, operations) for replicas in (1, 2, 16, 128)]
    assert times == pytest.approx([state / 1e9] * 4)
    delivered = overheads.resume(work(8, 2), cluster(network=8e9), replace(operations, storage=math.inf))
    assert delivered == pytest.approx(state / 8 / (FITTED.network * 1e9))


def test_overheads_grow_with_what_causes_them() -> None:
    def goodput(interval: float = 1800.0, replicas: int = 16, **changes: Any) -> float:
        operations = replace(overheads.Operations(), **changes)
        return overheads.overheads(work(8, replicas), cluster(), operations, interval=interval).goodput

    assert goodput(failures=0.1) < goodput(failures=0.01) < goodput(failures=0.0) <= 1
    assert goodput(storage=1e8) < goodput(storage=1e9) < goodput(storage=1e11)
    assert goodput(detect=1800.0) < goodput(detect=10.0) and goodput(background=False) < goodput()
    assert goodput(replicas=128) < goodput(replicas=16) and goodput(verify=False) > goodput()
    assert goodput(interval=1e6) < goodput(interval=1800.0) > goodput(interval=1.0)


# ---------------------------------------------------------------- published runs


def test_the_model_is_as_good_as_it_says() -> None:
    fitted = [run for run in published.RUNS if run.fitted]
    found = published.fit(fitted)
    for name in ("products", "throttled", "overlap"):
        assert getattr(found, name) == pytest.approx(getattr(FITTED, name), abs=0.01)
    tested = [abs(each.error) for each in published.compare(published.RUNS) if not each.published.fitted]
    assert len(fitted) == 8 and len(tested) >= 8
    assert len({run.name for run in published.RUNS}) == len(published.RUNS)
    page = " ".join((ROOT / "docs/plan.md").read_text().split())
    said = re.search(r"(\S+)% in the mean, (\S+)% in the median, (\d+)% at worst, of (\d+) runs", page)
    assert said is not None
    average, middle, worst = sum(tested) / len(tested), sorted(tested)[len(tested) // 2], max(tested)
    assert said.groups() == (f"{100 * average:.1f}", f"{100 * middle:.1f}", f"{100 * worst:.0f}", f"{len(tested)}")


def test_published_runs_are_what_their_sources_have() -> None:
    by_name = {(run.source.split()[0], run.name): run for run in published.RUNS}
    for (source, name), tokens in {
        ("fms-fsdp", "Llama 2 7B, 128 A100, HSDP 8, 8192, compiled"): 4550,
        ("torchtitan", "Llama 3 8B, 128 H100, FSDP, 40% recomputed, 16384, compiled"): 6514,
        ("Olmo", "Olmo 3 32B, 1024 H100, HSDP 64, 8192, compiled"): 1960,
    }.items():
        assert by_name[source, name].tokens == tokens
    blog = by_name["PyTorch", "Llama 2 7B, 464 H100, HSDP 8, 8192, compiled"]  # 45% MFU; 9,600 on 96 were 45.5%
    assert blog.tokens == pytest.approx(9600 * 0.45 / 0.455, rel=0.005)
    parameters = {"MPT 1B": 1_315_950_592, "MPT 7B": 6_658_859_008, "MPT 70B": 64_862_437_376}
    shapes = {run.model: run.work.sizes.total for run in published.RUNS}
    assert {name: shapes[name] for name in parameters} == parameters  # as llm-foundry prints them


# ---------------------------------------------------------------- the command


def test_predictions_of_a_run() -> None:
    config = load(str(ROOT / "configs/runs/llama-7b-hsdp.toml"))
    table = predict.predict(config, H100, world=96)
    rows = {row.ranks: row for row in table.predictions}
    assert list(rows) == [8, 16, 32, 64, 96, 128, 256, 512, 1024]
    assert [ranks for ranks, row in rows.items() if not row.as_configured] == [96, 256, 512, 1024]
    assert (rows[8].micro_batches, rows[128].micro_batches, rows[1024].batch) == (16, 1, 2048)
    assert (rows[128].shards, rows[128].replicas) == (8, 16) and all(row.fits for row in rows.values())
    row = rows[128]
    assert row.tokens == pytest.approx(256 * 4096 / 128 / row.step.seconds)
    assert row.mfu == pytest.approx(row.tokens * 46.87e9 / 989e12, rel=1e-3)
    assert row.days == pytest.approx(2e12 / (128 * row.tokens * 86_400) / row.costs.goodput, rel=1e-6)
    goodput = [row.costs.goodput for row in table.predictions if row.as_configured]
    assert goodput == sorted(goodput, reverse=True)
    in_samples = load(str(ROOT / "configs/runs/llama-7b-hsdp.toml"), ["checkpoint.every=256_000 samples"])
    assert predict.predict(in_samples, H100).predictions[0] == table.predictions[0]


def test_a_run_on_other_meshes() -> None:
    path = str(ROOT / "configs/runs/llama-7b-hsdp.toml")
    table = predict.predict(load(path, ["parallel.shard=32", "parallel.recompute=2"]), H100, gpus_per_node=4)
    assert [row.ranks for row in table.predictions] == [32, 64, 128, 256, 512, 1024]
    assert {row.shards for row in table.predictions} == {32}
    job = predict.workload(load(path, ["parallel.recompute=5"]), table.cluster, 8)
    assert job.recompute == 7 / 32 and (job.shards, job.replicas) == (4, 2)
    alone = predict.predict(load(path, ["parallel.shard=1"]), H100).predictions
    assert not any(row.fits for row in alone)  # 108 GB
    odd = predict.predict(load(path), H100, gpus_per_node=6)  # the nearest numbers of whole nodes
    assert [row.ranks for row in odd.predictions] == [6, 18, 30, 66, 126, 258, 510, 1026]
    with pytest.raises(ConfigError, match=r"shards of 32 ranks do not divide the world size 48"):
        predict.predict(load(path, ["parallel.shard=32"]), H100, world=48)


def test_the_command_predicts(lab: Any, run_command: Run) -> None:
    command = ["fsdp_pretrain.cli", "plan", lab.config(), "--predict", "--device", H100]
    shown = run_command(*command, "--world-size", 24, "--network", "50GB")
    assert shown.returncode == 0, shown.stderr
    assert "400 Gb/s from node to node" in shown.stdout and "450 GB/s to a neighbour" in shown.stdout
    assert "Llama 2 7B, 96 H100, HSDP 8" in shown.stdout and "128 A100" not in shown.stdout
    result = json.loads(run_command(*command, "--node-failures", 0, "--storage", "1GB", "--json").stdout)
    assert [row["ranks"] for row in result["predictions"]] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert result["operations"]["storage"] == 1e9 and result["predictions"][0]["costs"]["between"] is None
    rows = result["published"]
    assert len(rows) == len(published.RUNS) and sum(row["fitted"] for row in rows) == 8
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted"] / row["tokens"] - 1) and row["source"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--predict"], ["the speed of a --device is needed", "NVIDIA H100"]),
        (["--predict", "--device", "NVIDIA A9000"], ["what a device 'NVIDIA A9000' can do is not known"]),
        (["train.precision=fp32", "--predict", "--device", H100], ["only the rates of bf16"]),
        (["--predict", "--device", H100, "--node-failures", "nan"], ["--node-failures needs a number from 0 on"]),
        (["--network", "50GB"], ["belong to --predict and --tune"]),
        (["--trials", "2"], ["--trials belongs to --tune"]),
        (["--predict", "--device", H100, "--network", "400Gb"], ["is not a size such as 512MB"]),
        (["--predict", "--device", H100, "model.declared_params=7"], ["model.declared_params = 7, but"]),
    ],
)
def test_predictions_that_are_refused(lab: Any, run_command: Run, arguments: list[str], expected: list[str]) -> None:
    done = run_command("fsdp_pretrain.cli", "plan", lab.config(), *arguments)
    assert done.returncode == 78 and "Traceback" not in done.stderr
    assert all(part in done.stderr for part in expected), done.stderr
