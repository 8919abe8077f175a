"""The same trainer on one CUDA device: bf16, compiled, flash attention, no host synchronisation, save and resume.

    scripts/test_gpu.sh --only suite

Needs torch 2.11 or later with CUDA, pytest and the base dependencies; neither aim nor lm-eval.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_quickstart import shortened

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and -m gpu"),
]
MEASURED = ["record.statistics_every=1 step"]
ROOT = Path(__file__).resolve().parent.parent.parent


def train(helpers: Any, config: Path, *overrides: str, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_pretrain.train", str(config), *overrides],
        capture_output=True, text=True, cwd="/", env=helpers.environment(**variables), timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def config(module_lab: Any) -> Path:
    """A Llama with heads of 64, wide enough for the fused kernels."""
    path: Path = module_lab.config(
        "gpu",
        model={"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 512},
        data={"sequence_length": 256},
        train={"duration": "30 steps", "global_batch": "16 samples", "micro_batch": 8},
        optimizer={"lr": 3e-3, "min_lr": 3e-4},
    )
    return path


@pytest.fixture(autouse=True)
def _no_graphs_of_others() -> Iterator[None]:
    torch._dynamo.reset()  # of other shapes, in tests that train in this process
    yield


def relative(a: list[tuple[int, float, float]], b: list[tuple[int, float, float]]) -> float:
    """Largest relative difference of two loss curves."""
    assert [x[0] for x in a] == [x[0] for x in b]
    return max(abs(x[1] - y[1]) / abs(y[1]) for x, y in zip(a, b, strict=True))


def test_bf16_learns_and_measures_itself(module_lab: Any, config: Path, helpers: Any) -> None:
    run = module_lab.path / "bf16"
    train(helpers, config, f"run.dir={run}")
    records = helpers.metrics(run)
    assert records[-1]["loss"]["sum"] < 0.8 * records[0]["loss"]["sum"]
    for record in records:
        parts = record["seconds"]
        assert parts["iteration"] > 0 and min(parts.values()) >= 0
        assert parts["iteration"] == pytest.approx(sum(v for k, v in parts.items() if k != "iteration"), rel=1e-3)
    assert 1e6 < records[-1]["memory_bytes"] < torch.cuda.get_device_properties(0).total_memory
    from fsdp_pretrain.hardware import peak_flops

    assert (records[-1]["mfu"] is None) == (peak_flops(torch.cuda.get_device_name(0)) is None)


def test_the_launcher_and_the_doctor(module_lab: Any, config: Path, helpers: Any) -> None:
    run = module_lab.path / "launched"
    one = ["--nproc-per-node", "1"]
    for command in (["launch", *one, str(config), f"run.dir={run}", "watchdog.enabled=true"], ["doctor", *one]):
        done = subprocess.run(
            [sys.executable, "-m", "fsdp_pretrain.cli", *command],
            capture_output=True, text=True, cwd="/", env=helpers.environment(), timeout=140,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert helpers.metrics(run)[-1]["step"] == 30
    assert torch.cuda.get_device_name(0) in done.stdout


@pytest.mark.timeout(400)
def test_the_quickstart_takes_the_gpus_that_there_are(tmp_path: Path, helpers: Any) -> None:
    pytest.importorskip("lm_eval")
    environment = helpers.environment(INSTALL="no", PYTHON=sys.executable)
    script = ["bash", str(shortened(tmp_path))]
    done = subprocess.run(script, capture_output=True, text=True, cwd="/", env=environment, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    count = torch.cuda.device_count()
    assert f"== train on {4 if count > 3 else min(count, 2)} rank(s)" in done.stdout
    (environment_file,) = tmp_path.glob("runs/quickstart/run/segments/*/environment.json")
    assert torch.cuda.get_device_name(0) in environment_file.read_text()


def test_fp32_is_the_curve_of_the_cpu(module_lab: Any, config: Path, helpers: Any) -> None:
    on_gpu, on_cpu = module_lab.path / "fp32", module_lab.path / "cpu"
    shorter = ("train.duration=8 steps", "optimizer.decay=30 steps")
    train(helpers, config, f"run.dir={on_gpu}", "train.precision=fp32", *shorter)
    train(helpers, config, f"run.dir={on_cpu}", *shorter, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="8")
    assert relative(helpers.losses(on_gpu), helpers.losses(on_cpu)) < 1e-4
    digests = [[record["data_digest"] for record in helpers.metrics(run)] for run in (on_gpu, on_cpu)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    "overrides",
    [
        ["watchdog.enabled=true"],  # compiled, with its hooks
        ["parallel.recompute=feed-forward"],
        ["parallel.recompute=2", "parallel.reshard_after_forward=false"],
    ],
    ids=lambda overrides: "+".join(o.partition(".")[2] for o in overrides),
)
def test_variants_give_the_same_curve(module_lab: Any, config: Path, helpers: Any, overrides: list[str]) -> None:
    reference = module_lab.path / "reference"
    if not reference.exists():
        train(helpers, config, f"run.dir={reference}", "parallel.compile=false")
    run = module_lab.path / "-".join(o.replace("=", "_") for o in overrides)
    train(helpers, config, f"run.dir={run}", *overrides)
    assert relative(helpers.losses(run), helpers.losses(reference)) < 0.02


def test_save_and_resume(module_lab: Any, config: Path, helpers: Any) -> None:
    """Not bitwise: flash attention's backward pass adds in no fixed order."""
    whole, parts = module_lab.path / "whole", module_lab.path / "parts"
    train(helpers, config, f"run.dir={whole}")
    train(helpers, config, f"run.dir={parts}", "train.duration=10 steps", "optimizer.decay=30 steps")
    train(helpers, config, f"run.dir={parts}", "parallel.compile=false")  # names in the checkpoint are the same
    assert relative(helpers.losses(parts), helpers.losses(whole)) < 0.02
    (resume,) = helpers.journal(parts, "resume")
    assert resume["step"] == 10


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    from fsdp_pretrain.config.sections import ParallelSection
    from fsdp_pretrain.parallel import mesh

    with mesh.connect(ParallelSection()) as connected:
        yield connected


