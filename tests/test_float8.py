"""float8 products: refusals that explain. What they train to is in tests/gpu."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from processes import CLI, Run

from fsdp_pretrain import models
from fsdp_pretrain.config.config import load
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.parallel.float8 import check_sizes, use_float8

FLOAT8 = "train.precision='bf16+fp8'"


@pytest.mark.parametrize(
    ("overrides", "device", "expected"),
    [
        ([], "cpu", "needs a GPU with float8 (NVIDIA Ada, Hopper or later), which cpu is not"),
        ([], "NVIDIA A100-SXM4-80GB", "which NVIDIA A100-SXM4-80GB is not"),
        (["model.ffn=72"], "NVIDIA H100 80GB HBM3", "multiples of 16, unlike those of mlp.gate (32 to 72)"),
    ],
)
def test_a_plan_refuses_it_where_it_cannot_be(
    lab: Any, run_command: Run, overrides: list[str], device: str, expected: str
) -> None:
    done = run_command(CLI, "plan", lab.config(), FLOAT8, *overrides, "--world-size", 2, "--device", device)
    assert done.returncode == 78 and expected in done.stderr and "Traceback" not in done.stderr


def test_a_plan_allows_it_where_it_can_be(lab: Any, run_command: Run) -> None:
    device = ("--world-size", 2, "--device", "NVIDIA H100 80GB HBM3")
    found = [
        run_command(CLI, "plan", lab.config(), f"train.precision={each}", *device) for each in ("bf16+fp8", "bf16")
    ]
    assert [done.returncode for done in found] == [0, 0]
    rows = [[line for line in done.stdout.splitlines() if not line.startswith("  time ")] for done in found]
    assert rows[0] == rows[1]  # memory is that of bf16; the predicted time is not


def test_a_start_on_a_cpu_is_refused(lab: Any) -> None:
    output = lab.train(lab.config(train={"precision": "bf16+fp8"}), expect=78)
    assert "needs a GPU with float8" in output


def test_torchao_is_asked_for(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("torchao") is not None:
        monkeypatch.setitem(sys.modules, "torchao.float8", None)
    model = models.build(load(lab.config(), []).model)
    check_sizes(model)
    with pytest.raises(ConfigError, match="needs torchao"):
        use_float8(model, torch.device("cpu"), emulate=True)
