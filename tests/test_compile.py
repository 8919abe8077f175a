"""Compiled blocks: one graph for all blocks of a family, whatever a run changes on its way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from random_heldout import random_samples
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from fsdp_pretrain import models
from fsdp_pretrain.bench import steps
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.model import AnyModel
from fsdp_pretrain.config.sections import ParallelSection, Recompute
from fsdp_pretrain.data.packing.loader import StepBatch
from fsdp_pretrain.heartbeat import Heartbeat, Phase
from fsdp_pretrain.models.masks import Slots
from fsdp_pretrain.parallel import mesh
from fsdp_pretrain.parallel.fsdp import materialise

SHAPE = {"layers": 3, "hidden": 48, "heads": 6, "vocab": 97}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 2, "ffn": 80},
    "olmo3": {"family": "olmo3", "ffn": 80, "sliding_window": 8, "sliding_window_pattern": 3},
    "gpt": {"family": "gpt", "positions": 32},
    "gpt-dropout": {"family": "gpt", "positions": 32, "dropout": 0.1},
    "alibi": {"family": "gpt", "positions": "alibi", "embedding_norm": True},
    "glm": {"family": "glm", "positions": "rope-2d"},
    "glm-layer-scaled": {"family": "glm", "scores": "layer_scaled"},
}


@pytest.fixture(autouse=True)
def _no_graphs_of_others() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch(step: int, *, masked: bool) -> tuple[Tensor, Tensor, Slots | None]:
    """Tokens and labels [2, 32], and documents whose lengths and prefixes differ from step to step."""
    tokens = torch.randint(97, (2, 33), generator=torch.Generator().manual_seed(step))
    if not masked:
        return tokens[:, :-1], tokens[:, 1:], None
    lengths = torch.tensor([[5 + step, 27 - step, 0], [10, 11 - step, 11 + step]], dtype=torch.int32)
    prefix = torch.tensor([[step, 0, 0], [0, 2, step]], dtype=torch.int32)
    return tokens[:, :-1], tokens[:, 1:], Slots(lengths, prefix)


@pytest.mark.parametrize(
    ("family", "masked"),
    [
        *((name, True) for name in FAMILIES),
        *(pytest.param(name, False, marks=[] if name == "olmo3" else pytest.mark.slow) for name in FAMILIES),
    ],
)
def test_all_blocks_are_one_graph_through_a_run(family: str, masked: bool) -> None:
    """Neither layers, nor document lengths, nor the embedding's shrink need another; a break would be an error."""
    recompute: Recompute = "feed-forward" if masked else 0
    config: AnyModel = TypeAdapter(AnyModel).validate_python({**SHAPE, **FAMILIES[family]})
    model = materialise(models.build(config), 1, torch.device("cpu"))
    model.set_recompute(recompute)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    for step in range(5):
        model.embedding.shrink = 1 - step / 10
        tokens, labels, slots = batch(step, masked=masked)
        losses = model(tokens, labels, slots)
        losses.mean().backward()
    assert losses.isfinite().all()
    kinds = (
        2 if config.family == "olmo3" and not masked else 1
    )  # without documents only blocks with a window have a mask
    layers = 3 if config.family == "glm" and config.scores == "layer_scaled" else kinds
    assert 1 <= counter.frame_count <= layers


class Watched(Heartbeat):
    """A heartbeat with which the steps of a rank are timed, by hooks on its blocks; keeps the phases of each step."""

    def __init__(self) -> None:
        self.phases = list[list[Phase]]()

    def step(self, step: int) -> None:
        self.phases.append([])

    def beat(self, phase: Phase) -> None:
        if self.phases:
            self.phases[-1].append(phase)


def test_compiled_blocks_train_as_others_under_fsdp_and_its_hooks(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.compile  # of blocks and of the loss
    monkeypatch.setattr(torch, "compile", lambda function, **how: plain(function, backend="aot_eager", **how))
    curves, heldout, measured = [], {"loss_on": [{"name": "random", "path": "none"}], "loss_every": "2 steps"}, []
    with mesh.connect(ParallelSection()) as world:
        for compiled, measures in (("true", True), ("true", False), ("false", True)):
            torch._dynamo.reset()
            given = [f"parallel.compile={compiled}", "parallel.recompute=feed-forward"]
            config = load(lab.config(eval=heldout), given)
            loss = random_samples(config, world, steps.RandomSteps(config, world)) if measures else []
            trainer = steps.build(config, world, Watched(), heldout=loss)
            for _ in range(3):
                trainer.step()
            records = [record for _, record in trainer.read(keep=0)]
            curves.append([record.loss.sum for record in records])
            measured += [record.heldout["random"].sum for record in records if record.heldout]
    assert len(curves[0]) == 3 and curves[0] == pytest.approx(curves[2], rel=1e-4)
    assert curves[0] == curves[1]  # a measurement before and between steps changes no graph of theirs
    assert measured == [pytest.approx(measured[1], rel=1e-4), measured[1]]


@pytest.mark.parametrize(("compiled", "staged"), [(True, True), (True, False), (False, True)])
def test_the_first_pass_over_samples_of_a_length_has_the_deadline_of_loading(
    lab: Any, monkeypatch: pytest.MonkeyPatch, compiled: bool, staged: bool
) -> None:
    """It may compile for minutes, which is no hang; every other pass has the deadline of steps."""
    plain, widths, heartbeat = torch.compile, iter([8, 8, 16, 8]), Watched()
    monkeypatch.setattr(torch, "compile", lambda function, **how: plain(function, backend="eager", **how))

    class Growing(steps.RandomSteps):
        """The samples of each step are cut to the next of the widths."""

        def __next__(self) -> StepBatch:
            batch, width = super().__next__(), next(widths)
            for micro in batch.micro:
                micro.tokens = micro.tokens[:, : width + 1]
            batch.targets = sum(micro.tokens[:, 1:].numel() for micro in batch.micro)
            return batch

    monkeypatch.setattr(steps, "RandomSteps", Growing)
    stages = [{"length": 8, "until": "8 samples"}] if staged else []
    path = lab.config(
        data={"sequence_length": 16, "stages": stages}, model={"layers": 1}, train={"global_batch": "4 samples"}
    )
    with mesh.connect(ParallelSection()) as world:
        config = load(path, [f"parallel.compile={str(compiled).lower()}", "train.micro_batch=2"])
        trainer = steps.build(config, world, heartbeat)
        for _ in range(4):
            trainer.step()
    passes = [[phase for phase in step if phase in (Phase.LOAD, Phase.COMPUTE)][:2] for step in heartbeat.phases]
    again, first = [Phase.COMPUTE, Phase.COMPUTE], [Phase.LOAD, Phase.COMPUTE]
    assert passes == ([first, again, first, again] if compiled and staged else [again] * 4)


def test_a_graph_for_every_layer_is_no_reason_to_stop(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch ends the process where a code has more graphs than its limit, eight by default."""
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: plain(function, backend="eager", **how))
    shape = "family='glm', layers=10, hidden=48, heads=6, vocab=512, scores='layer_scaled', positions='rope'"
    config = load(
        lab.config(), [f"model={{{shape}}}", "parallel.compile=true", "data.stages=[{length=16, until='80 samples'}]"]
    )
    with torch._dynamo.config.patch(recompile_limit=8), mesh.connect(ParallelSection()) as world:
        trainer = steps.build(config, world, Watched())
        trainer.step()
        assert [record.step for _, record in trainer.read(keep=0)] == [1]
