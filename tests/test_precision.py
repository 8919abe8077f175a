"""Loss scaling, loss weighting and gradient shrink: real ranks against closed forms and plain single-process torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_pretrain import models
from fsdp_pretrain.checkpoint.loading import Weights
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.sections import LossScaleSection
from fsdp_pretrain.data.packing.opening import open_packer
from fsdp_pretrain.parallel.fsdp import materialise
from fsdp_pretrain.parallel.loss_scaler import LossScaler

pytestmark = pytest.mark.slow  # the default suite has no room for it


# ---------------------------------------------------------------------- the law of the scale


def scales(section: LossScaleSection, events: str, state: list[float] | None = None) -> list[float]:
    """The scale after each event: O an overflow, . a good step."""
    scaler, seen = LossScaler(section, torch.device("cpu"), state), []
    for event in events:
        scaler.advance(torch.tensor(float(event == "O")))
        seen.append(float(scaler.scale))
    return seen


def test_the_scale_of_a_published_log() -> None:
    """tr8b: hysteresis was full before the log; the good step did not refill it, or the sixth value would be 2^17."""
    law = LossScaleSection(first=2.0**20, window=500)
    assert scales(law, "OOOO.OO") == [2.0**n for n in (20, 19, 18, 17, 17, 16, 15)]
    used_up = scales(law, "OOOO.OO", [2.0**20, 1.0, 0.0])
    assert used_up == [2.0**n for n in (19, 18, 17, 16, 16, 15, 14)]


def deepspeed(law: LossScaleSection, events: str) -> list[float]:
    """The law in DeepSpeed's terms: iterations since the last overflow, not consecutive ones."""
    scale, left, last, seen = law.first, 2, -1, []
    for now, event in enumerate(events):
        if event == "O":
            if left == 1:
                scale = max(scale / 2, 1.0)
            else:
                left -= 1
            last = now
        elif (now - last) % law.window == 0:
            left, scale = 2, scale * 2
        seen.append(scale)
    return seen


@settings(max_examples=30, deadline=None)
@given(st.text("O...", max_size=60), st.integers(1, 7))
def test_the_law_is_the_one_of_deepspeed(events: str, window: int) -> None:
    law = LossScaleSection(first=8.0, window=window)
    assert scales(law, events) == deepspeed(law, events)


# ---------------------------------------------------------------------- fp16 runs


def scaling(records: list[dict[str, Any]]) -> list[tuple[int, float, bool]]:
    return [(record["step"], record["loss_scale"], record["overflow"]) for record in records]


@pytest.fixture(scope="module")
def fp16(module_lab: Any) -> Path:
    """A scale that starts far too high and then rises every three good steps until the next overflow."""
    path: Path = module_lab.config(
        "fp16",
        train={
            "precision": "fp16",
            "duration": "20 steps",
            "micro_batch": 2,
            "loss_scale": {"first": 2.0**22, "window": 3},
        },
        checkpoint={"every": "1000 steps"},
        parallel={"shard": 1},
    )
    return path


@pytest.fixture(scope="module")
def curves(module_lab: Any, fp16: Path, helpers: Any) -> dict[str, list[dict[str, Any]]]:
    """The same run on one, two and four ranks, and in fp32."""
    found = {}
    for name, ranks, overrides in (
        ("one", 1, []),
        ("two", 2, ["parallel.shard=2"]),
        ("four", 4, ["parallel.shard=2"]),
        ("fp32", 1, ["train.precision=fp32", "train.duration=4 steps"]),
    ):
        module_lab.train(fp16, f"run.dir={module_lab.path / name}", *overrides, ranks=ranks)
        found[name] = helpers.metrics(module_lab.path / name)
    return found


def test_the_same_steps_are_skipped_on_every_mesh(curves: dict[str, Any]) -> None:
    events = scaling(curves["one"])
    skipped = [step for step, _, overflow in events if overflow]
    assert scaling(curves["two"]) == events == scaling(curves["four"])
    assert skipped[0] == 1 and len(skipped) < 15 and skipped != list(range(1, len(skipped) + 1))  # and again later
    assert [scale for _, scale, _ in events][1:] == deepspeed(
        LossScaleSection(first=2.0**22, window=3), "".join("O" if overflow else "." for *_, overflow in events[:-1])
    )
    for name in ("one", "two", "four"):
        for record, other in zip(curves[name], curves["one"], strict=True):
            assert (record["grad_norm"] is None) == record["overflow"]
            assert record["consumed"] == record["step"] * 8  # skipped steps advance all schedules
            assert record["loss"]["sum"] == pytest.approx(other["loss"]["sum"], rel=2e-3)


def test_the_norm_is_that_of_unscaled_gradients(curves: dict[str, Any]) -> None:
    """Parameters do not change until the first step that is not skipped; its batch in fp32 gives the same norm."""
    first = next(record for record in curves["one"] if not record["overflow"])
    assert first["grad_norm"] < 10
    assert first["clip"] == pytest.approx(min(1.0, 1 / first["grad_norm"]), rel=1e-4)
    assert curves["fp32"][0]["loss_scale"] is None and curves["fp32"][0]["overflow"] is False
    assert curves["one"][0]["loss"]["sum"] == pytest.approx(curves["fp32"][0]["loss"]["sum"], rel=1e-3)


