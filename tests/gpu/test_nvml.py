"""NVML reports the state of real GPUs. Needs a driver and the package nvidia-ml-py."""

from __future__ import annotations

import time

import pytest

from fsdp_pretrain.train.device_timing import EnergyCounter
from fsdp_pretrain.watchdog.detectors.nvml import find_reader

pytest.importorskip("pynvml")
torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and -m gpu"),
]


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


def test_the_energy_of_a_gpu() -> None:
    """A busy GPU uses some hundred watts, by its own counter; what was taken is not counted again."""
    counter, square = EnergyCounter(torch.device("cuda", 0)), torch.ones(8192, 8192, device="cuda")
    end = time.monotonic() + 30
    while counter.take() is None and time.monotonic() < end:
        torch.cuda.synchronize()
    begun, used = time.monotonic(), 0
    while time.monotonic() < begun + 6:
        for _ in range(20):
            square @ square
        torch.cuda.synchronize()
        used += counter.take() or 0
    watts = used / 1000 / (time.monotonic() - begun)
    print(f"{watts:.0f} W")
    assert 50 < watts < 2000
