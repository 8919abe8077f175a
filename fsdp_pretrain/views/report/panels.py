"""Which panels of curves a page has, and the columns in each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Trace:
    """A column in a panel.

    Attributes:
        dots: measured at few steps, so every value is shown.
        faint: behind the next one, in its colour.
    """

    column: str
    label: str
    dots: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Panel:
    """A panel with one y axis.

    Attributes:
        scale: scale of its axis; `zero`: linear from 0 on.
        unit: how its values are shown: "" (numbers), count, s, GiB, share.
        brief: left out unless a value changes.
        height: in pixels.
    """

    name: str
    title: str
    traces: list[Trace]
    scale: Literal["log", "zero"]
    unit: str = ""
    about: str = ""
    brief: bool = False
    height: int = 220


def lay_out(columns: Iterable[str], *, averaged: int = 1) -> list[Panel]:
    """The panels for runs with these columns: named as in `StepColumns`, those by source as `loss/NAME`.

    `averaged`: steps of a mean in the column `loss_mean`.
    """
    present = list(dict.fromkeys(columns))

    def of(kind: str, dots: bool = False, prefix: str = "") -> list[Trace]:
        names = [name for name in present if name.startswith(f"{kind}/")]
        return [Trace(name, prefix + name.partition("/")[2], dots) for name in names]

    losses, several = [Trace("loss", "training")], len(of("loss")) > 1
    if averaged > 1:
        losses = [Trace("loss", "training", faint=True), Trace("loss_mean", f"mean of {averaged} steps")]
    losses += of("heldout", True, "held-out ")
    parts = {
        "iteration": "whole step", "forward_backward": "forward and backward", "optimizer": "optimiser",
        "data": "waiting for data", "checkpoint": "waiting for a save", "heldout": "held-out loss", "other": "other",
    }  # fmt: skip
    return [
        Panel("loss", "Loss", losses, "log", about="nats per token", height=400),
        Panel("sources", "Loss by source", of("loss") if several else [], "log", about="nats per token"),
        Panel("grad_norm", "Gradient norm", [Trace("grad_norm", "before clipping")], "log"),
        Panel("gradient", "Gradient norm by group", of("gradient", True), "log", about="before clipping"),
        Panel("moment", "Largest second moment by group", of("second_moment", True), "log", about="Adam's exp_avg_sq"),
        Panel("lr", "Learning rate", [Trace("lr", "applied")], "zero"),
        Panel("batch", "Batch", [Trace("batch", "samples")], "zero", "count", "of a step", brief=True),
        Panel("length", "Sequence length", [Trace("length", "tokens")], "zero", "count", "of a sample", brief=True),
        Panel(
            "shares", "Shares of the sources", of("share") if several else [], "zero", "share", "planned", brief=True
        ),
        Panel("shrink", "Embedding shrink", [Trace("embedding_shrink", "factor")], "zero", brief=True),
        Panel("scale", "Loss scale", [Trace("loss_scale", "fp16")], "log", "count", brief=True),
        Panel("seconds", "Step time by part", [Trace(*part) for part in parts.items()], "log", "s"),
        Panel("tokens", "Throughput", [Trace("tokens_per_second", "tokens/s")], "zero", "count", "of all ranks"),
        Panel("mfu", "MFU", [Trace("mfu", "MFU")], "zero", "share", "model FLOPs utilisation"),
        Panel("observed", "Your observers", of("observed", True), "zero", about="PACKAGE:PART/NAME"),
        Panel("memory", "Memory", [Trace("memory", "in use")], "zero", "GiB", "on the device of rank 0"),
    ]