@pytest.mark.promise("no-waiting")
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_never_waits_for_the_device(config: Path, world: Any, kind: str) -> None:
    from fsdp_pretrain.bench import steps
    from fsdp_pretrain.config.config import load

    trainer = steps.build(
        load(config, ["train.micro_batch=4", "data.attention=document", f"optimizer.kind={kind}", *MEASURED]), world
    )
    for _ in range(3):
        trainer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            trainer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    records = [record for _, record in trainer.read(keep=0)]
    assert [record.step for record in records] == list(range(1, 9))
    assert all((record.loss.sum or 0) > 0 for record in records)


@pytest.mark.promise("repeated-gradients")
@pytest.mark.parametrize("attention", ["causal", "document"])
def test_a_repeated_micro_batch_has_the_same_bits(config: Path, world: Any, attention: str) -> None:
    """The kernels of attention's backward pass, which add in any order in training, add in a fixed one."""
    from fsdp_pretrain.bench import steps
    from fsdp_pretrain.config.config import load
    from fsdp_pretrain.heartbeat import Heartbeat
    from fsdp_pretrain.run.recorder import SilentRecorder
    from fsdp_pretrain.train.observer import AgreedActions
    from fsdp_pretrain.train.repeat_check import RepeatCheck

    settings = load(config, [f"data.attention={attention}"])
    trainer = steps.build(settings, world)
    parts = (trainer.model, trainer.optimizer, trainer.scaler, SilentRecorder(), Heartbeat())
    check = RepeatCheck(settings, world, *parts)
    trainer.observers += (check,)
    record: Any = None  # is not looked at
    for step in range(1, 21):
        trainer.step()
        check.between_steps(AgreedActions(step=step, repeat=True))
        assert check.judge(record) is None


def test_the_state_is_copied_into_pinned_memory_of_its_size(config: Path, world: Any) -> None:
    """The same memory every time, and the copy does not change when training continues at once."""
    from fsdp_pretrain.bench import steps
    from fsdp_pretrain.checkpoint.async_save import Stager
    from fsdp_pretrain.checkpoint.loading import state_dict
    from fsdp_pretrain.config.config import load

    trainer = steps.build(load(config), world)
    stager, addresses = Stager(world.device), set()
    for _ in range(3):
        trainer.step()
        live = state_dict(trainer.model, trainer.optimizer)["model"]
        copy = stager.copy(state_dict(trainer.model, trainer.optimizer))["model"]
        expected = {name: tensor.to_local().cpu() for name, tensor in live.items()}
        trainer.step()
        for name, tensor in copy.items():
            local = tensor.to_local()
            assert local.equal(expected[name]) and not local.equal(live[name].to_local().cpu()), name
            assert local.is_pinned() or not local.nbytes, name
            assert local.untyped_storage().nbytes() == local.nbytes, name
        addresses.add(tuple(tensor.to_local().data_ptr() for tensor in copy.values()))
    list(trainer.read(keep=0))
    assert len(addresses) == 1


