"""What is known of devices, by the driver's name: data sheets, and the best matrix product that was measured. No torch.

Dense bf16 FLOP/s (without sparsity), memory as the driver shows it, and bandwidths in one direction. `matmul` is the
best rate of bf16 products that Stas Bekman's "Maximum Achievable Matmul FLOPS" table has (github.com/stas00/
ml-engineering, compute/accelerator, as of 2026); None: not measured. It matters because newer devices come less close
to their peak: 87% on an A100, 80% on an H100, 51% on an MI300X.
"""

from __future__ import annotations

from dataclasses import dataclass

_UNMEASURED = 0.8
"""Share of the peak that a device's best product is assumed to reach if nobody measured it."""
_PCIE4, _PCIE5 = 32e9, 64e9
_OLDER = {"throttles": False, "float8": False}


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        peak: FLOP/s of dense bf16 matrix products.
        memory: GiB.
        bandwidth: bytes/s of its memory.
        link: bytes/s to the other devices of the node.
        network: bytes/s of the adapter that is usually built in per device, to other nodes.
        host: bytes/s to host memory.
        matmul: FLOP/s of the best product measured, or None.
        throttles: it cannot hold that rate for long, because it runs into its power limit; so do those after Ampere.
        float8: its matrix products take float8 as `train.precision = "bf16+fp8"` uses it.
    """

    peak: float
    memory: int
    bandwidth: float
    link: float
    network: float
    host: float
    matmul: float | None = None
    throttles: bool = True
    float8: bool = True

    @property
    def bytes(self) -> int:
        """Of its memory."""
        return self.memory * 2**30

    @property
    def achievable(self) -> float:
        """FLOP/s of the best matrix product."""
        return self.matmul or _UNMEASURED * self.peak


_DEVICES = {
    "NVIDIA A100-SXM4-40GB": Device(312e12, 40, 1.555e12, 300e9, 25e9, _PCIE4, 271.2e12, **_OLDER),
    "NVIDIA A100-PCIE-40GB": Device(312e12, 40, 1.555e12, _PCIE4, 25e9, _PCIE4, 252.9e12, **_OLDER),
    "NVIDIA A100": Device(312e12, 80, 2.039e12, 300e9, 25e9, _PCIE4, 271.2e12, **_OLDER),
    "NVIDIA A100 80GB PCIe": Device(312e12, 80, 1.935e12, _PCIE4, 25e9, _PCIE4, 252.9e12, **_OLDER),
    "NVIDIA A800": Device(312e12, 80, 2.039e12, 200e9, 25e9, _PCIE4, 271.2e12, **_OLDER),
    "NVIDIA A40": Device(149.7e12, 48, 0.696e12, _PCIE4, 25e9, _PCIE4, **_OLDER),
    "NVIDIA L40S": Device(362e12, 48, 0.864e12, _PCIE4, 25e9, _PCIE4),
    "NVIDIA H100 PCIe": Device(756e12, 80, 2.0e12, _PCIE5, 50e9, _PCIE5),
    "NVIDIA H100 NVL": Device(835e12, 94, 3.9e12, _PCIE5, 50e9, _PCIE5),
    "NVIDIA H100": Device(989e12, 80, 3.35e12, 450e9, 50e9, _PCIE5, 794.5e12),
    "NVIDIA H800": Device(989e12, 80, 3.35e12, 200e9, 50e9, _PCIE5, 794.5e12),
    "NVIDIA H200": Device(989e12, 140, 4.8e12, 450e9, 50e9, _PCIE5, 794.5e12),
    "NVIDIA GH200": Device(989e12, 95, 4.0e12, 450e9, 50e9, 450e9, 828.6e12),
    "NVIDIA B200": Device(2250e12, 180, 8.0e12, 900e9, 50e9, _PCIE5, 1745e12),
    "NVIDIA GB200": Device(2500e12, 185, 8.0e12, 900e9, 50e9, 450e9),
    "AMD Instinct MI250X": Device(191.5e12, 64, 1.6e12, 100e9, 25e9, _PCIE4, **_OLDER),
    "AMD Instinct MI300X": Device(1307e12, 192, 5.3e12, 448e9, 50e9, _PCIE5, 668.4e12, float8=False),
}
"""By prefix of the device name. All of an MI250X is of one of its two dies, which torch sees as a device."""


def find(name: str) -> Device | None:
    """The device with this name, or None if unknown; the longest matching prefix counts."""
    matches = [prefix for prefix in _DEVICES if name.startswith(prefix)]
    return _DEVICES[max(matches, key=len)] if matches else None


def names() -> list[str]:
    """The prefixes by which devices are known."""
    return list(_DEVICES)
