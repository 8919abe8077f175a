"""NVML reports the state of real GPUs. Needs a driver and the package nvidia-ml-py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

pytest.importorskip("pynvml")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_state_of_the_gpus(helpers: Any) -> None:
    """Through the helper process, as the watchdog asks, beside a busy GPU."""
    helper = subprocess.Popen(
        [sys.executable, "-m", "fsdp_pretrain.watchdog.detectors.nvml", "nvml"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env=helpers.environment(),
    )
    assert helper.stdin is not None and helper.stdout is not None
    square = torch.ones(4096, 4096, device="cuda")
    end, answers = time.monotonic() + 3, []
    while time.monotonic() < end:
        for _ in range(50):
            square @ square
        torch.cuda.synchronize()
        print(file=helper.stdin, flush=True)
        answers.append(json.loads(helper.stdout.readline()))
    helper.stdin.close()
    assert helper.wait(10) == 0
    state = answers[-1]["devices"][0]
    print(answers[-1])
    assert len(answers[-1]["devices"]) >= torch.cuda.device_count()
    assert state["lost"] is None and state["xids"] == [] and not state["remap_failed"]
    assert state["clock"] > 500 and state["power"] > 50 and state["busy"] > 0.3 and 15 < state["temperature"] < 95
