"""The memory that `plan` names against whole steps of shipped models, of any number of ranks.

The deepest are cut to four layers, but for one: the memory of a layer is the same in all. `python tests/fake_step.py`
prints those of all layers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_step import RECOMPUTED, SHAPES, Shape, peak, planned

from fsdp_pretrain.bench.fake_ranks import NODE

LAYERS = "model.layers=3"
WHOLE = "7B, two micro-batches, recomputed"
"""The shape that has all of its layers."""
FEWER = [
    Shape("7B of three layers, two, recomputed", "runs/llama-7b-hsdp.toml", 2, (*RECOMPUTED, LAYERS), nodes=64),
    Shape("Qwen3 of three layers, two", "models/qwen3-0.6b.toml", 2, (LAYERS,)),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "shape",
    [FEWER[0], *(pytest.param(shape, marks=pytest.mark.slow) for shape in [*FEWER[1:], *SHAPES])],
    ids=lambda shape: shape.name,
)
def test_a_step_takes_the_memory_that_is_planned(tmp_path: Path, shape: Shape) -> None:
    """Exactly, but for what kernels need while they run."""
    config = shape.config(tmp_path)
    if config.model.layers > 4 and shape.name != WHOLE:
        config = replace(shape, overrides=(*shape.overrides, "model.layers=4")).config(tmp_path)
    found = peak(config, shape.nodes * NODE, shape.micro_batches)
    assert planned(config, shape.micro_batches) == pytest.approx(found, rel=0.01)
