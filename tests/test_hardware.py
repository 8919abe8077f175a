"""GPUs reported by a file, a driver that hangs, hosts that leak memory."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from laboratory import tiny
from sight import until

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir, stamp
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.detectors import nvml
from fsdp_pretrain.watchdog.detectors.gpu import GpuDetector
from fsdp_pretrain.watchdog.detectors.host import HostDetector, HostMemory, sample_host
from fsdp_pretrain.watchdog.detectors.periodic import THREADS
from fsdp_pretrain.watchdog.hang.rank_monitor import RankMonitor
from fsdp_pretrain.watchdog.leader import Leader
from fsdp_pretrain.watchdog.notify.alarms import Alarm, Alarms, alarms_file

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
        look = nvml.find_reader(f"file:{self.path}")
        assert look is not None
        self.watch = GpuDetector(self.alarms, host="node-7", expected=0, look=look)

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


def test_a_gpu_that_is_odd_as_often_as_it_takes_is_told_once(machine: Any) -> None:
    """In 15 and in 14 of 20 checks, in turns; it ends at 5."""
    for look in range(200):
        machine.devices[3]["throttle"] = 0x4 if look % 7 in (3, 6) else 0x40
        machine.look()
    assert machine.transitions() == [("gpu-odd/node-7", "WARN", "open")]
    machine.devices[3]["throttle"] = 0x4
    machine.look(10)
    assert len(machine.changes) == 1
    machine.look(10)
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


def test_the_library_is_asked_for_by_name_only_if_it_is_there() -> None:
    from fsdp_pretrain.errors import ConfigError

    assert nvml.find_reader("none") is None
    if not Path("/proc/driver/nvidia/version").exists():
        assert nvml.find_reader("auto") is None
    with pytest.raises(ConfigError, match="nvidia-ml-py"):
        if nvml.importlib.util.find_spec("pynvml") is None:
            nvml.find_reader("nvml")
        else:
            raise ConfigError("nvidia-ml-py is there")


class NvmlError(Exception):
    """As the library's base of errors."""


class NoPermissionError(NvmlError):
    """As the library's error for a GPU that the control group withholds."""


def library(registered: list[int], *, withheld: int | None) -> SimpleNamespace:
    """In place of NVIDIA's library: four GPUs, `GPU-a0` to `GPU-d3`, of which one may be withheld and the last is lost."""

    def handle(index: int) -> int:
        if index == withheld:
            raise NoPermissionError("Insufficient Permissions")
        return index

    def state(index: int) -> int:
        if index == 3:
            raise NvmlError("GPU is lost")
        return 0

    def nothing(*_: object) -> None:
        raise NvmlError("Timeout")

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVMLError_NoPermission=NoPermissionError,
        NVML_NVLINK_MAX_LINKS=0,
        NVML_NVLINK_ERROR_DL_REPLAY=0,
        NVML_NVLINK_ERROR_DL_RECOVERY=1,
        NVML_FEATURE_ENABLED=1,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlEventTypeXidCriticalError=8,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetUUID=lambda index: f"GPU-{'abcd'[index]}{index}",
        nvmlDeviceGetName=lambda index: "a GPU",
        nvmlDeviceGetPowerState=state,
        nvmlEventSetCreate=lambda: "events",
        nvmlDeviceRegisterEvents=lambda index, kind, events: registered.append(index),
        nvmlEventSetWait_v2=nothing,
    )


@pytest.mark.parametrize(
    ("visible", "withheld", "watched"),
    [
        (None, None, [0, 1, 2, 3]),
        (None, 1, [0, 2, 3]),
        ("2,0", None, [0, 2]),
        ("1", 0, [2]),
        ("GPU-b,GPU-d3", None, [1, 3]),
        ("GPU-x", None, [0, 1, 2, 3]),
        ("7", None, [0, 1, 2, 3]),
        ("MIG-GPU-b1/1/0", 1, [0, 2, 3]),
        ("", None, []),
    ],
)
@pytest.mark.promise("bad-hosts")
def test_the_gpus_of_other_jobs_are_not_watched(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, withheld: int | None, watched: list[int]
) -> None:
    """Whether a variable or a control group separates them; one of ours that is lost stays."""
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    registered = list[int]()
    monkeypatch.setitem(sys.modules, "pynvml", library(registered, withheld=withheld))
    states = nvml.Nvml().read_devices()
    assert [state.index for state in states] == registered == watched
    assert [state.index for state in states if state.lost] == [index for index in watched if index == 3]


# ---------------------------------------------------------------------- the host

GIB = 1 << 30
IDLE = HostMemory(200 * GIB, 256 * GIB, 0)


