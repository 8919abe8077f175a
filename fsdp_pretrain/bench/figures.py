"""What the table of `parts` shows of the output of a part. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_pretrain.plan.trials import read_result
from fsdp_pretrain.units import human_bytes, human_count

from .ranges import show_range

COLUMNS = ("step", "tokens/s", "MFU", "memory", "further")


@dataclass(frozen=True)
class Figures:
    """One row.

    Attributes:
        of: what was measured, if a part measures several things.
    """

    of: str = ""
    step: str = ""
    rate: str = ""
    mfu: str = ""
    memory: str = ""
    further: str = ""

    def cells(self) -> list[str]:
        """In the order of `COLUMNS`."""
        cells = [self.step, self.rate, self.mfu, self.memory, self.further]
        return [cell.replace("|", "/").replace("\n", " ") for cell in cells]


def figures(output: str) -> list[Figures]:
    """The rows for an output: JSON of a benchmark, or text, whose last line counts. Empty if there is none."""
    found = read_result(output)
    if found is None:
        lines = [line.strip("= ") for line in output.splitlines() if line.strip("= ")]
        return [Figures(further=lines[-1])] if lines else []
    try:
        return next((read(found) for key, read in _READERS.items() if key in found), [])
    except (AttributeError, LookupError, TypeError, ValueError):
        return []  # not what a benchmark prints: the file itself is there to read


def _of_steps(found: dict[str, Any]) -> list[Figures]:
    least, most = found["iteration_seconds_min_max"]
    return [
        Figures(
            step=f"{show_range([found['seconds']['iteration'], least, most])}s",
            rate=human_count(found["tokens_per_second"]),
            mfu=_percent(found["mfu"]),
            memory=human_bytes(found["memory_bytes"]),
        )
    ]


def _of_peers(found: dict[str, Any]) -> list[Figures]:
    rows = [
        Figures(
            of=name,
            step=f"{show_range(side['seconds'])}s",
            rate=human_count(side["tokens_per_second"][0]),
            mfu=_percent(side["mfu"] and side["mfu"][0]),
            memory=human_bytes(side["memory_bytes"]),
            further=f"{show_range(side['seconds_ratio'])} of ours" if side["seconds_ratio"] and name != "ours" else "",
        )
        for name, side in found["sides"].items()
    ]
    rows += [Figures(of=name, further=f"skipped: {reason}") for name, reason in found["skipped"].items()]
    return rows + [
        Figures(of=name, further=f"failed: {text.splitlines()[-1]}") for name, text in found["failed"].items()
    ]


def _of_saves(found: dict[str, Any]) -> list[Figures]:
    show = {name: show_range(values) for name, values in found["seconds"].items()}
    text = (
        f"{human_bytes(found['bytes'])} in {show['save']}s, verified; bandwidth {show_range(found['bandwidth_ratio'])} "
        f"of a plain file's; in the background: wait {show['stall']}s, and slower steps {show['excess']}s"
    )
    return [Figures(further=text)]


def _of_watchdog(found: dict[str, Any]) -> list[Figures]:
    ratio = show_range(found["step_ratio"], 4)
    text = (
        f"steps {ratio} of those without; a heartbeat {found['heartbeat_microseconds']:.2f} us; "
        f"agent {found['agent']['core_share']:.2%} of a core"
    )
    return [Figures(step=f"{found['step_seconds']:.3g}s", further=text)]


def _of_features(found: dict[str, Any]) -> list[Figures]:
    text = (
        f"everything on {show_range(found['step_ratio'], 4)} of everything off, processor "
        f"{show_range(found['processor_ratio'], 4)}; a save costs {show_range(found['seconds_per_save'])}s"
    )
    return [Figures(step=f"{show_range(found['step_seconds']['off'])}s", further=text)]


def _of_kernels(found: dict[str, Any]) -> list[Figures]:
    rows = []
    for name, seconds in found["kernel_seconds"].items():
        ratio = found["ratio"].get(name)
        further = "" if ratio is None else f"{show_range(ratio)} of the first"
        rows.append(Figures(of=name, step=f"{show_range(seconds)}s", further=further))
    return rows + [Figures(of=name, further=f"not here: {reason}") for name, reason in found["missing"].items()]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


_READERS = {
    "sides": _of_peers,
    "bandwidth_ratio": _of_saves,
    "heartbeat_microseconds": _of_watchdog,
    "seconds_per_save": _of_features,
    "kernel_seconds": _of_kernels,
    "iteration_seconds_min_max": _of_steps,
}
"""By a key that only this benchmark's JSON has."""
