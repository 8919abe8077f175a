"""Reads the state of GPUs through NVIDIA's library, or from a JSON file for other vendors' tools and for tests."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_pretrain.errors import ConfigError


@dataclass(frozen=True)
class DeviceState:
    """The state of a GPU. None: unknown or not supported."""

    index: int  # number on its host
    name: str = ""  # product name
    lost: str | None = None  # why it cannot be reached any more; None if it can
    xids: list[int] | None = None  # numbers of the driver's error reports (XIDs) since the last query
    recovery: int | None = None  # the driver's recommended action; 0: none, 1 and more: a reset or worse
    ecc: int | None = None  # uncorrectable memory errors since the last reset
    remap_failed: bool = False  # this and the next: whether remapping of bad memory rows failed, or is pending
    remap_pending: bool = False
    throttle: int | None = None  # reasons for a lower clock, as bits of NVML
    nvlink: list[int] | None = None  # number of active links, and of errors since the driver was loaded


class Nvml:
    """NVIDIA's management library, through the package `nvidia-ml-py`. May hang, and may raise anything."""

    def __init__(self) -> None:
        self._nvml: Any = importlib.import_module("pynvml")  # optional, and without types
        self._nvml.nvmlInit()
        self._watched = self._find_watched()
        self._events: Any = None
        with contextlib.suppress(self._nvml.NVMLError):  # not on every device, nor in every container
            events = self._nvml.nvmlEventSetCreate()
            for index in self._watched:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    def read_devices(self) -> list[DeviceState]:
        xids = self._take_xids()
        present = self._nvml.nvmlDeviceGetCount()
        return [self._device(index, xids.get(index, [])) for index in self._watched if index < present]

    def _find_watched(self) -> list[int]:
        """The numbers of this job's GPUs: others of the host may belong to another job, whose broken GPU is not ours.

        They are those that the container or control group permits, of which CUDA_VISIBLE_DEVICES names some by their
        place or by the beginning of their UUID; it is not heeded if it names anything else, such as parts of GPUs.
        """
        permitted = [index for index in range(self._nvml.nvmlDeviceGetCount()) if self._ask_uuid(index) is not None]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return permitted
        watched = set[int]()
        for name in {word.strip() for word in visible.split(",")} - {"", "-1"}:
            if name.isdecimal():
                found = permitted[int(name) : int(name) + 1]
            else:
                found = [i for i in permitted if name.startswith("GPU-") and (self._ask_uuid(i) or "").startswith(name)]
            if len(found) != 1:
                return permitted
            watched.update(found)
        return sorted(watched)

    def _ask_uuid(self, index: int) -> str | None:
        """The UUID of a GPU; empty if it does not answer, None if this process may not use it."""
        try:
            uuid = self._nvml.nvmlDeviceGetUUID(self._nvml.nvmlDeviceGetHandleByIndex(index))
        except self._nvml.NVMLError_NoPermission:
            return None
        except self._nvml.NVMLError:
            return ""
        return uuid if isinstance(uuid, str) else str(uuid.decode())

    def _take_xids(self) -> dict[int, list[int]]:
        xids: dict[int, list[int]] = {}
        if self._events is not None:
            with contextlib.suppress(self._nvml.NVMLError):  # a time-out: no more events
                while True:
                    event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                    index = self._nvml.nvmlDeviceGetIndex(event.device)
                    xids.setdefault(index, []).append(int(event.eventData))
        return xids

    def _device(self, index: int, xids: list[int]) -> DeviceState:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = nvml.nvmlDeviceGetName(handle)
            nvml.nvmlDeviceGetPowerState(handle)
        except nvml.NVMLError as error:
            return DeviceState(index, lost=str(error), xids=xids)

        def ask(name: str, *arguments: Any) -> Any:
            try:
                return getattr(nvml, f"nvmlDeviceGet{name}")(handle, *arguments)
            except (nvml.NVMLError, AttributeError):  # not supported by this device, driver or library
                return None

        reasons = ask("CurrentClocksEventReasons")
        rows = ask("RemappedRows") or (0, 0, False, False)
        return DeviceState(
            index,
            name=name if isinstance(name, str) else name.decode(),
            xids=xids,
            recovery=self._recovery(ask),
            ecc=ask("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
            remap_failed=bool(rows[3]),
            remap_pending=bool(rows[2]),
            throttle=ask("CurrentClocksThrottleReasons") if reasons is None else reasons,
            nvlink=self._links(ask),
        )

    def _recovery(self, ask: Callable[..., Any]) -> int | None:
        field = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        values = None if field is None else ask("FieldValues", [field])
        if not values or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        return int(values[0].value.uiVal)

    def _links(self, ask: Callable[..., Any]) -> list[int] | None:
        """The number of active links, and the sum of their replay and recovery errors."""
        nvml = self._nvml
        states = {link: ask("NvLinkState", link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)}
        active = [link for link, state in states.items() if state == nvml.NVML_FEATURE_ENABLED]
        counters = nvml.NVML_NVLINK_ERROR_DL_REPLAY, nvml.NVML_NVLINK_ERROR_DL_RECOVERY
        errors = sum(ask("NvLinkErrorCounter", link, counter) or 0 for link in active for counter in counters)
        return None if set(states.values()) == {None} else [len(active), errors]


def _read_file(path: Path) -> list[DeviceState]:
    """The GPUs in a file, `{"devices": [{"index": 0, ...}]}` with the fields of `DeviceState`."""
    return [DeviceState(**device) for device in json.loads(path.read_text())["devices"]]


def find_reader(name: str) -> Callable[[], list[DeviceState]] | None:
    """A function that reads the state of this host's GPUs, which may hang or raise anything; None: there is none.

    Args:
        name: `nvml`, `file:PATH`, `none`, or `auto`: `nvml` if there is a driver.

    Raises:
        ConfigError: the package is missing, although `nvml` was configured or there is a driver.
    """
    if name == "auto":
        name = "nvml" if Path("/proc/driver/nvidia/version").exists() else "none"
    if name == "none":
        return None
    if path := name.partition(":")[2]:
        return lambda: _read_file(Path(path))
    if importlib.util.find_spec("pynvml") is None:
        raise ConfigError(
            "NVIDIA's management library cannot be used: the package nvidia-ml-py is not installed",
            effect="broken or slow GPUs would not be noticed",
            remedy='pip install nvidia-ml-py, or set watchdog.gpus = "none"',
        )
    load = functools.cache(Nvml)
    return lambda: load().read_devices()