def watch_host(tmp_path: Path, states: list[HostMemory]) -> list[Any]:
    """Alarms as (key, severity, state, minute) of a host checked every minute."""
    changes: list[Any] = []
    time_is = [0.0]
    alarms = Alarms(
        tmp_path / "alarms.jsonl",
        lambda alarm: changes.append((alarm.key, alarm.severity.name, alarm.state, int(time_is[0] // 60))),
    )
    left = iter(states)
    host = HostDetector(alarms, host="h", sample=lambda: next(left))
    for minute in range(len(states)):
        for second in range(0, 60, 10):
            time_is[0] = 60.0 * minute + second
            host.tick(time_is[0])
    return changes


def memory(hours: float, gib_per_hour: float) -> list[HostMemory]:
    """Caches make available memory vary by gigabytes."""
    rng = np.random.default_rng(3)
    noise = rng.normal(0, 3, int(60 * hours)) + np.where(rng.random(int(60 * hours)) < 0.1, -15, 0)
    return [replace(IDLE, available=int((200 - gib_per_hour * n / 60 + noise[n]) * GIB)) for n in range(len(noise))]


@pytest.mark.parametrize("rate", [0, 2, -5])
def test_memory_that_varies_is_not_told(tmp_path: Path, rate: float) -> None:
    assert watch_host(tmp_path, memory(8, rate)) == []


def test_memory_that_leaks_is_told_two_hours_before(tmp_path: Path) -> None:
    changes = watch_host(tmp_path, memory(9.8, 20))
    assert [(key, severity) for key, severity, _, _ in changes] == [("memory/h", "WARN"), ("memory/h", "CRIT")]
    assert changes[0][3] == pytest.approx(60 * (10 - 2), abs=45) and changes[1][3] == pytest.approx(
        60 * (10 - 0.5), abs=20
    )


def test_processes_that_were_killed_are_told(tmp_path: Path) -> None:
    changes = watch_host(tmp_path, [replace(IDLE, oom_kills=7 + (n >= 10)) for n in range(40)])
    assert changes == [("oom-kill/h", "WARN", "open", 10), ("oom-kill/h", "WARN", "resolved", 11)]


def test_a_look_at_this_host() -> None:
    state = sample_host()
    assert 0 < state.available <= state.total


@pytest.mark.parametrize(("host", "left"), [("node-a", ["node-a"]), ("node-b", [])])
def test_only_hosts_of_this_start_are_left(tmp_path: Path, host: str, left: list[str]) -> None:
    """An alarm by a clock that was ahead does not stop the next start, which is elsewhere."""
    run = RunDir(tmp_path / "run")
    state_files.write(run.new_segment() / "environment.json", {"time": stamp(time.time() - 60), "hosts": {host: 8}})
    known = Alarms(alarms_file(run), lambda _: None)
    known.open("gpu/node-a", Severity.CRIT, "node-a: XID 79", facts={"avoid_hosts": ["node-a"]})
    config = Config.model_validate(tiny("x", run.path, "/nowhere"))
    Leader(config, RankMonitor(range(1), run.path / "pages", os.getpid()), 1).end_pass([])
    asked = [json.loads(path.read_text())["avoid_hosts"] for path in run.control.glob("*")]
    assert asked == ([left] if left else [])


def test_alarms_of_hosts_and_ranks_end_with_their_start(tmp_path: Path) -> None:
    """The hosts of this start are others; and a run that has completed has no ranks."""
    run = RunDir(tmp_path / "run")
    segment = run.new_segment()
    known = Alarms(alarms_file(run), lambda _: None)
    for key in ("memory/n7", "oom-kill/n7", "gpu-odd/n7", "gpu-blind/n7", "mount/old", "disk/run"):
        known.open(key, Severity.CRIT, "n7: it happened")
    state_files.write(segment / "environment.json", {"time": stamp(time.time() + 60), "hosts": {"n8": 8}})
    config = Config.model_validate(tiny("x", run.path, "/nowhere"))
    leader = Leader(config, RankMonitor(range(1), run.path / "pages", os.getpid()), 1)
    assert leader.alarms.open_keys() == ["disk/run"]
    leader.alarms.open("straggler/rank-3", Severity.CRIT, "rank 3 needs more time")
    state_files.write(segment / "exit_intent.json", {"code": 0, "reason": "complete", "time": stamp(time.time())})
    leader.report_end()
    assert leader.alarms.open_keys() == ["disk/run"]
    leader.close()


def test_alarms_end_with_the_source_or_the_evaluations_they_are_of(tmp_path: Path) -> None:
    """A later start has other sources, and does not evaluate."""
    run = RunDir(tmp_path / "run")
    run.new_segment()
    known = Alarms(alarms_file(run), lambda _: None)
    for key in (
        "data-shard/text",
        "data-shard/b",
        "data-shard/b/n7",
        "data-share/b",
        "evaluation-verdict/nll",
        "disk/run",
    ):
        known.open(key, Severity.CRIT, "it happened")
    for more, left in (
        ({"eval": {"every": "10 steps"}}, ["data-shard/text", "evaluation-verdict/nll", "disk/run"]),
        ({}, ["data-shard/text", "disk/run"]),
    ):
        config = Config.model_validate(tiny("x", run.path, "/nowhere", **more))
        leader = Leader(config, RankMonitor(range(1), run.path / "pages", os.getpid()), 1)
        leader.close()
        assert leader.alarms.open_keys() == left
