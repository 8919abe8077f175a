"""GPUs: what is broken ends the start on this host, what is merely odd is told. No torch.

Statistical rules about GPUs raise a false alarm a day at a few hundred of them, so they warn and never act.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

from ..deadline import Helper
from ..severity import Severity
from ..watchdog_sections import HardwareSection
from .alarms import Alarms
from .detector import Detector
from .hosts import Hosts
from .nvml import DeviceState

_FATAL_XIDS = frozenset({48, 63, 64, 74, 79, 94, 95, 119, 120})
"""Uncorrectable memory, remapping, NVLink, fallen off the bus, contained errors, the GPU's own processor."""
_REMAP_XID = 63
"""A row was remapped: fatal only where the remapping failed."""
_BRAKES = {0x8: "hardware slowdown", 0x20: "thermal limit", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
_RECENT, _OFTEN = 5, 3
"""An oddity is told when that many of the recent looks showed it."""
_LONG = 20
_SLOW_CLOCK, _LOW_POWER, _BUSY = 0.9, 0.6, 0.5
_NEAR = 3.0
_LINK_WINDOWS, _BAD_WINDOWS = 30, 15
_WEDGED = 2


class Devices(Detector):
    """Alarms `gpu/HOST` (fatal: `facts["avoid_hosts"]`), `gpu-odd/HOST`, `gpu-blind/HOST`, `host-record/HOST`.

    Args:
        alarms: where incidents are told.
        section: `[watchdog.hardware]`.
        host: name of this host.
        hosts: remembers incidents.
        expected: GPUs that ranks use here; 0 if unknown: as many as were seen first.
        provider: `nvml` or `file:PATH`; from `resolve_provider`.
    """

    def __init__(
        self, alarms: Alarms, section: HardwareSection, *, host: str, hosts: Hosts, expected: int, provider: str
    ) -> None:
        super().__init__(alarms)
        self._section, self._host, self._hosts, self._expected = section, host, hosts, expected
        self._helper = Helper("fsdp_pretrain.watchdog.nvml", provider)
        self._asked: float | None = None
        self._due, self._missed = 0.0, 0
        self._first: dict[int, DeviceState] = {}
        self._before: dict[int, DeviceState] = {}
        self._links: dict[int, tuple[int, int]] = {}
        self._odd: dict[tuple[int, str], deque[bool]] = {}
        self._broken = False

    def tick(self, now: float) -> None:
        """Look, and take what earlier looks found."""
        if self._asked is None:
            if now >= self._due:
                self._asked, self._due = now, now + self._section.interval.value
                self._helper.send({})
            return
        for answer in self._helper.receive():
            self._asked = None
            if "error" in answer:
                self._miss(answer["error"])
            else:
                self._missed = 0
                self.alarms.resolve(f"gpu-blind/{self._host}", "the state of the GPUs is known again", step=self.at)
                self._judge([DeviceState.from_json(device) for device in answer["devices"]])
        if self._asked is not None and now - self._asked > self._section.deadline.value:
            self._helper.replace()  # it may stay in the driver; another is started for the next look
            self._asked = None
            self._miss(f"no answer within {self._section.deadline}")

    def close(self) -> None:
        """End the helper."""
        self._helper.replace()

    def _miss(self, why: str) -> None:
        self._missed += 1
        if self._missed >= _WEDGED:
            self.alarms.open(
                f"gpu-blind/{self._host}",
                Severity.WARN,
                f"the state of the GPUs of {self._host} is not known: {why}, {self._missed} times in a row",
                effect="broken GPUs are noticed only when the run fails; a driver that hangs often is a broken GPU",
                remedy="try nvidia-smi on the host",
                step=self.at,
            )

    def _judge(self, devices: list[DeviceState]) -> None:
        if not self._first and devices:
            self._first = {device.index: device for device in devices}
        for device in devices:  # an idle link is slow, so the best one counts
            generation, width = self._links.get(device.index, (0, 0))
            if device.pcie is not None:
                self._links[device.index] = max(generation, device.pcie[0]), max(width, device.pcie[1])
        self._judge_broken(devices)
        self._judge_odd([device for device in devices if device.lost is None])
        self._before = {device.index: device for device in devices}

    # ------------------------------------------------------------------ broken

    def _judge_broken(self, devices: list[DeviceState]) -> None:
        reasons = [f"GPU {device.index}: {reason}" for device in devices for reason in _broken(device)]
        expected = max(self._expected, len(self._first))
        if len(devices) < expected:
            reasons.append(f"{len(devices)} of {expected} GPUs are there")
        if not reasons:
            return  # what broke is not whole because it stopped saying so: the alarm stays
        if not self._broken:
            self._broken = True
            self._remember("gpu")
        self.alarms.open(
            f"gpu/{self._host}",
            Severity.CRIT,
            f"{self._host}: {'; '.join(reasons)}",
            effect="the run must go on without this host",
            remedy="drain the host and reset or replace the GPU",
            step=self.at,
            facts={"avoid_hosts": [self._host], "reasons": reasons},
        )

    def _remember(self, kind: str) -> None:
        if (incidents := self._hosts.add(self._host, kind)) >= self._section.lemon:
            self.alarms.open(
                f"host-record/{self._host}",
                Severity.WARN,
                f"{self._host} had {incidents} incidents in 14 days",
                effect="a few hosts cause most of the interruptions",
                remedy="exclude it until it has been tested",
                step=self.at,
                facts={"proposed": self._hosts.proposed(self._section.lemon)},
            )

    # ------------------------------------------------------------------ odd

    def _judge_odd(self, devices: list[DeviceState]) -> None:
        found: dict[str, list[int]] = defaultdict(list)
        for device in devices:
            now = set(self._oddities(device, devices))
            for index, reason in list(self._odd):
                if index == device.index:
                    self._odd[index, reason].append(reason in now)
            for reason in now - {reason for index, reason in self._odd if index == device.index}:
                self._odd[device.index, reason] = deque([True], maxlen=_windows(reason)[0])
        for (index, reason), history in list(self._odd.items()):
            if sum(history) >= _windows(reason)[1]:
                found[reason].append(index)
            if not any(history):
                del self._odd[index, reason]
        key = f"gpu-odd/{self._host}"
        if not found:
            self.alarms.resolve(key, f"the GPUs of {self._host} are as they should be", step=self.at)
            return
        texts = [f"{reason} (GPU {', '.join(map(str, sorted(where)))})" for reason, where in sorted(found.items())]
        self.alarms.open(
            key,
            Severity.WARN,
            f"{self._host}: {'; '.join(texts)}",
            effect="all ranks wait for the slowest",
            remedy="see cooling, power and cables of the host",
            step=self.at,
            facts={"devices": dict(found)},
        )

    def _oddities(self, device: DeviceState, devices: Sequence[DeviceState]) -> list[str]:
        """What a look shows that should not be so for long."""
        first, before = self._first.get(device.index, device), self._before.get(device.index, device)
        found = [text for bit, text in _BRAKES.items() if (device.throttle or 0) & bit]
        if device.remap_pending:
            found.append("memory rows wait to be remapped")
        if device.temperature is not None and device.slowdown and device.temperature >= device.slowdown - _NEAR:
            found.append("almost as hot as where it slows down")
        peers = [other for other in devices if other.index != device.index]
        if (device.busy or 0) >= _BUSY:
            best = self._links.get(device.index)
            if device.pcie is not None and best is not None and (device.pcie[0] < best[0] or device.pcie[1] < best[1]):
                found.append("a slower PCIe link than before")
            clocks = [other.clock for other in peers if other.clock and (other.busy or 0) >= _BUSY]
            if device.clock and clocks and device.clock < _SLOW_CLOCK * median(clocks):
                found.append("a lower clock than the others")
        powers = [other.power for other in peers if other.power and (other.busy or 0) >= _BUSY]
        if device.power and len(powers) > 1 and device.power < _LOW_POWER * median(powers):
            found.append("less power than the others")
        if device.nvlink is not None and first.nvlink is not None and before.nvlink is not None:
            if device.nvlink[0] < first.nvlink[0]:
                found.append("an NVLink is down")
            if device.nvlink[1] > before.nvlink[1]:
                found.append("NVLink errors")
        return found


def _windows(reason: str) -> tuple[int, int]:
    """(looks remembered, looks that must have shown it)."""
    if reason == "NVLink errors":
        return _LINK_WINDOWS, _BAD_WINDOWS
    if reason in ("a lower clock than the others", "less power than the others"):
        return _LONG, _LONG - 2
    return _RECENT, _OFTEN


def _broken(device: DeviceState) -> list[str]:
    """Why nobody should train on a GPU any more."""
    if device.lost is not None:
        return [f"lost ({device.lost})"]
    found = [f"XID {xid}" for xid in device.xids if xid in _FATAL_XIDS and (xid != _REMAP_XID or device.remap_failed)]
    if device.recovery:
        found.append("the driver wants it reset")
    if device.ecc:
        found.append(f"{device.ecc} uncorrectable memory errors")
    if device.remap_failed:
        found.append("a memory row could not be remapped")
    return found
