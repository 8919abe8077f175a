"""NVML reports the state of real GPUs. Needs a driver and the package nvidia-ml-py."""

from __future__ import annotations

import time

import pytest

from fsdp_pretrain.watchdog.detectors.nvml import find_reader

pytest.importorskip("pynvml")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_state_of_the_gpus() -> None:
    """As the watchdog asks, beside a busy GPU."""
    read, square = find_reader("nvml"), torch.ones(4096, 4096, device="cuda")
    assert read is not None
    end, answers = time.monotonic() + 3, []
    while time.monotonic() < end:
        for _ in range(50):
            square @ square
        torch.cuda.synchronize()
        answers.append(read())
    state = answers[-1][0]
    print(answers[-1])
    assert len(answers[-1]) >= torch.cuda.device_count()
    assert state.lost is None and state.xids == [] and not state.remap_failed
    assert state.throttle is not None and state.name