def test_a_save_beside_training_does_not_wait_for_the_device(config: Path, world: Any, tmp_path: Path) -> None:
    from fsdp_pretrain.bench import steps
    from fsdp_pretrain.checkpoint import dcp
    from fsdp_pretrain.checkpoint.async_save import Stager, in_background
    from fsdp_pretrain.checkpoint.loading import state_dict
    from fsdp_pretrain.checkpoint.manager import make_facts
    from fsdp_pretrain.checkpoint.store import Store
    from fsdp_pretrain.config.config import load

    trainer = steps.build(load(config), world)
    trainer.step()
    list(trainer.read(keep=0))
    copy = Stager(world.device).copy(state_dict(trainer.model, trainer.optimizer))
    writers, store, busy = world.with_host_group(world.new_group()), Store(tmp_path / "checkpoints"), torch.cuda.Event()
    torch.cuda._sleep(40_000_000_000)  # cycles, 20 seconds and more
    busy.record()
    facts = make_facts(trainer.config, world, trainer.state)
    contents = {"state": copy, "train_state": "{}\n", "config": ""}
    pending = in_background(lambda: dcp.save(writers, store, facts, **contents))
    assert pending.result(120).checkpoint.verified
    assert not busy.query()
    torch.cuda.synchronize()


@pytest.mark.parametrize(("size", "window"), [(64, None), (80, None), (96, None), (64, 40), (80, 200)])
def test_document_attention_skips_masked_blocks_with_any_head_size(size: int, window: int | None) -> None:
    from fsdp_pretrain.models.attention import Attention
    from fsdp_pretrain.models.masks import Slots, block_mask, dense_mask

    torch.manual_seed(0)
    slots = Slots(torch.tensor([[100, 412, 0], [256, 200, 56]], device="cuda"))
    layer = Attention(4 * size, heads=4, kv_heads=2, head_dim=size, scale=0.2).to("cuda")
    x = torch.randn(2, 512, 4 * size, device="cuda", requires_grad=True)
    results = []
    for mask in (block_mask(slots, 512, window), dense_mask(slots, 512, x.device, window)):
        out = layer(x, mask, None)
        results.append((out, *torch.autograd.grad(out.square().mean(), [x, *layer.parameters()])))
    for blocks, dense in zip(*results, strict=True):
        torch.testing.assert_close(blocks, dense, rtol=1e-2, atol=1e-4)


def test_the_compiled_loss_is_the_eager_one() -> None:
    from fsdp_pretrain.models.loss import compiled_kernels, token_losses

    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(2, 512, 256, device="cuda", generator=generator).requires_grad_()
    weight = (torch.randn(70_000, 256, device="cuda", generator=generator) * 0.02).requires_grad_()  # several chunks
    labels = torch.randint(70_000, (2, 512), device="cuda", generator=generator)
    found = []
    for kernels in (None, compiled_kernels()):
        losses, _ = token_losses(hidden, weight, labels, kernels)
        found.append((losses, *torch.autograd.grad(losses.mean(), (hidden, weight))))
    for ours, other in zip(*found, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        (
            {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128_256},
            ["data.sequence_length=4096", "train.micro_batch=2", "parallel.recompute=1"],
        ),
        (
            {"family": "gpt", "layers": 24, "hidden": 1024, "heads": 16, "kv_heads": None, "ffn": 4096,
             "positions": 2048, "vocab": 50_304, "dropout": 0.1},
            ["data.sequence_length=2048", "train.micro_batch=8", "train.global_batch=16 samples"],
        ),
    ],
    ids=["recomputed", "gpt-accumulated"],
)  # fmt: skip
def test_planned_memory_is_what_is_allocated(
    module_lab: Any, world: Any, model: dict[str, Any], overrides: list[str]
) -> None:
    from fsdp_pretrain.bench import steps
    from fsdp_pretrain.config.config import load
    from fsdp_pretrain.plan import memory

    path = module_lab.config("planned", model=model, parallel={"shard": 1})
    micro = int(next(text for text in overrides if "micro_batch" in text).partition("=")[2])
    # Compiled blocks need less than the estimate.
    loaded = load(
        path, ["train.precision=bf16", "parallel.compile=false", f"train.global_batch={micro} samples", *overrides]
    )
    passes = loaded.schedule.batch.full // micro
    expected = memory.estimate(loaded, shards=1, micro_batches=passes, device=world.device)
    gc.collect()  # left over from earlier tests
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    trainer = steps.build(loaded, world)
    for _ in range(3):  # the optimiser has moments from the second step on
        trainer.step()
    list(trainer.read(keep=0))
    torch.cuda.reset_peak_memory_stats()
    trainer.step()
    torch.cuda.synchronize()
    assert expected.total == pytest.approx(torch.cuda.max_memory_allocated() - base, rel=0.1)


def test_float8_trains_like_bf16(module_lab: Any, config: Path, helpers: Any) -> None:
    pytest.importorskip("torchao")
    curves = {}
    for precision in ("bf16", "bf16+fp8"):
        run = module_lab.path / precision
        train(helpers, config, f"run.dir={run}", f"train.precision='{precision}'")
        curves[precision] = helpers.losses(run)
    assert 0 < relative(curves["bf16+fp8"], curves["bf16"]) < 0.02