@pytest.mark.promise("bitwise-resume")
def test_a_resume_continues_the_scale_to_the_bit(module_lab: Any, fp16: Path, curves: Any, helpers: Any) -> None:
    """Stopped inside a window, with hysteresis used up."""
    run = module_lab.path / "parts"
    module_lab.train(fp16, f"run.dir={run}", "optimizer.decay=20 steps", "train.duration=12 steps")
    module_lab.train(fp16, f"run.dir={run}", "optimizer.decay=20 steps")
    whole = curves["one"]
    parts = helpers.metrics(run)
    assert scaling(parts) == scaling(whole) and helpers.losses(run) == helpers.losses(module_lab.path / "one")


def test_a_change_to_fp16_starts_the_scale_and_says_so(module_lab: Any, fp16: Path, curves: Any, helpers: Any) -> None:
    del curves
    run = module_lab.path / "fp32"
    longer = ("train.duration=6 steps", "train.loss_scale.first=1024")
    module_lab.train(fp16, f"run.dir={run}", *longer, flags=("--allow", "train", "--allow", "optimizer.decay"))
    assert "it has no loss scale: that starts fresh" in helpers.journal(run, "resume")[-1]["text"]
    assert [record["loss_scale"] for record in helpers.metrics(run)[4:]] == [1024.0] * 2


def test_overflowing_at_the_smallest_scale_stops_with_93(lab: Any, helpers: Any, fault: Any) -> None:
    fault("gradient", rank=1, steps=[1], on=True)
    config = lab.config(train={"precision": "fp16", "loss_scale": {"first": 1.0}})
    output = lab.train(config, ranks=2, expect=93)
    assert "10 steps in a row overflowed at the smallest loss scale" in output and output.count("error:") == 1
    assert len(helpers.metrics(lab.path / "run")) == 10
    assert not list((lab.path / "run/checkpoints").glob("step-*"))


# ---------------------------------------------------------------------- exact steps


INPUT_ONLY = "timeline=[{at='0 steps',optimizer={embedding_shrink={to=1.0,over='4 steps'}}}]"
CASES: dict[str, list[str]] = {
    "z": ["train.z_loss=0.01"],
    "shrink-both": ["optimizer.embedding_shrink=0.25", "model.tied_head=true"],
    "shrink-input": [
        *("optimizer.embedding_shrink=0.25", "optimizer.shrink_paths='input'", "model.tied_head=true"),
        INPUT_ONLY,
    ],
}


@pytest.mark.shows("A3")
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_plain_torch(module_lab: Any, helpers: Any, case: str) -> None:
    """Four steps: loss, norm and parameters, in one process with plain cross-entropy, clipping and AdamW; samples have
    different numbers of targets."""
    path = module_lab.config(
        case,
        data={"sequence_length": 16, "loss_across_documents": False},
        train={"grad_clip": 0.5, "duration": "4 steps", "micro_batch": 1},
        optimizer={"curve": "constant", "warmup": "0 steps", "eps": 1e-6},
        checkpoint={"every": "1 step", "keep_last": 9},
        parallel={"shard": 2},
    )
    module_lab.train(path, *CASES[case], ranks=4)
    config, run = load(path, CASES[case]), module_lab.path / case
    records, packer = helpers.metrics(run), open_packer(config)
    model = materialise(models.build(config.model), config.run.seed, torch.device("cpu"))
    spared = [p for name, p in model.named_parameters() if "norm" in name]
    decaying = [p for name, p in model.named_parameters() if "norm" not in name]
    section = config.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": decaying, "weight_decay": section.weight_decay}, {"params": spared, "weight_decay": 0.0}],
        lr=section.lr, betas=section.betas, eps=section.eps,
    )  # fmt: skip
    for step, record in enumerate(records, 1):
        tokens = torch.from_numpy(packer.pack(8 * (step - 1), 8).tokens).long()
        labels = tokens[:, 1:].masked_fill(tokens[:, :-1] == packer.eod, -100)
        factor = {"shrink-both": 0.25, "shrink-input": 0.25 + 0.75 * step / 4}.get(case, 1.0)

        def shrunk(x: torch.Tensor, factor: float = factor) -> torch.Tensor:
            return x * factor + x.detach() * (1 - factor)

        hidden = shrunk(F.embedding(tokens[:, :-1], model.embedding.weight))
        for block in model.blocks:
            hidden = block(hidden, None, *model.context(torch.arange(16)))
        head = model.embedding.weight if model.head is None else model.head.weight
        logits = model.norm(hidden) @ (shrunk(head) if case == "shrink-both" else head).T
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(8, 16)
        learned = labels != -100
        counts = learned.sum(1)
        means = (losses.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum()
        penalty = 0.01 * (logits.logsumexp(-1).square() * learned).sum() / counts.sum()
        mean = losses.sum() / counts.sum()
        (mean + penalty if case == "z" else mean).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert record["loss"] == {"sum": pytest.approx(losses.sum().item(), rel=1e-5), "count": counts.sum()}
        sequence = record["loss_sequence"]
        assert sequence["sum"] / sequence["count"] == pytest.approx(means.item(), rel=1e-5)
        assert sequence["count"] == (counts > 0).sum() and len(counts.unique()) > 1
        if case == "z":
            assert record["z_loss"]["sum"] / record["z_loss"]["count"] == pytest.approx(penalty.item(), rel=1e-5)
        else:
            assert record["z_loss"] is None
        assert record["ramps"].get("embedding_shrink", 1.0) == pytest.approx(factor)
        ours = Weights(Store(run / "checkpoints").find(step), model)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(ours[name], parameter.detach(), rtol=1e-4, atol=2e-5)
