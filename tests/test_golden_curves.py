"""Loss and gradient norm of every step of small runs, as they were recorded: a change of the loop changes no bit.

On another processor or torch release sums are rounded differently: there the curves are near those of a known place,
not equal, until they are recorded there too.

    python tests/test_golden_curves.py         records those of this place: at a new one, with a commit that is known
                                               to be right, and after a change that is meant to change them
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden_curves.json"
GPT = {"family": "gpt", "kv_heads": None, "ffn": None, "positions": 32, "dropout": 0.1}
GLM = {"family": "glm", "kv_heads": None, "vocab": 518, "positions": "rope-2d", "scores": "layer_scaled"}
BLANKS = {"objective": {"kind": "glm", "row": 24, "slots": 2}}
RUNS: dict[str, tuple[int, dict[str, dict[str, Any]], list[str]]] = {
    # name: (ranks, sections, overrides)
    "llama": (1, {}, []),
    "llama-2x2": (4, {}, ["parallel.shard=2", "train.micro_batch=1"]),
    "llama-documents": (1, {}, ["data.attention=document", "data.positions=document", "train.z_loss=1e-4"]),
    "gpt": (1, {"model": GPT}, ["parallel.recompute=1", "optimizer.embedding_shrink=0.1"]),
    "gpt-fp16-2": (2, {"model": GPT}, ["train.precision=fp16", "parallel.shard=1"]),
    "glm": (1, {"model": GLM, "data": BLANKS}, ["train.grad_clip=0.5", "optimizer.curve=linear"]),
}


def place() -> str:
    """What sums are rounded by. The matrix products of torch's x86 wheels are MKL's, which has one path for all of AMD's
    processors, and several for Intel's."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    processor = {key.strip(): value.strip() for key, _, value in lines}
    vendor = processor.get("vendor_id", platform.machine())
    if vendor == "GenuineIntel":
        vendor += " model {model} stepping {stepping}".format_map(processor)
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {vendor}"


@pytest.fixture(scope="module")
def trained(module_lab: Any, helpers: Any) -> Callable[[str], list[list[str]]]:
    """The curve of a run: loss sum and gradient norm of its steps, in hexadecimal."""

    def train(name: str) -> list[list[str]]:
        ranks, sections, overrides = RUNS[name]
        train = {"duration": "8 steps", "micro_batch": 2}
        config = module_lab.config(name, **sections, train=train, checkpoint={"every": "4 steps"})
        module_lab.train(config, *overrides, ranks=ranks)
        return [[loss.hex(), norm.hex()] for _, loss, norm in helpers.losses(module_lab.path / name)]

    return train


@pytest.mark.promise("exact-loss")
@pytest.mark.parametrize("name", RUNS)
def test_every_step_is_what_it_was(trained: Callable[[str], list[list[str]]], name: str) -> None:
    golden, curve = json.loads(GOLDEN.read_text()), trained(name)
    if "GOLDEN_CURVES" in os.environ:
        golden.setdefault(place(), {})[name] = curve
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    if place() in golden:
        assert curve == golden[place()][name]
    known = next(iter(golden.values()))[name]
    near = [pytest.approx([float.fromhex(text) for text in step], rel=2e-4) for step in known]
    assert [[float.fromhex(text) for text in step] for step in curve] == near


if __name__ == "__main__":
    os.environ["GOLDEN_CURVES"] = "record"
    sys.exit(pytest.main(["-q", "-n", "0", __file__]))
