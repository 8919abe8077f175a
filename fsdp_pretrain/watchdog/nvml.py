"""The state of GPUs, told by a helper process that may hang: `python -m fsdp_pretrain.watchdog.nvml PROVIDER`.

For every line of input it writes one: `{"devices": [...]}` or `{"error": "..."}`. Providers are NVIDIA's library, and
a JSON file, for other vendors' tools and for tests. No torch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True)
class DeviceState:
    """What a look at a GPU showed. None: not known, or not supported by it.

    Attributes:
        index: on its host.
        name: of the model.
        lost: why it cannot be reached any more.
        xids: numbers of the driver's error reports since the last look.
        recovery: the driver's recommendation; 0 none, 1 and more a reset or worse.
        ecc: uncorrectable memory errors since it was last reset.
        remap_failed, remap_pending: bad memory rows could not be, or wait to be, replaced.
        throttle: reasons for a lower clock, as bits of NVML.
        clock: of the multiprocessors, MHz.
        power: W.
        busy: share of the time in which something ran, 0 to 1.
        temperature, slowdown: degrees Celsius now, and from which on it slows down.
        pcie: (generation, width) of the link.
        nvlink: (active links, errors since the driver was loaded).
    """

    index: int
    name: str = ""
    lost: str | None = None
    xids: tuple[int, ...] = ()
    recovery: int | None = None
    ecc: int | None = None
    remap_failed: bool = False
    remap_pending: bool = False
    throttle: int | None = None
    clock: float | None = None
    power: float | None = None
    busy: float | None = None
    temperature: float | None = None
    slowdown: float | None = None
    pcie: tuple[int, int] | None = None
    nvlink: tuple[int, int] | None = None

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> DeviceState:
        """From a JSON object. Raises ValueError for keys that do not exist, or without `index`."""
        unknown = content.keys() - {field.name for field in fields(cls)}
        if unknown or not isinstance(content.get("index"), int):
            raise ValueError(f"not the state of a GPU: {', '.join(sorted(unknown)) or 'no index'}")
        lists = {key: tuple(content[key]) for key in ("xids", "pcie", "nvlink") if content.get(key) is not None}
        return cls(**{**content, **lists})


class Provider(ABC):
    """Tells the state of this host's GPUs. May hang, and may raise anything."""

    @abstractmethod
    def look(self) -> list[DeviceState]:
        """Every GPU there is now."""


class FileProvider(Provider):
    """Reads a JSON file, `{"devices": [{"index": 0, ...}]}` with the fields of `DeviceState`.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def look(self) -> list[DeviceState]:
        """What the file says now."""
        return [DeviceState.from_json(device) for device in json.loads(self._path.read_text())["devices"]]


class NvmlProvider(Provider):
    """NVIDIA's management library, through the package `nvidia-ml-py`."""

    def __init__(self) -> None:
        pynvml = importlib.import_module("pynvml")  # optional, and without types
        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._events: Any = None
        with contextlib.suppress(pynvml.NVMLError):  # not on every device, and not in every container
            events = pynvml.nvmlEventSetCreate()
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    def look(self) -> list[DeviceState]:
        """Ask the driver."""
        xids = self._take_xids()
        return [self._device(index, xids.get(index, [])) for index in range(self._nvml.nvmlDeviceGetCount())]

    def _take_xids(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        if self._events is not None:
            with contextlib.suppress(self._nvml.NVMLError):  # a time-out: there are no more
                while True:
                    event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                    index = self._nvml.nvmlDeviceGetIndex(event.device)
                    found.setdefault(index, []).append(int(event.eventData))
        return found

    def _device(self, index: int, xids: list[int]) -> DeviceState:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = nvml.nvmlDeviceGetName(handle)
            nvml.nvmlDeviceGetPowerState(handle)
        except nvml.NVMLError as error:
            return DeviceState(index, lost=str(error), xids=tuple(xids))

        def ask(name: str, *arguments: Any) -> Any:
            try:
                return getattr(nvml, name)(handle, *arguments)
            except (nvml.NVMLError, AttributeError):  # this device, driver or library has no such thing
                return None

        def scaled(value: Any, factor: float) -> float | None:
            return None if value is None else value * factor

        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        rows = ask("nvmlDeviceGetRemappedRows")
        rates = ask("nvmlDeviceGetUtilizationRates")
        link = ask("nvmlDeviceGetCurrPcieLinkGeneration"), ask("nvmlDeviceGetCurrPcieLinkWidth")
        return DeviceState(
            index,
            name if isinstance(name, str) else name.decode(),
            None,
            tuple(xids),
            self._recovery(ask),
            ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
            bool(rows and rows[3]),
            bool(rows and rows[2]),
            reasons,
            ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            scaled(ask("nvmlDeviceGetPowerUsage"), 1e-3),
            None if rates is None else rates.gpu / 100,
            ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            ask("nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            None if None in link else link,
            self._links(ask),
        )

    def _recovery(self, ask: Callable[..., Any]) -> int | None:
        field = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        values = None if field is None else ask("nvmlDeviceGetFieldValues", [field])
        if not values or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        return int(values[0].value.uiVal)

    def _links(self, ask: Callable[..., Any]) -> tuple[int, int] | None:
        """(active links, replay and recovery errors of all)."""
        nvml, active, errors, known = self._nvml, 0, 0, False
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            state = ask("nvmlDeviceGetNvLinkState", link)
            known = known or state is not None
            if state != nvml.NVML_FEATURE_ENABLED:
                continue
            active += 1
            for counter in (nvml.NVML_NVLINK_ERROR_DL_REPLAY, nvml.NVML_NVLINK_ERROR_DL_RECOVERY):
                errors += ask("nvmlDeviceGetNvLinkErrorCounter", link, counter) or 0
        return (active, errors) if known else None


def provider(name: str) -> Provider:
    """`nvml` or `file:PATH`. Raises whatever the provider does."""
    kind, _, path = name.partition(":")
    return FileProvider(Path(path)) if kind == "file" else NvmlProvider()


def resolve(name: str) -> str | None:
    """What a configured provider means on this host: `auto` is `nvml` where there is a driver, `none` is None.

    Raises:
        ConfigError: `nvml` was asked for by name, or there is a driver, and the package is missing.
    """
    if name == "auto":
        name = "nvml" if Path("/proc/driver/nvidia/version").exists() else "none"
    if name == "nvml" and importlib.util.find_spec("pynvml") is None:
        raise ConfigError(
            "NVIDIA's management library cannot be asked: the package nvidia-ml-py is not installed",
            effect="broken or slow GPUs would not be noticed",
            remedy='pip install nvidia-ml-py, or set watchdog.hardware.provider = "none"',
        )
    return None if name == "none" else name


def serve(name: str) -> None:
    """Answer every line of input with a look, until the input ends."""
    source: Provider | None = None
    for _ in sys.stdin:
        try:
            source = source or provider(name)
            answer: dict[str, Any] = {"devices": [asdict(device) for device in source.look()]}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
