"""GPUs reported by a file, and a driver that hangs."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sight import until

from fsdp_pretrain.watchdog.detectors.gpu import GpuDetector
from fsdp_pretrain.watchdog.notify.alarms import Alarm, Alarms
from fsdp_pretrain.watchdog.probes.periodic import THREADS

pytestmark = pytest.mark.quick
HEALTHY = {
    "name": "a GPU",
    "recovery": 0,
    "ecc": 0,
    "throttle": 0x4,
    "nvlink": [18, 3],
}


class Machine:
    """Eight GPUs in a file; the test controls the clock."""

    def __init__(self, path: Path) -> None:
        self.path, self.changes = path / "gpus.json", list[Alarm]()
        self.alarms = Alarms(path / "alarms.jsonl", lambda alarm: self.changes.append(alarm))
        self.devices: list[dict[str, Any]] = [{"index": n, **HEALTHY} for n in range(8)]
        self.content: str | None = None
        self.now = 1000.0
        self.left = set(threading.enumerate())  # threads that are not waited for
        provider = f"file:{self.path}"
        self.watch = GpuDetector(self.alarms, host="node-7", expected=0, provider=provider)

    def look(self, count: int = 1, *, answers: bool = True) -> None:
        """Write the file, and let the detector check it `count` times."""
        if self.path.is_file():
            self.path.write_text(self.content or json.dumps({"devices": self.devices}))
        for _ in range(count):
            self.now += 15
            self.watch.tick(self.now)
            if answers:
                until(self._answered, what="an answer", every=0.002)
                self.watch.tick(self.now)

    def _answered(self) -> bool:
        """Whether no look is under way, but for those that were left behind."""
        return not any(thread.name.startswith(THREADS) for thread in set(threading.enumerate()) - self.left)

    def transitions(self) -> list[tuple[str, str, str]]:
        return [(alarm.key, alarm.severity.name, alarm.state) for alarm in self.changes]


@pytest.fixture
def machine(tmp_path: Path) -> Any:
    made = Machine(tmp_path)
    made.path.touch()
    return made


def set_device(**changes: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda devices: devices[3].update(changes)


@pytest.mark.shows("A9", "A32", "F45")
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda devices: devices.pop(), "7 of 8 GPUs"),
        (set_device(lost="GPU is lost"), "GPU 3: lost"),
        (set_device(xids=[31, 79]), "XID 79"),
        (set_device(recovery=1), "requests a reset"),
        (set_device(ecc=2), "2 uncorrectable"),
        (set_device(remap_failed=True, xids=[63]), "XID 63"),
    ],
)
@pytest.mark.promise("bad-hosts")
def test_a_broken_gpu_condemns_its_host(machine: Any, fault: Callable[..., Any], says: str) -> None:
    """At the next check, once, and with the host to avoid."""
    machine.look(3)
    assert machine.changes == []
    fault(machine.devices)
    machine.look(3)
    assert machine.transitions() == [("gpu/node-7", "CRIT", "open")]
    assert says in machine.changes[0].summary and machine.changes[0].facts["avoid_hosts"] == ["node-7"]


@pytest.mark.shows("F45")
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (set_device(throttle=0x40), "hardware thermal slowdown (GPU 3)"),
        (set_device(throttle=0x80 | 0x4), "power brake"),
        (set_device(remap_pending=True), "waiting to be remapped"),
        (set_device(nvlink=[17, 3]), "NVLink is down"),
    ],
)
def test_an_odd_gpu_is_told_when_it_stays_so(machine: Any, fault: Callable[..., Any], says: str) -> None:
    """A warning after 15 of 20 checks; resolved when it is gone."""
    machine.look(2)
    fault(machine.devices)
    machine.look(14)
    assert machine.changes == []
    machine.look()
    assert machine.transitions() == [("gpu-odd/node-7", "WARN", "open")] and says in machine.changes[0].summary
    machine.devices[3] = {"index": 3, **HEALTHY}
    machine.look(20)
    assert machine.transitions()[1:] == [("gpu-odd/node-7", "WARN", "resolved")]


@pytest.mark.parametrize(
    "harmless",
    [
        set_device(xids=[13, 31, 43]),
        set_device(xids=[63]),
        set_device(throttle=0x1 | 0x4),
    ],
)
def test_what_is_normal_is_not_told(machine: Any, harmless: Callable[..., Any]) -> None:
    """Program errors, idle GPUs."""
    machine.look()
    harmless(machine.devices)
    machine.look(20)
    assert machine.changes == []


@pytest.mark.shows("A32")
def test_links_that_err_again_and_again(machine: Any) -> None:
    for errors in range(20):
        machine.devices[5]["nvlink"] = [18, 3 + errors // 2]
        machine.look()
    assert machine.changes == []
    for errors in range(20):
        machine.devices[5]["nvlink"] = [18, 100 + errors]
        machine.look()
    assert machine.transitions() == [("gpu-odd/node-7", "WARN", "open")]


@pytest.mark.shows("F45")
def test_a_driver_that_hangs_is_told_and_left(machine: Any) -> None:
    """Here a FIFO, which blocks when opened, replaces the file."""
    machine.look()
    machine.path.unlink()
    os.mkfifo(machine.path)
    machine.look(6, answers=False)
    assert machine.transitions() == [("gpu-blind/node-7", "WARN", "open")]
    assert "no answer within 10 s" in machine.changes[0].summary
    machine.path.rename(machine.path.with_suffix(".pipe"))
    machine.left.update(threading.enumerate())
    machine.path.touch()
    machine.look(4)
    assert machine.transitions()[1:] == [("gpu-blind/node-7", "WARN", "resolved")]


@pytest.mark.parametrize("content", ["{", '{"devices": [{"index": 0, "colour": "red"}]}'])
def test_a_file_that_is_none_is_told(machine: Any, content: str) -> None:
    machine.look()
    machine.content = content
    machine.look(2)
    assert machine.transitions() == [("gpu-blind/node-7", "WARN", "open")]
