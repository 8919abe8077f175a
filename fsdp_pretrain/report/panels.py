"""Which panels a page has, and the columns in each; `report.js` draws them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Scale = Literal["linear", "log", "zero"]
"""Of a y axis; `zero`: linear from 0 on."""


@dataclass(frozen=True)
class Trace:
    """A column in a panel. `dots`: measured at few steps, so every value is shown."""

    column: str
    label: str
    dots: bool = False


@dataclass(frozen=True)
class Panel:
    """A panel with one y axis.

    Attributes:
        unit: how its values are shown: "" (numbers), count, seconds, bytes, share.
        brief: only worth a panel if a value changes; else it is mentioned in a line.
    """

    name: str
    title: str
    traces: list[Trace]
    scale: Scale = "linear"
    unit: str = ""
    about: str = ""
    brief: bool = False


@dataclass(frozen=True)
class PanelLayout:
    """The panels of a page, and every column in them."""

    panels: list[Panel]
    columns: list[str] = field(default_factory=list)


def lay_out(columns: Iterable[str]) -> PanelLayout:
    """The panels for runs with these columns: named as in `StepColumns`, those by source as `loss/NAME`."""
    known = list(dict.fromkeys(columns))
    sources = [name for name in known if name.startswith("loss/")]
    heldout = [Trace(name, f"held-out {_source(name)}", dots=True) for name in known if name.startswith("heldout/")]
    shares = [Trace(name, _source(name)) for name in known if name.startswith("share/")]
    step_parts = (
        ("iteration", "whole step"),
        ("forward_backward", "forward and backward"),
        ("optimizer", "optimiser"),
        ("data", "waiting for data"),
        ("checkpoint", "waiting for a save"),
        ("heldout", "held-out loss"),
        ("other", "other"),
    )
    losses = [Trace(name, _source(name)) for name in sources]
    groups = {
        kind: [Trace(name, _source(name), dots=True) for name in known if name.startswith(f"{kind}/")]
        for kind in ("gradient", "update", "second_moment")
    }
    panels = [
        Panel("loss", "Loss", [Trace("loss", "training"), *heldout], "log", about="nats per token"),
        Panel("sources", "Loss by source", losses, "log", about="nats per token"),
        Panel("grad_norm", "Gradient norm", [Trace("grad_norm", "before clipping")], "log"),
        Panel("gradient", "Gradient norm by group", groups["gradient"], "log", about="before clipping"),
        Panel("update", "Update of the weights by group", groups["update"], "log", about="relative to their norm"),
        Panel("moment", "Largest second moment by group", groups["second_moment"], "log", about="Adam's exp_avg_sq"),
        Panel("lr", "Learning rate", [Trace("lr", "applied")], "zero"),
        Panel("batch", "Batch", [Trace("batch", "samples")], "zero", "count", "of a step", brief=True),
        Panel("length", "Sequence length", [Trace("length", "tokens")], "zero", "count", "of a sample", brief=True),
        Panel("shares", "Shares of the sources", shares, "zero", "share", "as planned", brief=True),
        Panel("shrink", "Embedding shrink", [Trace("embedding_shrink", "factor")], "zero", brief=True),
        Panel("scale", "Loss scale", [Trace("loss_scale", "fp16")], "log", "count", brief=True),
        Panel("seconds", "Step time by part", [Trace(*part) for part in step_parts], "log", "seconds"),
        Panel("tokens", "Throughput", [Trace("tokens_per_second", "tokens/s")], "zero", "count", "of all ranks"),
        Panel("mfu", "MFU", [Trace("mfu", "MFU")], "zero", "share", "model FLOPs utilisation"),
        Panel("memory", "Memory", [Trace("memory", "in use")], "zero", "bytes", "on the device of rank 0"),
    ]
    if len(sources) < 2:
        panels = [panel for panel in panels if panel.name not in ("sources", "shares")]
    wanted = dict.fromkeys(trace.column for panel in panels for trace in panel.traces)
    return PanelLayout(panels, [column for column in wanted if column in known])


def _source(column: str) -> str:
    return column.partition("/")[2]
