"""Watches GPUs: a broken one moves the run to other hosts, an odd one causes a warning."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .base import Detector
from .nvml import DeviceState
from .periodic import PeriodicProbe

_CHECK_SECONDS, _DEADLINE_SECONDS = 15.0, 10.0
"""Seconds between two checks of the GPUs, and how long one may take; two longer ones in a row cause a warning."""
_FATAL_XIDS = frozenset({48, 63, 64, 74, 79, 94, 95, 119, 120})
"""Driver errors: uncorrectable memory, remapping, NVLink, fallen off the bus, contained errors, GSP errors."""
_REMAP_XID = 63
"""A row was remapped: fatal only if the remapping failed."""
_BRAKES = {0x8: "hardware slowdown", 0x20: "thermal limit", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
_WINDOW, _OFTEN, _SELDOM = 20, 15, 5
"""Number of samples (five minutes), in how many of them an oddity must occur to cause a warning, and at most for the
warning to end."""
_ALARM_AFTER = 2
"""Consecutive failed or late checks that open the alarm `gpu-blind`."""


class GpuDetector(Detector):
    """Alarms `gpu/HOST` (fatal: `facts["avoid_hosts"]`), `gpu-odd/HOST`, `gpu-blind/HOST`.

    Args:
        expected: number of GPUs that ranks use here; 0: as many as were seen first.
        look: reads the state of the GPUs, see `nvml.find_reader`.
    """

    def __init__(self, alarms: AlarmSink, *, host: str, expected: int, look: Callable[[], list[DeviceState]]) -> None:
        super().__init__(alarms)
        self._host, self._expected, self._missed = host, expected, 0
        self._probe = PeriodicProbe(look, _CHECK_SECONDS, _DEADLINE_SECONDS)
        self._first: dict[int, DeviceState] = {}
        self._errors: dict[int, int] = {}
        self._odd: dict[tuple[int, str], deque[bool]] = {}

    def tick(self, now: float) -> None:
        """Request the state of the GPUs when due, and judge it when it arrives."""
        answer = self._probe.tick(now)
        if answer is None:
            return
        if answer.value is None:
            self._miss(answer.error)
            return
        self._missed = 0
        self.resolve(f"gpu-blind/{self._host}", "the state of the GPUs is known again")
        self._judge(answer.value)

    def _miss(self, why: str | None) -> None:
        self._missed += 1
        if self._missed >= _ALARM_AFTER:
            self.open(
                f"gpu-blind/{self._host}",
                Severity.WARN,
                f"the state of the GPUs of {self._host} is not known: {why}, {self._missed} times in a row",
                "broken GPUs are noticed only when the run fails; a driver that hangs often is a broken GPU",
                "try nvidia-smi on the host",
            )

    def _judge(self, devices: list[DeviceState]) -> None:
        self._first = self._first or {device.index: device for device in devices}
        self._judge_broken(devices)
        self._judge_odd([device for device in devices if device.lost is None])

    def _judge_broken(self, devices: list[DeviceState]) -> None:
        reasons = [f"GPU {device.index}: {reason}" for device in devices for reason in _broken(device)]
        expected = max(self._expected, len(self._first))
        if len(devices) < expected:
            reasons.append(f"{len(devices)} of {expected} GPUs are there")
        if not reasons:
            return  # the alarm stays: a broken GPU that stops reporting errors is not repaired
        self.open(
            f"gpu/{self._host}",
            Severity.CRIT,
            f"{self._host}: {'; '.join(reasons)}",
            "the run must continue without this host",
            "drain the host and reset or replace the GPU",
            facts={"avoid_hosts": [self._host], "reasons": reasons},
        )

    def _judge_odd(self, devices: list[DeviceState]) -> None:
        for device in devices:
            seen = set(self._oddities(device))
            for reason in seen | {reason for index, reason in self._odd if index == device.index}:
                self._odd.setdefault((device.index, reason), deque(maxlen=_WINDOW)).append(reason in seen)
        self._odd = {key: history for key, history in self._odd.items() if any(history)}
        frequent: dict[str, list[int]] = defaultdict(list)
        for (index, reason), history in sorted(self._odd.items()):
            if sum(history) >= _OFTEN:
                frequent[reason].append(index)
        if not frequent:
            if all(sum(history) <= _SELDOM for history in self._odd.values()):
                self.resolve(f"gpu-odd/{self._host}", f"the GPUs of {self._host} are normal")
            return
        texts = [f"{reason} (GPU {', '.join(map(str, indices))})" for reason, indices in sorted(frequent.items())]
        self.open(
            f"gpu-odd/{self._host}",
            Severity.WARN,
            f"{self._host}: {'; '.join(texts)}",
            "all ranks wait for the slowest",
            "see cooling, power and cables of the host",
            facts={"devices": dict(frequent)},
        )

    def _oddities(self, device: DeviceState) -> list[str]:
        """Conditions of a GPU that should not persist."""
        oddities = [text for bit, text in _BRAKES.items() if (device.throttle or 0) & bit]
        if device.remap_pending:
            oddities.append("memory rows are waiting to be remapped")
        first = self._first.get(device.index, device).nvlink
        if device.nvlink is not None and first is not None:
            links, errors = device.nvlink
            if links < first[0]:
                oddities.append("an NVLink is down")
            if errors > self._errors.get(device.index, errors):
                oddities.append("NVLink errors")
            self._errors[device.index] = errors
        return oddities


def _broken(device: DeviceState) -> list[str]:
    """Reasons not to use a GPU any more; empty if it works."""
    if device.lost is not None:
        return [f"lost ({device.lost})"]
    fatal = _FATAL_XIDS if device.remap_failed else _FATAL_XIDS - {_REMAP_XID}
    reasons = [f"XID {xid}" for xid in device.xids or () if xid in fatal]
    if device.recovery:
        reasons.append("the driver requests a reset")
    if device.ecc:
        reasons.append(f"{device.ecc} uncorrectable memory errors")
    if device.remap_failed:
        reasons.append("a memory row could not be remapped")
    return reasons
