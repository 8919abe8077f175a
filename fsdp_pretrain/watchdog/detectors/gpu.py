"""GPUs: a broken one ends the start on this host, an odd one is a warning. No torch.

Statistical rules raise a false alarm a day at a few hundred GPUs, so they warn and never act.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from fsdp_pretrain.deadline import Helper
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .base import Detector
from .host_history import remember
from .nvml import DeviceState

_CHECK_SECONDS, _DEADLINE_SECONDS = 15.0, 10.0
"""Between two checks of the GPUs, and how long one may take; two longer ones in a row are a warning."""
_LEMON = 3
"""A host is proposed for exclusion after so many incidents in 14 days."""
_FATAL_XIDS = frozenset({48, 63, 64, 74, 79, 94, 95, 119, 120})
"""Uncorrectable memory, remapping, NVLink, fallen off the bus, contained errors, GSP errors."""
_REMAP_XID = 63
"""A row was remapped: fatal only if the remapping failed."""
_BRAKES = {0x8: "hardware slowdown", 0x20: "thermal limit", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
_WINDOW, _OFTEN = 20, 15
"""Samples, five minutes, and in how many of them an oddity must occur to be a warning."""
_SLOW_CLOCK, _LOW_POWER, _BUSY = 0.9, 0.6, 0.5
_NEAR = 3.0
_WEDGED = 2


class GpuDetector(Detector):
    """Alarms `gpu/HOST` (fatal: `facts["avoid_hosts"]`), `gpu-odd/HOST`, `gpu-blind/HOST`, `host-record/HOST`.

    memory: file that stores the incidents of hosts.
    expected: GPUs that ranks use here; 0 if unknown: as many as were seen first.
    provider: `nvml` or `file:PATH`; from `nvml.resolve`.
    """

    def __init__(self, alarms: AlarmSink, *, host: str, memory: Path, expected: int, provider: str) -> None:
        super().__init__(alarms)
        self._host, self._memory, self._expected = host, memory, expected
        self.helper = Helper("fsdp_pretrain.watchdog.detectors.nvml", provider)
        self.asked: float | None = None
        self._due, self._missed = 0.0, 0
        self._first: dict[int, DeviceState] = {}
        self._errors: dict[int, int] = {}
        self._links: dict[int, list[int]] = {}
        self._odd: dict[tuple[int, str], deque[bool]] = {}
        self._broken = False

    def tick(self, now: float) -> None:
        """Request the state of the GPUs when due, and judge it when it arrives."""
        if self.asked is None:
            if now >= self._due:
                self.asked, self._due = now, now + _CHECK_SECONDS
                self.helper.send({})
            return
        for answer in self.helper.receive():
            self.asked = None
            if "error" in answer:
                self._miss(answer["error"])
            else:
                self._missed = 0
                self.resolve(f"gpu-blind/{self._host}", "the state of the GPUs is known again")
                self._judge([DeviceState(**device) for device in answer["devices"]])
        if self.asked is not None and now - self.asked > _DEADLINE_SECONDS:
            self.helper.replace()  # it may hang in the driver; the next request starts another
            self.asked = None
            self._miss(f"no answer within {human_time(_DEADLINE_SECONDS)}")

    def _miss(self, why: str) -> None:
        self._missed += 1
        if self._missed >= _WEDGED:
            self.open(
                f"gpu-blind/{self._host}",
                Severity.WARN,
                f"the state of the GPUs of {self._host} is not known: {why}, {self._missed} times in a row",
                "broken GPUs are noticed only when the run fails; a driver that hangs often is a broken GPU",
                "try nvidia-smi on the host",
            )

    def _judge(self, devices: list[DeviceState]) -> None:
        self._first = self._first or {device.index: device for device in devices}
        for device in devices:  # an idle link slows down, so keep the best one
            if device.pcie is not None:
                best = self._links.get(device.index, device.pcie)
                self._links[device.index] = list(map(max, best, device.pcie))
        self._judge_broken(devices)
        self._judge_odd([device for device in devices if device.lost is None])

    def _judge_broken(self, devices: list[DeviceState]) -> None:
        reasons = [f"GPU {device.index}: {reason}" for device in devices for reason in _broken(device)]
        expected = max(self._expected, len(self._first))
        if len(devices) < expected:
            reasons.append(f"{len(devices)} of {expected} GPUs are there")
        if not reasons:
            return  # the alarm stays: a broken GPU that stops reporting errors is not repaired
        if not self._broken:
            self._broken = True
            self._remember()
        self.open(
            f"gpu/{self._host}",
            Severity.CRIT,
            f"{self._host}: {'; '.join(reasons)}",
            "the run must go on without this host",
            "drain the host and reset or replace the GPU",
            facts={"avoid_hosts": [self._host], "reasons": reasons},
        )

    def _remember(self) -> None:
        incidents = remember(self._memory, self._host, "gpu")
        if incidents[self._host] >= _LEMON:
            self.open(
                f"host-record/{self._host}",
                Severity.WARN,
                f"{self._host} had {incidents[self._host]} incidents in 14 days",
                "a few hosts cause most of the interruptions",
                "exclude it until it has been tested",
                facts={"proposed": sorted(host for host, n in incidents.items() if n >= _LEMON)},
            )

    def _judge_odd(self, devices: list[DeviceState]) -> None:
        for device in devices:
            seen = set(self._oddities(device, devices))
            for reason in seen | {reason for index, reason in self._odd if index == device.index}:
                self._odd.setdefault((device.index, reason), deque(maxlen=_WINDOW)).append(reason in seen)
        self._odd = {key: history for key, history in self._odd.items() if any(history)}
        found: dict[str, list[int]] = defaultdict(list)
        for (index, reason), history in sorted(self._odd.items()):
            if sum(history) >= _OFTEN:
                found[reason].append(index)
        if not found:
            self.resolve(f"gpu-odd/{self._host}", f"the GPUs of {self._host} are normal")
            return
        texts = [f"{reason} (GPU {', '.join(map(str, where))})" for reason, where in sorted(found.items())]
        self.open(
            f"gpu-odd/{self._host}",
            Severity.WARN,
            f"{self._host}: {'; '.join(texts)}",
            "all ranks wait for the slowest",
            "see cooling, power and cables of the host",
            facts={"devices": dict(found)},
        )

    def _oddities(self, device: DeviceState, devices: Sequence[DeviceState]) -> list[str]:
        """What should not persist in the state of a GPU."""
        found = [text for bit, text in _BRAKES.items() if (device.throttle or 0) & bit]
        if device.remap_pending:
            found.append("memory rows are waiting to be remapped")
        if device.temperature is not None and device.slowdown and device.temperature >= device.slowdown - _NEAR:
            found.append("close to its slowdown temperature")
        peers = [other for other in devices if other.index != device.index and (other.busy or 0) >= _BUSY]
        if (device.busy or 0) >= _BUSY:
            if device.pcie is not None and device.pcie != self._links[device.index]:
                found.append("a slower PCIe link than before")
            clocks = [other.clock for other in peers if other.clock]
            if device.clock and clocks and device.clock < _SLOW_CLOCK * median(clocks):
                found.append("a lower clock than the others")
        powers = [other.power for other in peers if other.power]
        if device.power and len(powers) > 1 and device.power < _LOW_POWER * median(powers):
            found.append("less power than the others")
        first = self._first.get(device.index, device).nvlink
        if device.nvlink is not None and first is not None:
            links, errors = device.nvlink
            if links < first[0]:
                found.append("an NVLink is down")
            if errors > self._errors.get(device.index, errors):
                found.append("NVLink errors")
            self._errors[device.index] = errors
        return found


def _broken(device: DeviceState) -> list[str]:
    """Why a GPU must not be used any more."""
    if device.lost is not None:
        return [f"lost ({device.lost})"]
    fatal = _FATAL_XIDS if device.remap_failed else _FATAL_XIDS - {_REMAP_XID}
    found = [f"XID {xid}" for xid in device.xids or () if xid in fatal]
    if device.recovery:
        found.append("the driver requests a reset")
    if device.ecc:
        found.append(f"{device.ecc} uncorrectable memory errors")
    if device.remap_failed:
        found.append("a memory row could not be remapped")
    return found
