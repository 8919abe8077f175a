"""One small case each of what only slow tests cover: loss scaling in fp16 and an export to Hugging Face.

The third, two nodes, is `test_training.py::test_two_nodes_form_one_mesh`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def fp16(module_lab: Any) -> Path:
    """A run in fp16 of 8 steps whose first loss scale is far too high."""
    scale = {"first": 2.0**22, "window": 3}
    module_lab.train(module_lab.config(train={"precision": "fp16", "duration": "8 steps", "loss_scale": scale}))
    return Path(module_lab.path / "run")


def test_fp16_lowers_its_loss_scale_and_trains(fp16: Path, helpers: Any) -> None:
    records = helpers.metrics(fp16)
    overflows = [record["overflow"] for record in records]
    assert overflows[0] and not all(overflows) and records[-1]["loss_scale"] < 2.0**22
    assert all((record["grad_norm"] is None) == record["overflow"] for record in records)
    assert [record["consumed"] for record in records] == [8 * step for step in range(1, 9)]


def test_an_export_is_the_same_function_in_transformers(
    fp16: Path, tmp_path: Path, run_command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    from fsdp_pretrain import models
    from fsdp_pretrain.checkpoint.loading import Weights, load_rows
    from fsdp_pretrain.checkpoint.store import Store
    from fsdp_pretrain.config.config import load

    export = ("checkpoints", fp16, "export", 8, tmp_path / "hf", "--dtype", "fp32", "--json")
    done = run_command("fsdp_pretrain.cli", *export)
    assert done.returncode == 0 and json.loads(done.stdout)["files"] == 1, done.stderr
    tokens = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(7))
    ours = models.build(load(fp16 / "config.toml").model).to_empty(device="cpu")
    load_rows(Weights(Store(fp16 / "checkpoints").find(8), ours), ours)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
